// Moving and zooming a map: wheel, drag, pinch, double click, keys.

class Gestures {
  constructor(map, acts) {
    Object.assign(this, { map, acts, pointers: new Map(), moved: 0 });
    const { canvas } = map;
    const on = (name, run, options) => canvas.addEventListener(name, run, options);
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event));
    on("pointercancel", (event) => this.pointers.delete(event.pointerId));
    on("pointerleave", (event) => event.pointerType === "mouse" && !this.pointers.size && acts.point(null)); // a lifted finger leaves what it chose
    on("dblclick", (event) => this.smooth(event.shiftKey ? 0.5 : 2, ...this.at(event)));
    on("keydown", (event) => this.key(event));
    on("focus", () => !map.cursor && map.canvas.matches(":focus-visible") && acts.point(this.middle()));
  }

  at(event) {
    const box = this.map.canvas.getBoundingClientRect();
    return [event.clientX - box.left - this.map.pads.left, event.clientY - box.top - this.map.pads.top];
  }

  wheel(event) {
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
    if (event.shiftKey) this.map.view.move(-pixels, 0);
    else this.map.view.zoom(Math.exp(-clamp(pixels, -240, 240) / (event.ctrlKey ? 120 : 320)), ...this.at(event));
    this.acts.moved();
  }

  down(event) {
    if (event.button) return;
    this.map.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.at(event));
    this.moved = 0;
    this.jump(event);
  }

  // A press on the small map moves the window there.
  jump(event) {
    const { mini, pads, view } = this.map;
    const [px, py] = this.at(event);
    if (!mini) return;
    const [x, y] = [px + pads.left - mini.x, py + pads.top - mini.y];
    if (x < 0 || y < 0 || x > mini.w || y > mini.h) return;
    view.center(x / mini.scale, y / mini.scale);
    this.moved = 99;
    this.acts.moved();
  }

  move(event) {
    const now = this.at(event);
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.acts.point(this.map.view.cellAt(...now));
    const others = Array.from(this.pointers.values());
    if (others.length === 2) {
      const [a, b] = others;
      const other = before === a ? b : a;
      const apart = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
      this.map.view.zoom(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else this.map.view.move(now[0] - before[0], now[1] - before[1]);
    this.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    this.pointers.set(event.pointerId, now);
    return this.acts.moved();
  }

  up(event) {
    const there = this.pointers.delete(event.pointerId);
    if (there && this.moved < 5) {
      const cell = this.map.view.cellAt(...this.at(event));
      if (cell) {
        const { cursor } = this.map;
        const again = cursor?.query === cell.query && cursor.key === cell.key; // always so with a mouse
        this.acts.point(cell);
        this.acts.choose(cell, again);
      }
    }
  }

  middle() {
    const { view } = this.map;
    return view.cellAt(Math.min(view.width, this.map.plot?.width ?? 1) / 2, Math.min(view.height, this.map.plot?.height ?? 1) / 2);
  }

  key(event) {
    const { view } = this.map;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) this.step(...step, event.shiftKey ? 10 : 1);
    else if (event.key === "+" || event.key === "=") this.smooth(2, ...this.focus());
    else if (event.key === "-") this.smooth(0.5, ...this.focus());
    else if (event.key === "0") {
      view.showAll();
      this.acts.moved();
    } else if (event.key === "Enter" && this.map.cursor) this.acts.choose(this.map.cursor);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Keys zoom at the cursor.
  focus() {
    const { view, cursor } = this.map;
    if (!cursor) return [view.width / 2, view.height / 2];
    return [(cursor.key + 0.5 - view.x) * view.scale, (cursor.query + 0.5 - view.y) * view.scale];
  }

  step(dy, dx, by) {
    const { view } = this.map;
    const far = by * Math.max(1, Math.round(4 / view.scale)); // at least four pixels, to be visible
    const from = this.map.cursor || this.middle() || { query: 0, key: 0 };
    const cell = { query: clamp(from.query + dy * far, 0, view.T - 1), key: clamp(from.key + dx * far, 0, view.S - 1) };
    this.acts.point(cell);
    const [x, y] = this.focus();
    if (x < 0 || y < 0 || x > view.width || y > view.height) {
      view.center(cell.key + 0.5, cell.query + 0.5);
      this.acts.moved();
    }
  }

  smooth(factor, px, py) {
    const steps = prefersStill() ? 1 : 8;
    let done = 0;
    const turn = () => {
      this.map.view.zoom(factor ** (1 / steps), px, py);
      this.acts.moved();
      if (++done < steps) requestAnimationFrame(turn);
    };
    turn();
  }
}
