// The visible part of a map: the query and key at the upper left corner, and the number of screen pixels per token.

const CLOSEST = 56;

class Viewport {
  constructor(T, S) {
    Object.assign(this, { T, S, x: 0, y: 0, scale: 1, width: 1, height: 1, fitted: true, limit: Infinity, asked: null });
  }

  get fit() {
    return Math.min(this.width / this.S, this.height / this.T);
  }

  // Keep the window within what can be shown.
  get closest() {
    return Math.max(Math.min(CLOSEST, this.limit), this.fit);
  }

  resize(width, height) {
    const middle = [this.x + this.width / this.scale / 2, this.y + this.height / this.scale / 2];
    [this.width, this.height] = [width, height];
    if (this.fitted) this.showAll();
    else if (this.asked) this.take(this.asked);
    else this.center(...middle);
  }

  showAll() {
    [this.scale, this.x, this.y, this.fitted, this.asked] = [this.fit, 0, 0, true, null];
  }

  center(x, y) {
    this.asked = null;
    [this.x, this.y] = [x - this.width / this.scale / 2, y - this.height / this.scale / 2];
    this.settle();
  }

  move(dx, dy) {
    this.asked = null;
    [this.x, this.y] = [this.x - dx / this.scale, this.y - dy / this.scale];
    this.settle();
  }

  // Zoom; the pair under the given point of the screen stays there.
  zoom(factor, px, py) {
    this.asked = null;
    const [x, y] = [this.x + px / this.scale, this.y + py / this.scale];
    this.scale = clamp(this.scale * factor, this.fit, this.closest);
    this.fitted = this.scale <= this.fit * 1.001;
    [this.x, this.y] = [x - px / this.scale, y - py / this.scale];
    this.settle();
  }

  settle() {
    this.scale = clamp(this.scale, this.fit, this.closest);
    const inside = (at, size, room) => clamp(at, 0, Math.max(0, size - room / this.scale));
    [this.x, this.y] = [inside(this.x, this.S, this.width), inside(this.y, this.T, this.height)];
  }

  // Scroll and zoom to a pair.
  reveal(query, key, scale = this.scale) {
    this.scale = clamp(scale, this.fit, this.closest);
    this.fitted = this.scale <= this.fit * 1.001;
    this.center(key + 0.5, query + 0.5);
  }

  cellAt(px, py) {
    const [key, query] = [Math.floor(this.x + px / this.scale), Math.floor(this.y + py / this.scale)];
    return key >= 0 && query >= 0 && key < this.S && query < this.T && px >= 0 && py >= 0 && px <= this.width && py <= this.height ? { query, key } : null;
  }

  get text() {
    return this.fitted ? "" : [this.x, this.y, this.scale].map((n) => Number(n.toPrecision(6))).join(",");
  }

  read(text) {
    const numbers = text.split(",").map(Number);
    if (numbers.length !== 3 || !numbers.every(Number.isFinite)) return this.showAll();
    // The URL is read before the layout: until the user moves the map, every resize starts from it again.
    this.asked = numbers;
    return this.take(numbers);
  }

  take([x, y, scale]) {
    [this.x, this.y, this.scale, this.fitted] = [x, y, scale, false];
    this.settle();
  }
}
