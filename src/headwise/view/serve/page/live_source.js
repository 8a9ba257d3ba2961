// A data source that asks the server. Every tile, row and weight is exact, except that wide tiles of long texts are first
// made from some of their rows; they are requested again in full once nothing else is pending.

class LiveSource extends EmbeddedSource {
  constructor(manifest, sections, connection, id, measure = "weights", plain = null) {
    super(manifest, sections);
    Object.assign(this, { connection, id, measure, plain: plain || this, tiles: new Map(), small: new Map(), unfinished: new Map(), running: 0, closed: false });
    this.onrefined = (place) => plain?.onrefined(place);
    this.onrows = () => plain?.onrows?.();
    this.rows = null; // of the widest tile that is not exact yet: [rows, of]
  }

  as(measure) {
    const { plain } = this;
    if (measure === plain.measure) return plain;
    return (plain.others[measure] ||= new LiveSource(plain.manifest, plain.sections, plain.connection, plain.id, measure, plain));
  }

  get kinds() {
    return this.measure === "contribution" ? ["mass"] : null;
  }

  async margins(layer, head) {
    return this.measure === "weights" ? super.margins(layer, head) : null;
  }

  // Those of weights come with the page; others are made when they are first shown, a layer at a time.
  async thumbnail(layer, head, without = false) {
    if (this.measure === "weights") return super.thumbnail(layer, head, without);
    const name = `${layer} ${without}`;
    if (!this.small.has(name)) this.small.set(name, this.answer("thumbnails", { layer, without: without ? 1 : 0 }).then((section) => section && unpacked(section)));
    const found = await this.small.get(name);
    return found && pictureIn(found, head);
  }

  async onFirst(layer, head) {
    return this.measure === "weights" ? super.onFirst(layer, head) : null;
  }

  depth() {
    return this.manifest.levels;
  }

  hasRows() {
    return "all";
  }

  async errorAt() {
    return () => 0;
  }

  address(what, query) {
    const measure = this.measure === "weights" ? {} : { measure: this.measure };
    return `/api/runs/${this.id}/${what}?${new URLSearchParams({ ...query, ...measure })}`;
  }

  async answer(what, query) {
    if (this.closed) return null;
    try {
      return await (await this.connection.patiently(this.address(what, query))).json();
    } catch (error) {
      if (error instanceof Lost || error instanceof Locked || error.status === 404) return null; // a new run follows
      throw error;
    }
  }

  async row(layer, head, query) {
    return this.answer("row", { layer, head, query });
  }

  async ranking(query) {
    return this.answer("ranking", { query });
  }

  async column(layer, head, key) {
    return this.answer("column", { layer, head, key });
  }

  async cell(layer, head, query, key) {
    const found = await this.answer("cell", { layer, head, query, key });
    return found && (found.logit === null ? { ...found, logit: -Infinity, hidden: true } : { ...found, logit: this.measure === "weights" ? found.logit : null });
  }

  tile(layer, head, level, row, col, kind) {
    const place = { layer, head, level, row, col, kind };
    const name = Object.values(place).join("/");
    const known = this.tiles.get(name) || this.fetched(name, place, false);
    this.tiles.delete(name); // the most recently used are kept
    this.tiles.set(name, known);
    if (this.tiles.size > 400) this.tiles.delete(this.tiles.keys().next().value);
    return known;
  }

  async fetched(name, place, exact) {
    if (this.closed) return null;
    this.running++;
    try {
      const answer = await this.connection.patiently(this.address("tile", exact ? { ...place, exact: 1 } : place));
      const [rows, of] = answer.headers.get("X-Rows").split("/").map(Number);
      if (rows < of) this.unfinished.set(name, { place, rows, of });
      else this.unfinished.delete(name);
      return new Float32Array(await answer.arrayBuffer());
    } catch (error) {
      this.tiles.delete(name);
      if (error instanceof Lost || error instanceof Locked || error.status === 404) return null;
      throw error;
    } finally {
      this.running--;
      this.tellRows();
      this.refineSoon();
    }
  }

  tellRows() {
    const widest = Array.from(this.unfinished.values()).sort((a, b) => b.of - a.of)[0];
    this.rows = this.plain.rows = widest ? [widest.rows, widest.of] : null;
    this.onrows(this.rows);
  }

  refineSoon() {
    clearTimeout(this.timer);
    if (this.unfinished.size && !this.closed) this.timer = setTimeout(() => this.refine(), 300);
  }

  // The last requested tile is the most likely to be visible.
  async refine() {
    if (this.running || this.closed) return;
    const [name, { place }] = Array.from(this.unfinished).at(-1);
    this.unfinished.delete(name);
    if (!this.tiles.has(name)) return this.refineSoon();
    const whole = await this.fetched(name, place, true).catch(() => null);
    if (!whole) return;
    this.tiles.set(name, Promise.resolve(whole));
    this.onrefined(place);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const other of Object.values(this.others)) other.close();
  }
}
