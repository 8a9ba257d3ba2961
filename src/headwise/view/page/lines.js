// The text view: the words of the text twice, and a line from every word to the words that it attends to in one head.

const [CLOSE, WIDE] = [24, 34]; // pixels per word, for a long text and for a short one
const FAINTEST = 0.02; // weights below are not drawn, unless a word is chosen; the legend says so

class Lines {
  constructor(app) {
    this.app = app;
    this.canvas = el("canvas", { class: "lines-canvas", "aria-hidden": "true" });
    this.left = el("div", { class: "lines-words from-side" });
    this.right = el("div", { class: "lines-words to-side" });
    this.inner = el("div", { class: "lines-inner" }, this.left, this.canvas, this.right);
    this.box = el("div", { class: "lines-box", tabindex: "0", role: "group", "aria-label": "Words and what they attend to. Up and down move, Enter keeps a word." }, this.inner);
    this.bar = el("div", { class: "bar-row" });
    this.told = el("p", { class: "lines-tell", "aria-live": "polite" });
    this.root = el("section", { class: "lines", "aria-label": "The text with lines" }, this.bar, this.told, this.box);
    this.rows = new Map();
    this.at = null;
    [this.line, this.shift] = [CLOSE, 0];
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  listen() {
    this.box.addEventListener("scroll", () => this.draw());
    const query = (event) => {
      const word = event.target.closest?.(".lines-word");
      return word && word.dataset.side === "from" ? Number(word.dataset.i) : null;
    };
    this.box.addEventListener("pointerover", (event) => {
      const at = query(event);
      if (at !== null && this.app.locked() === null) this.app.pointAt(at);
    });
    this.box.addEventListener("pointerleave", () => this.app.locked() === null && this.app.pointAt(null));
    this.box.addEventListener("click", (event) => {
      const at = query(event);
      if (at !== null) this.app.lock(at === this.app.locked() ? null : at);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    wordKey(this.app, event, this.at ?? -1, { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }, () => this.reveal(this.at));
  }

  reveal(at) {
    const [top, height] = [at * this.line, this.box.clientHeight];
    if (top < this.box.scrollTop || top + this.line > this.box.scrollTop + height) this.box.scrollTop = top - height / 2;
  }

  // Rebuild for the head; the first token is left out unless the reader asks for it.
  build() {
    const { app } = this;
    this.rows.clear();
    this.span = app.data.spanOf(app.subject(), app.without ? "rest" : "mass"); // tokens that a number covers
    this.fit();
    this.toolbar();
    this.drawLegend();
    this.show(app.locked() ?? app.reading.at);
    requestAnimationFrame(() => (this.fit(), this.bring()));
  }

  // As high as the window allows, and words as far apart. On paper, whole rows, and which they are.
  fit() {
    if (!this.root.isConnected) return;
    const { manifest } = this.app.side;
    const [room, words] = [Math.max(320, this.app.roomFor(this.box) - 16), Math.max(manifest.T, manifest.S)];
    this.line = clamp(Math.floor((room - 18) / words), CLOSE, WIDE);
    this.inner.style.height = `${words * this.line}px`;
    const [{ top }, rows] = [this, Math.floor(room / this.line)];
    const part = this.app.printing && rows < words;
    const first = Math.min(Math.floor(top / this.line), words - rows);
    this.box.style.height = `${part ? rows * this.line + 2 : Math.min(room, words * this.line + 18)}px`;
    this.shift = part ? first * this.line : 0;
    this.inner.style.top = `${-this.shift}px`;
    this.box.scrollTop = part ? 0 : top;
    this.told.dataset.rows = part ? ` Words ${count(first)}–${count(first + rows - 1)} of ${count(words)}.` : "";
    this.draw();
  }

  recolor() {
    this.drawLegend();
    this.fit();
  }

  toolbar() {
    const { app } = this;
    const { manifest } = app.side;
    const subject = app.subject();
    const title = el("h2", { class: "subject" }, el("b", { text: subject.title(manifest) }), soft(` ${subject.about(manifest)}${app.stage.minus ? `; only the map compares it with ${app.stage.named(app.stage.minus)}` : ""}`));
    refill(this.bar, el("div", { class: "bar-line" }, app.stage.backButton(), title, app.stage.stepButtons()));
  }

  drawLegend() {
    const { app } = this;
    const left = app.without ? " without the first token" : "";
    const mark = left && this.span === 1 ? ". Percent beside a word: the share left out" : "";
    const lines = this.span > 1 ? `. A bar is a group of ${count(this.span)} words, a line what one group gives another on average: this file has no numbers of single tokens here` : `. Lines start at ${FAINTEST}; ${app.rowsOf(app.subject()) === "top" ? "this file has only the 8 largest weights of each row" : "a word that you point at has all"}`;
    fill(app.legend, legendOf(app.scale(), `${MEASURES[app.measure].unit}${left}${lines}${mark}`, app.dark));
  }

  show(at) {
    if (at !== this.at && at !== null && this.app.view === "words") this.box.setAttribute("aria-label", `${wordOf(this.app.side.manifest.labels[at], 24)}, ${at}`);
    this.at = at;
    this.tell();
    this.bring();
    this.draw();
  }

  // A word that was chosen elsewhere comes into view, with the word that it attends to most if both fit.
  async bring() {
    const { at } = this;
    if (at === null || !this.root.isConnected || this.box.matches(":hover, :focus-within")) return;
    this.reveal(at);
    const row = await this.row(at);
    const key = row?.keys[0] ?? at;
    const [first, last] = [Math.min(at, key) * this.line, (Math.max(at, key) + 1) * this.line];
    if (at === this.at && last - first <= this.box.clientHeight) this.box.scrollTop = clamp(this.box.scrollTop, last - this.box.clientHeight, first);
  }

  async tell() {
    const { app, at } = this;
    const { manifest } = app.side;
    if (at === null) return fill(this.told, soft(`Left: the ${this.span > 1 ? "groups of words" : "words"} that attend. Right: those that they attend to. Point at a word to see its lines alone.`));
    const row = await this.row(at);
    if (at !== this.at || !row) return undefined;
    const best = row.keys.map((key, i) => [key, row.weights[i]]).slice(0, 3);
    return fill(this.told, el("bdi", { class: "token to-word", text: wordOf(manifest.labels[at], 24) }), soft(row.span > 1 ? ` is one of ${groupText(at - (at % row.span), row.span, manifest.T)}, which attend on average to ` : " attends to "),
      ...best.flatMap(([key, weight], i) => [i ? ", " : null, el("bdi", { class: "token", text: row.span > 1 ? groupText(key, row.span, manifest.S) : wordOf(manifest.keyLabels[key], 18) }), el("span", { class: "figure", text: ` ${weight.toFixed(digitsOf(row.errors?.[i], 2)).replace("-", "−")}` })]), soft(leftOut(row) && ` of what is left without the first token (−${leftOut(row)})`));
  }

  // The row of a query, without the first token if that is asked for.
  async row(query) {
    if (!this.rows.has(query)) {
      if (this.rows.size > 4000) this.rows.clear();
      const made = this.app.data.row(this.app.subject(), query, this.app.without ? "rest" : "mass").then((row) => (row && this.app.without && !row.span ? withoutFirst(row, this.app.side.manifest.first) : row));
      this.rows.set(query, tracked(made));
      made.then((row) => (made.found = row));
    }
    return this.rows.get(query);
  }

  // Where the view begins: paper does not scroll.
  get top() {
    return this.box.scrollTop + this.shift;
  }

  // The words in view, and their lines.
  draw() {
    const { manifest } = this.app.side;
    const [top, height, width] = [this.top, this.box.clientHeight, this.inner.clientWidth];
    if (!height || !this.root.isConnected) return;
    const [first, last] = [Math.max(0, Math.floor(top / this.line) - 2), Math.min(Math.max(manifest.T, manifest.S), Math.ceil((top + height) / this.line) + 2)];
    this.column(this.left, manifest.labels, "from", first, last);
    this.column(this.right, manifest.keyLabels, "to", first, last);
    const room = Math.max(60, width - this.left.offsetWidth - this.right.offsetWidth);
    const context = sharpen(this.canvas, room, height);
    Object.assign(this.canvas.style, { width: `${room}px`, height: `${height}px`, top: `${top}px`, left: `${this.left.offsetWidth}px` });
    context.clearRect(0, 0, room, height);
    const queries = this.queries(first, last);
    const weights = new Map();
    let waiting = 0;
    for (const query of queries) {
      const made = this.rows.get(query);
      if (made && made.found !== undefined) this.curve(context, made.found, query, top, room, weights);
      else {
        waiting++;
        this.row(query).then(() => nextFrame(this));
      }
    }
    this.shade(weights);
    this.drawn = waiting === 0;
  }

  // Those whose lines are drawn; of a group, the first.
  queries(first, last) {
    const to = Math.ceil(Math.min(last, this.app.side.manifest.T) / this.span);
    return this.at === null ? range(Math.floor(first / this.span), to).map((i) => i * this.span) : [this.at];
  }

  curve(context, row, query, top, room, weights) {
    if (!row) return;
    const { app } = this;
    const { T, S } = app.side.manifest;
    const scale = app.scale();
    const one = this.at !== null;
    const span = row.span || 1;
    const edges = (at, length) => [at, Math.min(length, at + span)].map((place) => place * this.line - top);
    const bar = (x, [from, to], color) => {
      context.fillStyle = color;
      if (span > 1) context.fillRect(x, from + 3, 5, to - from - 6);
    };
    const here = edges(query - (query % span), T);
    const start = (here[0] + here[1]) / 2;
    bar(0, here, app.colors().soft);
    for (let i = row.keys.length - 1; i >= 0; i--) {
      const weight = row.weights[i];
      const size = Math.min(1, Math.abs(weight)); // contributions may be negative, and above 1
      if (size < (one ? 1e-6 : FAINTEST)) continue;
      const there = edges(row.keys[i], S);
      const end = (there[0] + there[1]) / 2;
      if (one && span === 1) weights.set(row.keys[i], weight);
      bar(room - 5, there, one ? scale.color(weight, app.dark) : app.colors().soft);
      context.strokeStyle = scale.color(weight, app.dark);
      context.lineWidth = 0.6 + 5.4 * size;
      context.beginPath();
      context.moveTo(span > 1 ? 5 : 0, start);
      context.bezierCurveTo(room * 0.45, start, room * 0.55, end, span > 1 ? room - 5 : room, end);
      context.stroke();
    }
  }

  // The rows in view, for a saved picture: words and lines.
  render(context, colors) {
    const { manifest } = this.app.side;
    const [first, last] = this.window();
    const room = 420;
    context.textBaseline = "middle";
    const write = (text, x, at, size, color) => {
      [context.font, context.fillStyle] = [`${size}px ${colors.font}`, color];
      context.fillText(text, x, (at - first + 0.5) * this.line);
      return context.measureText(text).width;
    };
    for (const [labels, x, align] of [[manifest.labels, 180, "right"], [manifest.keyLabels, 200 + room, "left"]])
      for (const i of range(first, Math.min(last, labels.length))) {
        context.textAlign = align;
        const wide = write(wordOf(labels[i], 18), x, i, 15, colors.ink);
        const left = align === "right" && leftOut(this.rows.get(i)?.found);
        if (left) write(`−${left}`, x - wide - 8, i, 11, colors.soft);
      }
    context.save();
    context.translate(190, 0);
    for (const query of this.queries(first, last)) this.curve(context, this.rows.get(query)?.found, query, first * this.line, room, new Map());
    context.restore();
  }

  // The rows in view, and the size of their picture.
  window() {
    const { manifest } = this.app.side;
    const first = Math.floor(this.top / this.line);
    return [first, Math.min(Math.max(manifest.T, manifest.S), Math.ceil((this.top + this.box.clientHeight) / this.line))];
  }

  // What a saved picture says of itself: which rows it has, and of which word the lines are.
  get caption() {
    const { T, S } = this.app.side.manifest;
    const [[first, last], words] = [this.window(), Math.max(T, S)];
    const rows = last - first < words ? `Words ${count(first)}–${count(last - 1)} of ${count(words)}. ` : "";
    return rows + (this.at === null ? "" : `Lines of word ${count(this.at)} alone: ${this.told.textContent}.`);
  }

  get size() {
    const [first, last] = this.window();
    return [800, (last - first) * this.line];
  }

  column(side, labels, name, first, last) {
    const shown = `${first}-${last} ${this.line}`;
    if (side.dataset.shown === shown && side.labels === labels) return;
    side.dataset.shown = shown;
    side.labels = labels;
    fill(side, ...range(first, Math.min(last, labels.length)).map((i) => {
      const word = el("div", { class: "lines-word", "data-i": i, "data-side": name }, el("bdi", { text: wordOf(labels[i], 18) }));
      word.style.top = `${i * this.line + (this.line - CLOSE) / 2}px`;
      return word;
    }));
  }

  shade(weights) {
    const scale = this.app.scale();
    for (const word of this.left.children) {
      word.classList.toggle("here", Number(word.dataset.i) === this.at);
      const left = leftOut(this.rows.get(Number(word.dataset.i))?.found);
      word.toggleAttribute("data-left", left);
      if (left) word.dataset.left = `−${left}`;
    }
    for (const word of this.right.children) {
      const weight = weights.get(Number(word.dataset.i)) || 0;
      word.style.background = weight ? scale.color(weight, this.app.dark) : "";
      word.style.color = weight ? scale.letters(weight, this.app.dark) : "";
    }
  }
}

const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);

// A row without its first key, the other weights rescaled to sum to 1.
function withoutFirst(row, first) {
  const at = row.keys.indexOf(first);
  if (at < 0) return row;
  const left = 1 - row.weights[at];
  if (left < 1e-6) return { ...row, left: 0, keys: [], weights: [], errors: [] };
  const keep = (values) => values.filter((_, i) => i !== at);
  return { ...row, left, leftError: row.errors?.[at] || 0, keys: keep(row.keys), weights: keep(row.weights).map((weight) => Math.min(1, weight / left)), errors: row.errors && keep(row.errors).map((error) => error / left) };
}

// How much of a row was left out with the first token.
const leftOut = (row) => {
  if (row?.left === undefined) return "";
  const unit = row.leftError > 0.004 ? 5 : 1; // percent: as precise as the file is
  if (100 * (1 - row.left) < unit / 2) return "";
  return `${Math.min(row.left ? 100 - unit : 100, unit * Math.round((100 * (1 - row.left)) / unit))} %`; // 100 % only if all is
};
