// The atlas: every head as a small picture with what it does, layer by layer or sorted by a number.

const GAP = 7;
const CAPTION = 33; // pixels below a picture: its name and what the head does
const NARROWEST = 52; // pixels: below this width a caption does not fit
const ROOMY = 78; // pixels: below this width only a name fits into the empty corner of a causal map
const NAMED = 38; // pixels: below this width not even a name does
const BESIDE = 54; // pixels: with so much room beside a picture, its caption stands there
const LARGEST = 132;
const SMALLEST = 13;
const HALF = 0.5;
const RANKED = 8; // heads that are marked for a word

class Atlas {
  constructor(app) {
    this.app = app;
    this.body = el("div", { class: "atlas-body" });
    this.told = el("p", { class: "atlas-tell soft", "aria-hidden": "true" });
    this.root = el("section", { class: "atlas", "aria-label": "All heads" }, this.body);
    this.cells = new Map();
    new ResizeObserver(() => this.root.clientWidth !== this.fitted && this.fit()).observe(this.root); // a frame may have no size at first
    this.body.addEventListener("pointerover", (event) => event.target.closest?.(".head") && this.tell(event.target.closest(".head")));
    this.body.addEventListener("pointerleave", () => this.tell(null));
    this.body.addEventListener("focusin", (event) => this.tell(event.target.closest?.(".head")));
  }

  build() {
    const { manifest } = this.app.side;
    this.cells.clear();
    manifest.layers.forEach((layer, l) => layer.heads.forEach((head, h) => this.cells.set(`${l}.${h}`, this.cell(l, h, head))));
    this.arrange();
    this.tell(null);
  }

  cell(l, h, head) {
    const bar = el("span", { class: "bar" }, el("span", { class: "bar-fill" }), el("span", { class: "bar-text" }));
    const name = headName(this.app.side.manifest, l, h);
    const button = el("button", { class: "head", "data-place": `${l}.${h}`, "data-head": head.head, "aria-label": `Head ${name} ${head.about}` },
      el("span", { class: "picture" }, el("canvas", { "aria-hidden": "true" })),
      el("span", { class: "caption" }, el("b", { text: name }), " ", el("span", { class: "trait", text: traitName(head).replaceAll(" + ", " +\n") })), bar);
    button.addEventListener("click", () => this.app.open(`${l}.${h}`));
    return button;
  }

  // What a head does, in one line above the pictures.
  tell(cell) {
    const { manifest } = this.app.side;
    if (!cell) {
      this.told.style.minHeight = "";
      const inked = this.app.measure === "contribution" ? "colored by how much each attended token contributes" : manifest.keys ? "inked where it attends" : "inked where that token attends";
      return fill(this.told, `Each picture is one head: a row for every token${manifest.keys ? " that attends, a column for every token of the other text" : ""}, ${inked}.${this.order}`);
    }
    const [l, h] = cell.dataset.place.split(".").map(Number);
    const head = manifest.layers[l].heads[h];
    this.told.style.minHeight = `${this.told.getBoundingClientRect().height}px`; // pictures must not move under the finger
    return fill(this.told, el("b", { text: `Head ${headName(manifest, l, h)}` }), ` ${head.about}`);
  }

  get order() {
    const { sort, side } = this.app;
    if (sort !== "place") return ` Sorted by ${statName(sort)}, the highest first.`;
    return side.manifest.layers.length > 1 ? ` Layers run from top to bottom${this.columns > 1 ? ", column by column" : ""}.` : "";
  }

  get scale() {
    return this.app.scale(this.app.store.get("rows") ? ROW_POWERS : POWERS);
  }

  drawLegend() {
    if (this.app.view !== "atlas") return;
    const { unit } = MEASURES[this.app.measure];
    const [left, rows] = [this.app.without ? " without the first token" : "", this.app.store.get("rows") ? ", relative to its row’s largest" : ""];
    const faint = this.body.querySelector("canvas.faint") ? "; faint: more than half is left out" : "";
    fill(this.app.legend, legendOf(this.scale, `${unit}${left}${rows}${faint}`, this.app.dark), this.worth && legendOf(this.worth, "bars: importance; above 0, removing the head hurts", this.app.dark));
  }

  paintAll() {
    const drawn = Array.from(this.cells, ([place, cell]) => tracked(this.draw(cell.querySelector("canvas"), ...place.split(".").map(Number))));
    tracked(Promise.all(drawn)).then(() => this.drawLegend()); // whether any picture is faint
  }

  async draw(canvas, l, h) {
    const { store, data } = this.app;
    const { manifest } = this.app.side;
    const [turn, subject] = [(canvas.turn = (canvas.turn || 0) + 1), new Subject(0, l, h)];
    const source = data.source(subject);
    const [picture, reach, left] = await Promise.all([source.thumbnail(l, h, this.app.without), data.reach(subject), this.app.without ? source.onFirst(l, h) : 0]);
    if (turn !== canvas.turn || !picture) return;
    canvas.classList.toggle("faint", left > HALF);
    const values = store.get("rows") ? inRows(picture) : picture.values;
    const painted = paint(values, picture.cols, picture.rows, this.scale, this.app.dark);
    [canvas.width, canvas.height] = [picture.cols, picture.rows];
    const context = canvas.getContext("2d");
    context.drawImage(painted, 0, 0);
    const { T, S } = manifest;
    for (let row = 0; row < picture.rows; row++) {
      const query = Math.min(T - 1, Math.floor(((row + 1) * T) / picture.rows) - 1);
      const [left, right] = [Math.floor((reach.first(Math.floor((row * T) / picture.rows)) * picture.cols) / S), Math.ceil((reach.end(query) * picture.cols) / S)];
      context.clearRect(0, row, left, 1);
      context.clearRect(right, row, picture.cols - right, 1);
    }
  }

  number(place) {
    const [l, h] = place.split(".").map(Number);
    const head = this.app.side.manifest.layers[l].heads[h];
    const from = this.app.store.get("without") ? head.without_first : head.numbers;
    return (name) => (name === "importance" ? head.importance ?? null : from[name] ?? head.numbers[name]); // null: not measured yet
  }

  arrange() {
    const { manifest } = this.app.side;
    const { sort } = this.app;
    this.color();
    if (sort === "place") fill(this.body, ...manifest.layers.map((layer, l) => this.layer(layer, l)));
    else fill(this.body, ...this.sorted(sort).map((place) => this.cells.get(place)));
    this.body.classList.toggle("flat", sort !== "place");
    this.tell(null);
    this.fit();
    this.tell(null); // in how many columns
    this.mark();
    this.paintAll();
  }

  sorted(name) {
    return Array.from(this.cells.keys()).sort((a, b) => this.number(b)(name) - this.number(a)(name));
  }

  layer(layer, l) {
    const groups = [];
    layer.heads.forEach((head, h) => (groups[head.group] ||= []).push(this.cells.get(`${l}.${h}`)));
    const shared = layer.shared > 1;
    const parts = groups.map((cells, g) => shared
      ? el("div", { class: "group", role: "group", "aria-label": `key head ${g}` }, ...cells, el("span", { class: "bracket", text: `key head ${g}` }))
      : cells).flat();
    const number = layer.number ?? l;
    const title = el("h3", { class: "layer-name", title: layer.name }, el("button", { class: "plain", text: String(number), title: `Average of layer ${number}`, "aria-label": `Average of layer ${number}, ${layer.name}`, onclick: () => this.app.open(`${l}.*`) }));
    return el("div", { class: "layer", role: "group", "aria-label": `Layer ${number}` }, title, el("div", { class: "heads" }, ...parts));
  }

  // Pictures as large as possible with all heads in view: layers in several columns, with captions if there is room.
  fit() {
    const { manifest } = this.app.side;
    const heads = Math.max(...manifest.layers.map((layer) => layer.heads.length));
    const layers = manifest.layers.length;
    this.fitted = this.root.clientWidth;
    const [width, stacked] = [this.root.clientWidth || 800, innerWidth > 480 && innerWidth <= 860];
    const height = Math.max(stacked ? 480 : 280, this.app.roomFor(this.body) - 16);
    const shared = Math.max(...manifest.layers.map((layer) => layer.shared)) > 1;
    const bar = this.app.bars === "none" ? 0 : 16;
    const flat = this.app.sort !== "place";
    const size = (columns, below, gap) => {
      const across = flat ? columns : heads;
      const wide = (flat ? width : width / columns - 40 - (shared ? 6 * (heads / manifest.layers[0].shared) : 0)) / across - gap;
      return Math.min(wide, height / Math.ceil((flat ? this.cells.size : layers) / columns) - below - gap, LARGEST);
    };
    const best = (below, gap) => Array.from({ length: flat ? this.cells.size : Math.min(layers, 8) }, (_, i) => [size(i + 1, below, gap), i + 1]).reduce((a, b) => (b[0] > a[0] + 0.5 ? b : a));
    const { corner } = manifest;
    let [side, columns] = best((corner ? 0 : CAPTION) + bar + (shared ? 22 : 0), GAP);
    const captions = side >= (corner ? NAMED : NARROWEST);
    if (!captions) [side, columns] = best(bar + (shared ? 5 : 0), 4);
    this.root.classList.toggle("bare", !captions);
    const beside = corner && captions && side < ROOMY && !flat && !shared && (width / columns - 40) / heads - side - GAP > BESIDE;
    this.root.classList.toggle("beside", beside);
    this.root.classList.toggle("corner", corner && captions && !beside);
    this.root.classList.toggle("named", corner && side < ROOMY && !beside);
    this.root.style.setProperty("--thumb", `${Math.floor(clamp(side, SMALLEST, LARGEST))}px`);
    this.columns = columns;
    const rows = Math.ceil(layers / columns);
    this.body.style.gridTemplateRows = flat ? "" : `repeat(${rows}, auto)`;
    if (!flat) Array.from(this.body.children, (layer, l) => layer.classList.toggle("uppermost", l % rows === 0)); // with the numbers of heads
  }

  color() {
    const name = this.app.bars;
    this.root.classList.toggle("colored", name !== "none");
    this.worth = null;
    if (name === "none") return;
    const most = Math.max(...Array.from(this.cells.keys(), (place) => Math.abs(this.number(place)(name))), 1e-9);
    const worth = name === "importance";
    if (worth) this.worth = new Scale("difference", this.app.contrast, most);
    this.root.classList.toggle("worth", worth);
    const scale = this.worth || this.scale;
    for (const [place, cell] of this.cells) {
      const known = this.number(place)(name);
      const value = known ?? 0;
      const [filled, text] = [cell.querySelector(".bar-fill"), cell.querySelector(".bar-text")];
      const share = worth ? 1 : name === "distance" ? value / most : value;
      filled.style.setProperty("--share", clamp(share, 0, 1));
      filled.style.background = scale.color(worth ? value : share, this.app.dark);
      text.textContent = known === null ? "–" : name === "distance" ? value.toFixed(1) : worth ? (Math.abs(value) < 0.0005 ? "0" : signed(value)) : value.toFixed(2);
      text.style.color = worth ? scale.letters(value, this.app.dark) : "";
    }
  }

  mark() {
    const chosen = this.app.store.get("head");
    for (const [place, cell] of this.cells) {
      cell.setAttribute("aria-current", place === chosen ? "true" : "false");
      cell.tabIndex = place === chosen || (!this.cells.has(chosen) && place === "0.0") ? 0 : -1;
    }
  }

  // Mark the heads that attend most from a word, and its row in every picture; null clears.
  rank(found, query) {
    const { T } = this.app.side.manifest;
    if (found) fill(this.told, `Framed: the ${Math.min(RANKED, found.length)} heads that ${this.app.taking}, besides the first token. The line is the word’s row.`);
    else if (this.root.classList.contains("ranking")) this.tell(null);
    this.root.classList.toggle("ranking", Boolean(found));
    this.body.style.setProperty("--row", `${(100 * ((query ?? 0) + 0.5)) / T}%`);
    const top = (found || []).slice(0, RANKED).map((one) => one.place);
    for (const [place, cell] of this.cells) cell.classList.toggle("top", top.includes(place));
  }

  // Arrow keys move to the nearest picture in their direction.
  onkey(event) {
    const from = event.target.closest?.(".head");
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!from || !step) return false;
    const here = from.getBoundingClientRect();
    let [best, least] = [null, Infinity];
    for (const cell of this.cells.values()) {
      if (cell === from) continue;
      const there = cell.getBoundingClientRect();
      const [dx, dy] = [there.left - here.left, there.top - here.top];
      const [along, across] = step[0] ? [dx * step[0], Math.abs(dy)] : [dy * step[1], Math.abs(dx)];
      if (along > 4 && along + 4 * across < least) [best, least] = [cell, along + 4 * across];
    }
    if (best) {
      from.tabIndex = -1;
      best.tabIndex = 0;
      best.focus();
    }
    return true;
  }
}

// Each row of a picture scaled to its largest value, so that heads can be told apart.
function inRows({ values, rows, cols }) {
  const found = new Float32Array(values.length);
  for (let row = 0; row < rows; row++) {
    const line = values.subarray(row * cols, (row + 1) * cols);
    const most = line.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    if (most > 0) line.forEach((value, col) => (found[row * cols + col] = value / most));
  }
  return found;
}

// What a head does, short enough for a picture.
const traitName = (head) => head.traits.map(([name]) => name.replace(SINK, "sink").replace("previous-token", "previous")).join(" + ") || "mixed";
