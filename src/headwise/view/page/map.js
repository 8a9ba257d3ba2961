// One head's map on a canvas: tiles, hatching over hidden pairs, words if there is room, and numbers along the edges.

const LEAST = 240; // pixels of the height of a map, with its words and bars

class HeadMap {
  constructor(app, view, asked) {
    Object.assign(this, { app, view, asked, cursor: null, frame: 0, drawn: 0 });
    this.canvas = el("canvas", { class: "map-canvas", tabindex: "0", role: "application", "aria-roledescription": "attention map", "aria-label": "Attention map. Arrow keys move, plus and minus zoom, Enter locks the query token." });
    this.root = el("div", { class: "map-frame" }, this.canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.root);
  }

  // Show a subject, or the difference of two.
  async show(subject, minus, kind) {
    const { data } = this.app;
    const { manifest } = data.side(subject);
    Object.assign(this, { subject, minus, kind, manifest, measure: this.app.measure });
    this.resize(); // with bars or without
    const limit = minus ? await this.largestDifference(subject, minus, kind) : 1;
    if (this.measure !== this.app.measure || this.subject !== subject || this.minus !== minus || this.kind !== kind) return; // shows something else by now
    const scale = minus || kind === "uniform" ? new Scale(minus ? "difference" : "ratio", this.app.contrast, limit) : this.app.scale();
    this.scale = scale;
    const ask = (level, row, col) => (minus ? data.difference(subject, minus, level, row, col, kind) : data.tile(subject, level, row, col, kind));
    const depth = Math.min(data.depth(subject, kind), minus ? data.depth(minus, kind) : Infinity);
    this.tiles = new Tiles(ask, depth, manifest.levels, manifest.T, manifest.S, { scale, dark: this.app.dark }, () => this.redraw());
    this.redraw();
    const turn = this.tiles;
    const single = !minus && subject.single && kind !== "uniform";
    const [margins, reach, error] = await Promise.all([data.margins(subject), data.reach(subject), single ? data.source(subject).errorAt(subject.layer, subject.head) : null]);
    if (turn !== this.tiles) return;
    Object.assign(this, { margins, reach, error });
    this.redraw();
  }

  // A round number that nearly all differences of the whole map are below.
  async largestDifference(subject, minus, kind) {
    const { data } = this.app;
    const level = Math.min(0, data.depth(subject, kind), data.depth(minus, kind));
    const values = await data.difference(subject, minus, level, 0, 0, kind);
    if (!values) return 1;
    const sizes = values.filter((x) => x !== 0).map(Math.abs).sort();
    const most = sizes[Math.floor(0.995 * sizes.length)] || 1e-6;
    return [1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5].find((limit) => limit >= most) || 1;
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  resize() {
    const width = this.root.clientWidth;
    if (!width) return;
    const small = width < 560;
    this.barred = !this.minus && this.app.measure === "weights";
    this.pads = { left: small ? 88 : 104, top: (small || innerHeight < 820 ? 104 : 118) - (this.barred ? 0 : 22), right: !this.barred ? 16 : small ? 66 : 112, bottom: 12 };
    // A map that fills the width leaves no empty space below it; its lower edge is in the window.
    const needed = ((width - this.pads.left - this.pads.right) * this.view.T) / this.view.S + this.pads.top + this.pads.bottom;
    const height = Math.round(Math.max(LEAST, Math.min(needed, innerWidth <= 480 ? 0.7 * innerHeight : this.app.roomFor(this.root.parentElement) - 14)));
    this.root.style.height = `${height}px`;
    [this.width, this.height] = [width, height];
    this.view.resize(Math.max(40, width - this.pads.left - this.pads.right), Math.max(40, height - this.pads.top - this.pads.bottom));
    this.app.stage.tellZoom();
    this.redraw();
  }

  redraw() {
    nextFrame(this);
  }

  draw() {
    if (!this.tiles || !this.width) return;
    const context = sharpen(this.canvas, this.width, this.height);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    const colors = this.app.colors();
    this.render(context, colors);
    this.miniature(context, colors); // for navigation; not in a saved picture
    this.drawn++;
  }

  render(context, colors) {
    const { pads, view } = this;
    context.clearRect(0, 0, this.width, this.height);
    context.save();
    context.translate(pads.left, pads.top);
    // If the map is smaller than the frame, the frame shrinks to it.
    this.plot = { width: Math.min(view.width, (view.S - view.x) * view.scale), height: Math.min(view.height, (view.T - view.y) * view.scale) };
    context.save();
    context.beginPath();
    context.rect(0, 0, this.plot.width, this.plot.height);
    context.clip();
    context.fillStyle = colors.card;
    context.fillRect(0, 0, view.width, view.height);
    context.imageSmoothingEnabled = false;
    this.tiles.draw(context, view);
    if (this.exact) this.exact.draw(context, view, this);
    this.hatch(context, colors, view);
    if (this.kind === "rest") this.blank(context, colors, view);
    if (view.scale >= 30) this.figures(context, colors);
    this.marks(context, colors);
    context.restore();
    context.strokeStyle = colors.line;
    context.strokeRect(-0.5, -0.5, this.plot.width + 1, this.plot.height + 1);
    this.labels(context, colors);
    if (this.margins && !this.minus) this.edges(context, colors);
    this.titles(context, colors);
    context.restore();
  }

  // Keys that a query may not see are hatched, to tell them from small weights.
  hatch(context, colors, view) {
    if (!this.reach) return;
    const step = Math.max(1, Math.floor(1 / view.scale));
    const from = Math.floor(view.y / step) * step;
    const end = Math.min(view.T, view.y + view.height / view.scale);
    const edge = new Path2D();
    for (let query = from; query < end; query += step) {
      const [y, tall] = [(query - view.y) * view.scale, step * view.scale + 0.5];
      const last = Math.min(view.T - 1, query + step - 1);
      const [left, right] = [(this.reach.first(query) - view.x) * view.scale, (this.reach.end(last) - view.x) * view.scale];
      if (left > 0) edge.rect(0, y, Math.min(left, view.width), tall);
      if (right < view.width) edge.rect(Math.max(0, right), y, view.width - Math.max(0, right), tall);
    }
    context.fillStyle = colors.card;
    context.fill(edge);
    context.fillStyle = hatching(context, colors.line);
    context.fill(edge);
  }

  // What is left out is no weight of 0: the column of the first token is hatched too.
  blank(context, colors, view) {
    const edge = [(this.manifest.first - view.x) * view.scale, -view.y * view.scale, view.scale, view.T * view.scale];
    for (const color of [colors.card, hatching(context, colors.line)]) {
      context.fillStyle = color;
      context.fillRect(...edge);
    }
  }

  // Numbers in the cells, once they are large enough.
  figures(context, colors) {
    const { view, manifest } = this;
    context.font = `${Math.min(13, view.scale * 0.3)}px ${colors.font}`;
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    this.each((query, key, x, y) => {
      if ((this.reach && !this.reach.sees(query, key, 1)) || (this.kind === "rest" && key === manifest.first)) return;
      const value = this.tiles.value(query, key) ?? this.exact?.value(query, key) ?? null;
      if (value === null) return;
      context.fillStyle = this.scale.letters(value, this.app.dark);
      context.fillText(this.figure(value, this.error?.(query, key, value)), x + view.scale / 2, y + view.scale / 2);
    });
  }

  figure(value, error = 0) {
    if (value === 0) return "0"; // numbers that only round to 0 are written below as <.01
    if (this.scale.name === "ratio") return value < 0.05 ? "<.1" : value >= 10 ? value.toFixed(0) : value.toFixed(1);
    const digits = digitsOf(error, 2);
    if (Math.abs(value) < 0.5 * 10 ** -digits) return this.scale.name === "difference" ? "≈0" : `<${(10 ** -digits).toFixed(digits)}`.replace("0.", ".");
    return value.toFixed(digits).replace(/^(-?)0\./, "$1.").replace("-", "−");
  }

  each(run) {
    const { view } = this;
    const [right, bottom] = [Math.min(view.S, view.x + view.width / view.scale), Math.min(view.T, view.y + view.height / view.scale)];
    for (let query = Math.floor(view.y); query < bottom; query++)
      for (let key = Math.floor(view.x); key < right; key++) run(query, key, (key - view.x) * view.scale, (query - view.y) * view.scale);
  }

  // The row and column of the cursor, and the locked word.
  marks(context, colors) {
    const { view, cursor } = this;
    const size = Math.max(view.scale, 3);
    const locked = this.app.locked();
    if (locked !== null) {
      context.strokeStyle = colors.accent;
      context.lineWidth = 1.5;
      if (locked < view.T) context.strokeRect(-2, (locked - view.y) * view.scale - 0.5, view.width + 4, size + 1);
    }
    if (!cursor) return;
    const [x, y] = [(cursor.key - view.x) * view.scale, (cursor.query - view.y) * view.scale];
    // Thin lines on either side of its row and column, and nothing over them: their colors are compared with the legend.
    context.fillStyle = this.scale.name === "difference" ? colors.ink : colors.second;
    for (const at of [y - 1, y + size]) context.fillRect(0, at, view.width, 1);
    for (const at of [x - 1, x + size]) context.fillRect(at, 0, 1, view.height);
    context.lineWidth = 2;
    context.strokeStyle = "#fff";
    context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    context.lineWidth = 1;
    context.strokeStyle = "#000";
    context.strokeRect(x - 2.5, y - 2.5, size + 5, size + 5);
  }

  labels(context, colors) {
    const { view, pads, manifest } = this;
    const every = labelStep(view.scale);
    const words = view.scale >= 12;
    context.font = `${words ? 12 : 11}px ${colors.font}`;
    context.textBaseline = "middle";
    const text = (token, at, room, letters = 11) => { // as many letters as there is room for
      const found = words ? `${wordOf(token, letters)} ${count(at)}` : count(at);
      return letters > 2 && context.measureText(found).width > room ? text(token, at, room, letters - 1) : found;
    };
    const place = (at) => (words ? at + 0.5 : at + Math.min(every / 2, 0.5));
    context.textAlign = "right";
    const [bottom, right] = [Math.min(view.T, view.y + view.height / view.scale), Math.min(view.S, view.x + view.width / view.scale)];
    for (let query = Math.ceil(view.y / every) * every; query < bottom; query += every) {
      const y = (place(query) - view.y) * view.scale;
      if (y < 0 || y > view.height) continue;
      context.fillStyle = this.cursor?.query === query ? colors.ink : colors.soft;
      context.fillText(text(manifest.labels[query], query, pads.left - 32), -8, y);
    }
    context.textAlign = "left";
    for (let key = Math.ceil(view.x / every) * every; key < right; key += every) {
      const x = (place(key) - view.x) * view.scale;
      if (x < 0 || x > view.width || (!words && x > this.plot.width - 12)) continue;
      context.fillStyle = this.cursor?.key === key ? colors.ink : colors.soft;
      context.save();
      context.translate(x, -8);
      if (words) context.rotate(-Math.PI / 2);
      else context.textAlign = "center";
      context.fillText(text(manifest.keyLabels[key], key, pads.top - (this.barred ? 48 : 26)), 0, words ? 0 : -4);
      context.restore();
    }
  }

  // Above: the attention that keys receive. At the right: entropy and distance of queries. They follow the window.
  edges(context, colors) {
    const { view, margins, pads, plot } = this;
    const band = pads.right < 80 ? 20 : 44;
    const words = view.scale >= 12;
    const top = words ? -pads.top + 17 : -pads.top + 30;
    const [entropy, distance, received] = [margins.entropy, margins.distance, margins.received];
    const upTo = (x) => (x < 1000 ? Number(ceiling(x, x < 10 ? 1 : 0)) : 1000 * ceiling(x / 1000, 1)); // printed, and what a full bar is
    const most = { entropy: upTo(Math.log(Math.max(2, view.S))), distance: upTo(largest(distance)), received: Number(ceiling(largest(received), 1)) };
    context.fillStyle = colors.margin;
    this.bars(plot.height, view.y, entropy, (at, size, value) => context.fillRect(plot.width + 8, at, (band * value) / most.entropy, size));
    const apart = !this.manifest.keys; // tokens of two texts have no distance
    if (apart) this.bars(plot.height, view.y, distance, (at, size, value) => context.fillRect(plot.width + 8 + band + 8, at, (band * value) / most.distance, size));
    const high = words ? 18 : 34;
    this.bars(plot.width, view.x, received, (at, size, value) => {
      const tall = high * Math.sqrt(value / most.received);
      context.fillRect(at, top + high - tall, size, tall);
    });
    context.fillStyle = colors.soft;
    context.font = `10.5px ${colors.font}`;
    [context.textAlign, context.textBaseline] = ["left", "bottom"];
    const title = (name, most, x, y) => [...name.split("\n"), most].forEach((text, i, { length }) => context.fillText(text, x, y + 12 * (i + 1 - length)));
    const longest = (x) => `≤${band < 30 ? "" : " "}${x < 1000 ? x.toFixed(x < 10 ? 1 : 0) : `${(x / 1000).toFixed(1)}k`}`;
    title(band < 30 ? "ent." : "entropy", longest(most.entropy), plot.width + 8, -4);
    if (apart) title(band < 30 ? "dist." : "distance", longest(most.distance), plot.width + 16 + band, -4);
    title(this.kind !== "rest" ? "received" : `received,${band > 30 ? " " : "\n"}with first`, `≤ ${most.received.toFixed(1)}`, plot.width + 8, top + high);
  }

  // One bar per screen pixel or per bin, whichever is wider, with the mean of what it covers.
  bars(length, from, numbers, draw) {
    const { bin } = this.margins;
    const size = Math.max(bin * this.view.scale, 1);
    const each = size / this.view.scale / bin;
    for (let i = Math.floor(from / bin / each); i * each < numbers.length; i++) {
      const at = (i * each * bin - from) * this.view.scale;
      if (at >= length) break;
      const [start, stop] = [Math.floor(i * each), Math.max(Math.floor(i * each) + 1, Math.floor((i + 1) * each))];
      let [sum, n] = [0, 0];
      for (let k = start; k < stop && k < numbers.length; k++, n++) sum += numbers[k];
      const begin = Math.max(0, at);
      if (n) draw(begin, Math.min(length, at + size) - begin - (size > 4 ? 1 : 0), sum / n);
    }
  }

  titles(context, colors) {
    const { pads, plot, manifest } = this;
    context.fillStyle = colors.ink;
    context.font = `12px ${colors.font}`;
    [context.textAlign, context.textBaseline] = ["left", "top"];
    const name = this.app.stage.shown.length > 1 ? `${this.app.stage.named(this.subject)}: ` : ""; // of two maps, which
    context.fillText(`${name}${name ? "key →" : "key (attended token) →"}`, 0, -pads.top + 2);
    context.save();
    context.translate(-pads.left + 12, plot.height);
    context.rotate(-Math.PI / 2);
    context.textBaseline = "middle";
    const text = plot.height < 170 ? "query" : "← query (attending token)";
    context.textAlign = "left";
    context.fillText(text, 0, 0);
    context.restore();
  }

  // A small map that shows the position of the window.
  miniature(context, colors) {
    const { view, pads } = this;
    this.mini = null;
    if (view.fitted || view.width < 260) return;
    const size = Math.min(120, view.width / 4);
    const scale = size / Math.max(view.T, view.S);
    const [w, h] = [view.S * scale, view.T * scale];
    const [x, y] = [pads.left + this.plot.width - w - 10, pads.top + 10];
    const { coarsest } = this.tiles;
    const tile = this.tiles.get(coarsest, 0, 0);
    context.fillStyle = colors.card;
    context.fillRect(x - 3, y - 3, w + 6, h + 6);
    if (tile && tile.canvas) {
      const span = 2 ** (this.tiles.levels - coarsest);
      context.imageSmoothingEnabled = true; // it is smaller than the tile: stripes fade but do not vanish
      context.drawImage(tile.canvas, 0, 0, view.S / span, view.T / span, x, y, w, h);
    }
    context.save();
    context.translate(x, y);
    this.hatch(context, colors, { x: 0, y: 0, scale, width: w, height: h, T: view.T });
    context.restore();
    context.strokeStyle = colors.line;
    context.strokeRect(x - 2.5, y - 2.5, w + 5, h + 5);
    context.strokeStyle = colors.second;
    context.lineWidth = 2;
    context.strokeRect(x + view.x * scale, y + view.y * scale, Math.max(4, Math.min(view.S, view.width / view.scale) * scale), Math.max(4, Math.min(view.T, view.height / view.scale) * scale));
    context.lineWidth = 1;
    this.mini = { x, y, w, h, scale };
  }
}

// Single weights below the finest picture: the largest of every row.
class KnownWeights {
  constructor(rows, k, scale) {
    Object.assign(this, { keys: rows.keys, weights: rows.weights, k, scale });
  }

  value(query, key) {
    for (let i = query * this.k; i < (query + 1) * this.k; i++) if (this.keys[i] === key) return this.weights[i];
    return null;
  }

  draw(context, view, map) {
    if (view.scale < 2 || map.tiles.depth >= map.tiles.levels) return;
    const bottom = Math.min(view.T, view.y + view.height / view.scale);
    for (let query = Math.floor(view.y); query < bottom; query++)
      for (let i = query * this.k; i < (query + 1) * this.k; i++) {
        const x = (this.keys[i] - view.x) * view.scale;
        if (!(this.weights[i] > 0) || x + view.scale < 0 || x > view.width) continue;
        context.fillStyle = map.scale.color(this.weights[i], map.app.dark);
        context.fillRect(x, (query - view.y) * view.scale, view.scale + 0.5, view.scale + 0.5);
      }
  }
}

const labelStep = (scale) => {
  if (scale >= 12) return 1;
  const wanted = 64 / scale;
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
};

const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 1e-9);

const patterns = new Map();

function hatching(context, color) {
  const ratio = window.devicePixelRatio || 1;
  const name = `${color} ${ratio}`;
  if (!patterns.has(name)) {
    const size = 7;
    const canvas = el("canvas");
    const drawing = sharpen(canvas, size, size);
    drawing.strokeStyle = color;
    drawing.lineWidth = 1;
    drawing.beginPath();
    for (const shift of [-size, 0, size]) {
      drawing.moveTo(shift - 1, size + 1);
      drawing.lineTo(shift + size + 1, -1);
    }
    drawing.stroke();
    patterns.set(name, canvas);
  }
  const pattern = context.createPattern(patterns.get(name), "repeat");
  pattern.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
  return pattern;
}
