// The atlas: every head as a small picture with what it does, layer by layer or sorted by a number.

const NARROWEST = 50; // pixels: at this width the name and the number of a head do not overlap
const ROOMY = 62; // at this width, a word or two about the head fit as well

// Heads per row, at most `most`, so that all rows are about equally long.
const evenly = (heads, most) => Math.ceil(heads / Math.ceil(heads / Math.max(1, most)));

class Atlas {
  constructor(app) {
    this.app = app;
    this.body = el("div", { class: "atlas-body" });
    this.root = el("section", { class: "atlas", "aria-label": "All heads" }, this.body);
    this.cells = new Map();
  }

  build() {
    const { manifest, source } = this.app.side;
    this.cells.clear();
    manifest.layers.forEach((layer, l) => layer.heads.forEach((head, h) => this.cells.set(`${l}.${h}`, this.cell(l, h, head, source))));
    this.arrange();
  }

  cell(l, h, head, source) {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const figure = el("span", { class: "bar" }, el("span", { class: "bar-fill" }), el("span", { class: "bar-text" }));
    const name = `${l}.${head.head}`;
    const button = el("button", { class: "head", type: "button", "data-place": `${l}.${h}`, "aria-label": `Head ${name}: ${head.reading}` },
      canvas, el("span", { class: "head-name" }, el("b", { text: name }), el("span", { class: "figure soft", text: traitNumber(head.reading) })), el("span", { class: "trait", text: trait(head.reading), title: head.reading }), figure);
    button.addEventListener("click", () => this.app.open(`${l}.${h}`));
    source.thumbnail(l, h).then((picture) => this.draw(canvas, picture, l, h));
    return button;
  }

  async draw(canvas, picture, l, h) {
    const painted = paint(picture.values, picture.cols, picture.rows, "share", this.app.dark);
    [canvas.width, canvas.height] = [picture.cols, picture.rows];
    const context = canvas.getContext("2d");
    context.drawImage(painted, 0, 0);
    const reach = await this.app.data.reach(new Subject(0, l, h));
    const { T, S } = this.app.side.manifest;
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
    return (name) => from[name] ?? head.numbers[name];
  }

  arrange() {
    const { manifest } = this.app.side;
    const sort = this.app.store.get("sort");
    this.color();
    if (sort === "place") {
      fill(this.body, ...manifest.layers.map((layer, l) => this.layer(layer, l)));
    } else {
      const order = Array.from(this.cells.keys()).sort((a, b) => this.number(b)(sort) - this.number(a)(sort));
      fill(this.body, el("div", { class: "flat" }, ...order.map((place) => this.cells.get(place))));
    }
    this.fit();
    this.mark();
  }

  layer(layer, l) {
    const groups = [];
    layer.heads.forEach((head, h) => (groups[head.group] ||= []).push(this.cells.get(`${l}.${h}`)));
    const shared = layer.shared > 1;
    const parts = groups.map((cells, g) => shared
      ? el("div", { class: "group", role: "group", "aria-label": `key head ${g}` }, ...cells, el("span", { class: "bracket", text: `key head ${g}` }))
      : cells).flat();
    const title = el("h3", { class: "layer-name", title: layer.name }, el("button", { type: "button", class: "plain", text: String(l), title: `Average of layer ${l}`, "aria-label": `Average of layer ${l}, ${layer.name}`, onclick: () => this.app.open(`${l}.*`) }));
    return el("div", { class: "layer", role: "group", "aria-label": `Layer ${l}` }, title, el("div", { class: "heads" }, ...parts));
  }

  // Pictures as large as possible with the whole atlas in view; if the labels would not fit, a layer takes several rows.
  fit() {
    const { manifest } = this.app.side;
    const heads = Math.max(...manifest.layers.map((layer) => layer.heads.length));
    const groups = Math.max(...manifest.layers.map((layer) => (layer.shared > 1 ? layer.heads.length / layer.shared : 0)));
    const width = (this.root.clientWidth || 800) - 44 - 6 * groups; // less the number of the layer and the space between groups
    const height = Math.max(360, this.app.stageHeight() - 60);
    const each = (inRow) => width / inRow - 8;
    const wide = each(heads) >= NARROWEST ? each(heads) : each(evenly(heads, Math.floor(width / (ROOMY + 8))));
    const tall = height / manifest.layers.length - (this.app.store.get("color") === "none" ? 46 : 62);
    const size = this.app.store.get("sort") === "place" ? Math.min(wide, Math.max(84, tall)) : 96;
    this.root.style.setProperty("--thumb", `${Math.floor(clamp(size, 36, 128))}px`);
  }

  color() {
    const name = this.app.store.get("color");
    this.root.classList.toggle("colored", name !== "none");
    if (name === "none") return;
    for (const [place, cell] of this.cells) {
      const value = this.number(place)(name);
      const share = name === "distance" ? value / Math.max(1, this.app.side.manifest.S) : value;
      const filled = cell.querySelector(".bar-fill");
      filled.style.width = `${100 * clamp(share, 0, 1)}%`;
      filled.style.background = colorAt("share", share, this.app.dark);
      cell.querySelector(".bar-text").textContent = name === "distance" ? value.toFixed(1) : value.toFixed(2);
    }
  }

  mark() {
    const chosen = this.app.store.get("head");
    for (const [place, cell] of this.cells) {
      cell.setAttribute("aria-current", place === chosen ? "true" : "false");
      cell.tabIndex = place === chosen || (!this.cells.has(chosen) && place === "0.0") ? 0 : -1;
    }
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

// "first-token sink 0.45, else local 0.72" short enough for a picture: "sink · local", and 0.72.
const trait = (reading) => reading.replace("first-token sink", "sink").replace(", else", " ·").replace(/ [\d.]+/g, "");
const traitNumber = (reading) => (/[\d.]+$/.exec(reading) || [""])[0].replace(/^0/, "");
