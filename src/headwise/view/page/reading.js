// The text. Point at a word: the words it attends to are shaded, those that attend to it are underlined, with numbers
// below.

const BLOCK = 256; // tokens per block of text; the browser skips the layout of blocks that are not visible

class Reading {
  constructor(app) {
    this.app = app;
    this.text = el("div", { class: "text", tabindex: "0", role: "listbox", "aria-label": "The text, word by word. Arrow keys move, Enter locks a word.", dir: "auto" });
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
    this.text.addEventListener("pointerleave", () => this.app.locked() === null || this.show(this.app.locked()));
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
    const tokens = manifest.keys ? null : manifest.tokens;
    const parts = manifest.keys
      ? [el("h3", { text: "Queries (attending tokens)" }), ...this.blocks(manifest.tokens, "query"), el("h3", { text: "Keys (attended tokens)" }), ...this.blocks(manifest.keys, "key")]
      : this.blocks(tokens, "both");
    fill(this.text, ...parts);
    // Tokens without spaces, such as numbers or a list of words, would run together.
    this.text.classList.toggle("spaced", !manifest.tokens.some((token) => /\s/.test(token)));
    this.words = Array.from(this.text.querySelectorAll("[data-i]"));
    this.both = !manifest.keys;
    this.shaded = [];
    this.at = null;
    this.show(this.app.locked());
  }

  blocks(tokens, side) {
    const made = [];
    for (let start = 0; start < tokens.length; start += BLOCK) {
      const block = el("div", { class: "block" });
      tokens.slice(start, start + BLOCK).forEach((token, i) => {
        const word = el("span", { class: "word", "data-i": start + i, "data-side": side, dir: "auto", text: readable(token) });
        block.append(word);
        if (token.includes("\n")) block.append(el("br"));
      });
      made.push(block);
    }
    return made;
  }

  indexOf(target) {
    const word = target.closest?.("[data-i]");
    return word && word.dataset.side !== "key" ? Number(word.dataset.i) : null;
  }

  query(i) {
    return this.words[i];
  }

  keyWord(i) {
    return this.both ? this.words[i] : this.words[this.app.side.manifest.T + i];
  }

  over(event) {
    const at = this.indexOf(event.target);
    if (at !== null && this.app.locked() === null) this.show(at);
  }

  key(event) {
    const last = this.app.side.manifest.T - 1;
    const from = this.at ?? 0;
    const to = { ArrowRight: from + 1, ArrowLeft: from - 1, ArrowDown: from + 10, ArrowUp: from - 10, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      this.app.lock(null);
      this.show(clamp(to, 0, last));
      this.reveal(this.at);
    } else if (event.key === "Enter" || event.key === " ") this.app.lock(this.app.locked() === from ? null : from);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  reveal(i) {
    this.query(i)?.scrollIntoView({ block: "nearest", behavior: prefersStill() ? "auto" : "smooth" });
  }

  // Shade the words around one word; null clears.
  async show(at) {
    this.at = at;
    const turn = (this.turn = (this.turn || 0) + 1);
    if (at === null) {
      this.clear();
      return this.invite();
    }
    const subject = this.app.subject();
    const [row, column] = await Promise.all([this.app.data.row(subject, at), this.both ? this.app.data.column(subject, at) : null]);
    if (turn !== this.turn) return;
    this.clear();
    this.mark(this.query(at), "here");
    if (row) row.keys.forEach((key, i) => this.shade(this.keyWord(key), "--attends", row.weights[i]));
    if (column) column.queries.forEach((query, i) => this.shade(this.query(query), "--attended", column.weights[i]));
    this.tell(at, subject, row, column);
  }

  clear() {
    for (const word of this.shaded) {
      word.classList.remove("here", "lit");
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

  shade(word, name, weight) {
    if (!word || weight < 0.004) return; // less than one step of color
    this.mark(word, "lit");
    word.style.setProperty(name, `${Math.round(100 * Math.sqrt(weight))}%`);
  }

  invite() {
    const subject = this.app.subject();
    const { manifest } = this.app.side;
    fill(this.note, el("p", { class: "soft" }, "Point at a word, or press Tab and the arrow keys, to see what it attends to and what attends to it in ", el("b", { text: `head ${subject.name(manifest)}` }), ` (${subject.reading(manifest)}).`), this.pairs());
  }

  // The strongest pairs of all heads; within one text, only those further back.
  pairs() {
    const { manifest } = this.app.side;
    const keys = manifest.keys || manifest.tokens;
    if (!manifest.pairs.length) return null;
    return el("div", { class: "pairs" }, el("h3", { text: manifest.keys ? "Strongest pairs" : "Strongest pairs further back" }), el("ul", {}, ...manifest.pairs.map((pair) =>
      el("li", {}, el("button", { type: "button", class: "pair", onclick: () => this.app.openPair(pair) },
        el("bdi", { text: wordOf(manifest.tokens[pair.query]) }), " → ", el("bdi", { text: wordOf(keys[pair.key]) }), el("span", { class: "figure", text: `${pair.weight.toFixed(2)}` }), el("span", { class: "soft", text: ` ${pair.layer}.${pair.head}` }))))));
  }

  tell(at, subject, row, column) {
    const { manifest } = this.app.side;
    const keys = manifest.keys || manifest.tokens;
    const locked = this.app.locked() === at;
    const title = el("p", { class: "details-title" }, el("bdi", { class: "token", text: wordOf(manifest.tokens[at], 24) }), el("span", { class: "soft", text: ` ${at} · head ${subject.name(manifest)} · ${locked ? "locked" : "click to lock"}` }), this.repeats(at));
    const none = (text) => el("p", { class: "soft", text });
    const list = (names, places, weights, whole) => el("ol", { class: "list" }, ...weights.slice(0, 5).map((weight, i) => this.line(names[places[i]], places[i], weight)), whole === false ? el("li", { class: "soft", text: "from the 8 largest weights of each row" }) : null);
    if (!row) return fill(this.note, title, this.missing(subject));
    return fill(this.note, title, el("div", { class: "two" },
      el("div", { class: "to" }, el("h3", { text: "attends to" }), row.keys.length ? list(keys, row.keys, row.weights, row.whole) : none("no visible key")),
      this.both ? el("div", { class: "from" }, el("h3", { text: "attended to by" }), column ? (column.queries.length ? list(manifest.tokens, column.queries, column.weights, column.whole) : none(column.whole === false ? "not among the 8 largest weights of any row" : "no query")) : none("")) : null));
  }

  // The heads whose rows are in the file.
  missing(subject) {
    const { manifest } = this.app.side;
    const others = this.app.headsWithRows().slice(0, 12);
    const open = (place) => el("button", { type: "button", class: "chip", text: place, onclick: () => this.app.store.set({ head: place }) });
    return el("p", { class: "soft" }, `The rows of ${subject.single ? `head ${subject.name(manifest)}` : "an average"} did not fit into this file. `, others.length ? "Heads with rows: " : "", ...others.map(open));
  }

  line(token, place, weight) {
    const bar = el("span", { class: "line-bar" });
    bar.style.setProperty("--share", `${100 * weight}%`);
    return el("li", {}, bar, el("span", { class: "line-text" }, el("bdi", { text: wordOf(token, 16) }), el("span", { class: "soft", text: ` ${place}` })), el("span", { class: "figure", text: weightText(weight) }));
  }

  repeats(at) {
    const { tokens } = this.app.side.manifest;
    const others = [];
    tokens.forEach((token, i) => token === tokens[at] && i !== at && others.push(i));
    if (!others.length) return null;
    const next = others.find((i) => i > at) ?? others[0];
    return el("button", { type: "button", class: "chip", text: `${plural(others.length, "more time")} ↷`, title: "Go to the next occurrence", onclick: () => this.go(next) });
  }

  go(i) {
    this.app.lock(i);
    this.reveal(i);
  }

  search() {
    const wanted = this.find.value.trim().toLowerCase();
    for (const word of this.matches || []) word.classList.remove("match");
    this.matches = wanted ? this.words.filter((word) => word.dataset.side !== "key" && word.textContent.toLowerCase().includes(wanted)) : [];
    for (const word of this.matches) word.classList.add("match");
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
