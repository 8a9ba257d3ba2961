// A cache of painted tiles. Each is requested once; until it arrives, a coarser one is drawn.

const KEPT = 128;
const NONE = -99; // the depth of a map without pictures

class Tiles {
  constructor(ask, depth, levels, T, S, look, changed) {
    Object.assign(this, { ask, depth, levels, T, S, look, changed, known: new Map(), waiting: 0 });
  }

  // The finest level whose pixels are not smaller than those of the screen, among those that have pictures.
  level(scale) {
    const ratio = window.devicePixelRatio || 1;
    let level = Math.min(this.depth, this.levels);
    while (level > this.coarsest && 2 ** (this.levels - level) * scale * ratio < 0.99) level--;
    return level;
  }

  // Level 0 shows the whole map in 256 pixels; a file may have coarser pictures only.
  get coarsest() {
    return Math.min(0, this.depth);
  }

  get(level, row, col, urgent = true) {
    const name = `${level}/${row}/${col}`;
    let tile = this.known.get(name);
    if (tile) {
      this.known.delete(name); // moved to the end: the least recently used go first
      this.known.set(name, tile);
    } else if (urgent) {
      tile = { canvas: null, values: null };
      this.known.set(name, tile);
      this.load(tile, level, row, col);
      if (this.known.size > KEPT) this.known.delete(this.known.keys().next().value);
    }
    return tile;
  }

  async load(tile, level, row, col) {
    this.waiting++;
    try {
      tile.values = await this.ask(level, row, col);
      if (tile.values) tile.canvas = paint(tile.values, SIDE, SIDE, this.look.scale, this.look.dark);
    } finally {
      this.waiting--;
      this.changed();
    }
  }

  draw(context, view) {
    if (this.depth === NONE) return;
    const level = this.level(view.scale);
    const size = SIDE * 2 ** (this.levels - level);
    const [bottom, right] = [Math.min(this.T, view.y + view.height / view.scale), Math.min(this.S, view.x + view.width / view.scale)];
    for (let row = Math.floor(view.y / size); row * size < bottom; row++)
      for (let col = Math.floor(view.x / size); col * size < right; col++) this.drawOne(context, view, level, row, col);
  }

  // Draw the tile, or the part of a coarser one that covers it.
  drawOne(context, view, level, row, col) {
    for (let up = 0; up <= level - this.coarsest; up++) {
      const tile = this.get(level - up, row >> up, col >> up, up === 0 || up === level - this.coarsest);
      if (!tile || !tile.canvas) continue;
      const size = SIDE * 2 ** (this.levels - level);
      const [part, span] = [SIDE / 2 ** up, 2 ** (this.levels - level + up)];
      const [left, top] = [(col % 2 ** up) * part, (row % 2 ** up) * part];
      // Draw nothing beyond the last token.
      const [wide, tall] = [Math.min(size, this.S - col * size), Math.min(size, this.T - row * size)];
      // Very large pixels are drawn faintly, so that single known weights stand out.
      context.globalAlpha = span * view.scale > 40 && span > 1 ? 0.07 : 1;
      context.drawImage(tile.canvas, left, top, wide / span, tall / span,
        (col * size - view.x) * view.scale, (row * size - view.y) * view.scale, wide * view.scale, tall * view.scale);
      context.globalAlpha = 1;
      return;
    }
  }

  // The value of a pixel of the deepest level, if it is loaded.
  value(query, key) {
    const tile = this.known.get(`${this.levels}/${query >> 8}/${key >> 8}`);
    return tile && tile.values ? tile.values[(query & 255) * SIDE + (key & 255)] : null;
  }
}
