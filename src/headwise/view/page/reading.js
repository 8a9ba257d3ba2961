// The text. Point at a word: the words it attends to are shaded, those that attend to it are underlined, with numbers
// below.

const SPECIAL = /^(<\|?\w+\|?>|\[[A-Z]+\])$/; // tokens that are not part of the text
const BLOCK = 256; // tokens per block of text; the browser skips the layout of blocks that are not visible

class Reading {
  constructor(app) {
    this.app = app;
    this.text = el("div", { class: "text", tabindex: "0", role: "listbox", "aria-label": "The text, word by word. Arrow keys move, Enter keeps a word." });
    this.note = el("div", { class: "details", "aria-live": "polite" });
    this.find = el("input", { type: "search", class: "find", placeholder: "Find a word", "aria-label": "Find a word in the text" });
    this.found = el("span", { class: "found", "aria-live": "polite" });
    this.root = el("section", { class: "reading", "aria-label": "The text" },
      el("div", { class: "find-row" }, this.find, this.found), this.text, this.note);
    this.words = [];
    this.shaded = [];
    this.at = null;
    this.listen();
  }

  listen() {
    this.text.addEventListener("pointerover", (event) => this.over(event));
    this.text.addEventListener("pointerleave", () => this.app.pointAt(this.app.locked()));
    this.text.addEventListener("click", (event) => {
      const at = this.indexOf(event.target);
      if (at !== null) this.app.lock(at === this.app.locked() ? null : at);
    });
    this.text.addEventListener("focus", () => this.at === null && this.show(this.app.locked() ?? 0));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.find.addEventListener("input", () => this.search());
    this.find.addEventListener("keydown", (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1));
  }

  build() {
    const { manifest } = this.app.side;
    const sides = [this.blocks(manifest.tokens, manifest.starts, manifest.keys ? "query" : "both")];
    if (manifest.keys) sides.push(this.blocks(manifest.keys, manifest.key_starts, "key"));
    const [queries, keys] = sides;
    fill(this.text, ...(keys ? [el("h3", { text: "Queries (the words that attend)" }), ...queries.parts, el("h3", { text: "Keys (the words they attend to)" }), ...keys.parts] : queries.parts));
    // Numbers, or a list of words that no model has read, would run together.
    const apart = manifest.model ? /^\d+$/ : /^\S+$/;
    this.text.classList.toggle("spaced", manifest.tokens.every((token) => apart.test(token)));
    [this.words, this.keyWords] = [queries.words, (keys || queries).words];
    this.both = !manifest.keys;
    this.shaded = [];
    this.at = null;
    this.show(this.app.locked());
  }

  // The elements of tokens, in blocks; tokens that make up one character share an element, which stands for the last.
  blocks(tokens, starts, side) {
    const [parts, words] = [[], []];
    tokens.forEach((token, i) => {
      if (i % BLOCK === 0) parts.push(el("div", { class: "block", role: "presentation" }));
      if (starts && starts[i] !== i) {
        words[i] = words[starts[i]];
        words[i].dataset.i = i;
        return;
      }
      words[i] = el("span", { class: SPECIAL.test(token.trim()) ? "word special" : "word", id: `${side}-${i}`, role: "option", "aria-selected": "false", "data-i": i, "data-side": side, text: readable(token) });
      parts.at(-1).append(words[i]);
      if (token.includes("\n")) parts.at(-1).append(el("br"));
    });
    return { parts, words };
  }

  // Its lower edge is in the window, where it stands beside the pictures.
  fit() {
    if (this.root.isConnected) this.root.style.maxHeight = innerWidth > 860 ? `${Math.max(360, this.app.roomFor(this.root) - 18)}px` : "";
  }

  indexOf(target) {
    const word = target.closest?.("[data-i]");
    return word && word.dataset.side !== "key" ? Number(word.dataset.i) : null;
  }

  query(i) {
    return this.words[i];
  }

  keyWord(i) {
    return this.keyWords[i];
  }

  over(event) {
    const at = this.indexOf(event.target);
    if (at !== null && this.app.locked() === null) this.app.pointAt(at);
  }

  key(event) {
    wordKey(this.app, event, this.at ?? 0, { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }, () => this.reveal(this.at));
  }

  // Scroll the text, not the page, until a word is in view.
  reveal(i) {
    const word = this.query(i);
    if (!word) return;
    const [box, there] = [this.text.getBoundingClientRect(), word.getBoundingClientRect()];
    if (there.top < box.top || there.bottom > box.bottom) this.text.scrollTop += there.top - box.top - box.height / 2;
  }

  // Follow the window of the map.
  follow(first, last) {
    if (this.app.locked() === null && !this.inView(first, last)) this.reveal(Math.min(first, this.words.length - 1));
  }

  inView(first, last) {
    const box = this.text.getBoundingClientRect();
    const seen = (i) => this.query(clamp(i, 0, this.words.length - 1)).getBoundingClientRect();
    return seen(first).top < box.bottom && seen(last).bottom > box.top;
  }

  // Shade the words around one word; null clears.
  async show(at) {
    this.at = at;
    const turn = (this.turn = (this.turn || 0) + 1);
    if (at === null) {
      this.clear();
      this.app.atlas.rank(null);
      return this.invite();
    }
    const subject = this.app.subject();
    const [reach, row, column, ranking] = await tracked(Promise.all([this.app.data.reach(subject), this.app.data.row(subject, at), this.both ? this.app.data.column(subject, at) : null, this.app.data.source(new Subject(0, 0, 0)).ranking(at)]));
    if (turn !== this.turn) return undefined;
    this.clear();
    this.mark(this.query(at), "here");
    if (this.app.locked() === at) this.reveal(at);
    this.query(at)?.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", this.query(at)?.id);
    const seen = (key, span) => (span ? range(key, Math.min(key + span, this.keyWords.length)).filter((each) => reach.sees(at, each, 1)) : [key]);
    if (row) this.shadeAll(row.keys.flatMap((key, i) => seen(key, row.span).map((each) => [this.keyWord(each), row.weights[i]])), "--attends");
    if (column) this.shadeAll(column.queries.map((query, i) => [this.query(query), column.weights[i]]), "--attended");
    this.app.atlas.rank(ranking || null, at);
    return this.tell(at, subject, row, column, ranking);
  }

  clear() {
    for (const word of this.shaded) {
      word.classList.remove("here", "lit");
      word.setAttribute("aria-selected", "false");
      word.style.removeProperty("--attends");
      word.style.removeProperty("--attended");
    }
    this.shaded = [];
  }

  mark(word, name) {
    if (!word) return;
    word.classList.add(name);
    this.shaded.push(word);
  }

  // Several tokens may share a word: their weights add up.
  shadeAll(weights, name) {
    const sums = new Map();
    for (const [word, weight] of weights) sums.set(word, (sums.get(word) || 0) + weight);
    for (const [word, weight] of sums) {
      if (!word || weight < 0.004) continue; // less than one step of color
      this.mark(word, "lit");
      word.style.setProperty(name, `${Math.round(100 * Math.sqrt(Math.min(1, weight)))}%`);
    }
  }

  invite() {
    const subject = this.app.subject();
    const { manifest } = this.app.side;
    fill(this.note, el("p", { class: "soft" }, `Point at a word to see what it attends to${manifest.keys ? "" : ", and what attends to it"}, in `, el("b", { text: subject.single ? `head ${subject.name(manifest)}` : `the ${subject.name(manifest)}` }), `, which ${subject.about(manifest)}.`), this.pairs());
  }

  // The largest weights of all heads, as `View.pairs` chooses them.
  pairs() {
    const { manifest } = this.app.side;
    if (!manifest.pairs.length) return null;
    const but = manifest.keys ? "the first token" : "the first, the previous and the same token";
    return el("div", { class: "pairs" }, el("h3", { text: "Largest attention weights of all heads" }), el("p", { class: "soft note", text: `besides ${but}; each pair of positions once${this.app.without ? "; all tokens count" : ""}` }), el("ul", {}, ...manifest.pairs.map((pair) =>
      el("li", {}, el("button", { class: "pair", onclick: () => this.app.openPair(pair) },
        el("span", { class: "pair-words" }, this.placed(manifest.labels, pair.query), " → ", this.placed(manifest.keyLabels, pair.key)), el("span", { class: "figure", text: `${pair.weight.toFixed(2)}` }), soft(` head ${headName(manifest, pair.layer, pair.head)}`))))));
  }

  // A word and its position, which tells it from other copies.
  placed(labels, at) {
    const place = labels[at] === String(at) ? null : el("span", { class: "soft place", text: ` ${count(at)}` });
    return el("span", {}, el("bdi", { text: wordOf(labels[at]) }), place);
  }

  tell(at, subject, row, column, ranking) {
    const { manifest } = this.app.side;
    const locked = this.app.locked() === at;
    const title = el("p", { class: "details-title" }, el("bdi", { class: "token", text: wordOf(manifest.labels[at], 24) }), soft(` ${count(at)}${this.numberOf?.(at) ?? ""} · ${subject.title(manifest).toLowerCase()} · ${locked ? "kept; click it again to let go" : "click to keep"}`), this.repeats(at));
    const none = (text) => el("p", { class: "soft", text });
    const list = (names, places, { weights, errors, whole, span = 1 }) => el("ol", { class: "list" }, ...weights.slice(0, 5).map((weight, i) => this.line(names, places[i], weight, span, errors?.[i])), whole === false && span === 1 ? el("li", { class: "soft", text: "from the 8 largest weights of each row" }) : null);
    if (!row) return fill(this.note, title, none("The numbers of this average are not in the file."), this.ranked(ranking, at));
    const [taking, giving] = this.app.measure === "weights" ? ["attends to", "attended to by"] : ["takes most from", "gives most to"];
    const to = el("div", { class: "to" }, el("h3", { text: taking }), row.span > 1 ? none(averageText(row.span, at, manifest.T)) : null, row.keys.length ? list(manifest.keyLabels, row.keys, row) : none("nothing: no key is visible"));
    const from = this.both && el("div", { class: "from" }, el("h3", { text: giving }), !column ? none("not in this file") : column.queries.length ? list(manifest.labels, column.queries, column) : none(column.whole === false ? "not among the 8 largest weights of any row" : "nothing"));
    return fill(this.note, title, el("div", { class: from ? "two" : "one" }, to, from || null), this.ranked(ranking, at));
  }

  // The heads that attend most from this word, over the whole atlas.
  ranked(ranking, at) {
    if (!ranking?.length) return null;
    const { manifest } = this.app.side;
    const open = ({ place, key, weight, error, span }) => el("li", {}, el("button", { class: "pair", onclick: () => this.app.store.set({ head: place }) },
      el("b", { text: new Subject(0, ...place.split(".").map(Number)).name(manifest) }), " → ", el("bdi", { text: span > 1 ? groupText(key, span, manifest.S) : wordOf(manifest.keyLabels[key], 16) }), span > 1 ? null : el("span", { class: "soft place", text: ` ${count(key)}` }), el("span", { class: "figure", text: weight.toFixed(digitsOf(error, 2)) })));
    return el("div", { class: "ranked" }, el("h3", { text: `Heads that ${this.app.taking}, besides the first token` }), ranking[0].span > 1 ? el("p", { class: "soft note", text: averageText(ranking[0].span, at, manifest.T) }) : null, el("ol", {}, ...ranking.slice(0, RANKED).map(open)));
  }

  line(names, place, weight, span, error) {
    const name = span > 1 ? `${wordOf(names[place], 10)} … ${wordOf(names[Math.min(names.length, place + span) - 1], 10)}` : wordOf(names[place], 16);
    const bar = el("span", { class: "line-bar" });
    bar.style.setProperty("--share", `${100 * clamp(weight, 0, 1)}%`);
    return el("li", {}, bar, el("span", { class: "line-text" }, el("bdi", { text: name }), soft(` ${count(place)}`)), el("span", { class: "figure", text: weightText(weight, error) }));
  }

  repeats(at) {
    const { tokens } = this.app.side.manifest;
    const others = [];
    tokens.forEach((token, i) => token === tokens[at] && i !== at && others.push(i));
    if (!others.length) return null;
    const next = others.find((i) => i > at) ?? others[0];
    return el("button", { class: "chip", text: `${plural(others.length, "more time")} ↷`, title: "Go to the next occurrence", onclick: () => this.go(next) });
  }

  go(i) {
    this.app.lock(i);
    this.reveal(i);
  }

  // The text is searched as it reads, whatever tokens it is made of; what is found is each first word with those after it.
  search() {
    const wanted = this.find.value.trim().toLowerCase();
    const words = [...new Set(this.words)];
    for (const word of words) word.classList.remove("match");
    const gap = this.text.classList.contains("spaced") ? " " : "";
    let text = "";
    const starts = words.map((word) => {
      const from = text.length;
      text += word.textContent.toLowerCase() + gap;
      return from;
    });
    this.matches = [];
    let i = 0;
    for (let at = wanted ? text.indexOf(wanted) : -1; at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      while (starts[i + 1] <= at) i++;
      if (this.matches.at(-1) !== words[i]) this.matches.push(words[i]);
      for (let k = i; starts[k] < at + wanted.length; k++) words[k].classList.add("match");
    }
    this.place = -1;
    this.found.textContent = wanted ? `${count(this.matches.length)} found` : "";
  }

  next(step) {
    if (!this.matches?.length) return;
    this.place = (this.place + step + this.matches.length) % this.matches.length;
    this.found.textContent = `${this.place + 1} of ${count(this.matches.length)}`;
    this.go(Number(this.matches[this.place].dataset.i));
  }
}

// Keys that move among words, by so many, and keep one.
function wordKey(app, event, from, steps, reveal) {
  const by = { ...steps, Home: -Infinity, End: Infinity }[event.key];
  if (by) {
    app.lock(null);
    app.pointAt(clamp(from + by, 0, app.side.manifest.T - 1));
    reveal();
  } else if (/^(Enter| )$/.test(event.key) && from >= 0) app.lock(app.locked() === from ? null : from);
  else return;
  event.preventDefault();
  event.stopPropagation();
}
