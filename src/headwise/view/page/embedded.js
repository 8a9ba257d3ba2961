// A data source that reads the sections of the page. Data that is not embedded is null, and the page says so. It gives
// attention weights; `as` gives the same of another measure.

class EmbeddedSource {
  constructor(manifest, sections) {
    Object.assign(this, { manifest, sections, measure: "weights", pictures: new Map(), others: {} });
  }

  as(measure) {
    if (measure === this.measure) return this;
    return (this.others[measure] ||= new CarriedSource(this, measure));
  }

  // All weights of a head, if the page has them.
  dense(layer, head) {
    return this.sections.get(`weights/${layer}.${head}`);
  }

  // How far a number may be from the true one; see Sections.
  async errorAt(layer, head) {
    const name = this.hasDense(layer, head) ? `weights/${layer}.${head}` : `values/${layer}.${head}`;
    const error = this.sections.error(name);
    return (query, key, value) => error(value);
  }

  hasDense(layer, head) {
    return this.sections.has(`weights/${layer}.${head}`);
  }

  pictureName(layer, head, kind) {
    return `${kind}/${layer}.${head}`;
  }

  // The deepest level that has pictures.
  depth(layer, head, kind) {
    if (this.hasDense(layer, head)) return this.manifest.levels;
    const name = this.pictureName(layer, head, kind);
    if (!this.sections.has(name)) return NONE;
    const { T, levels } = this.manifest;
    for (let level = levels; level > levels - 16; level--)
      if (Math.ceil(T / 2 ** (levels - level)) === this.sections.shape(name)[0]) return level;
    return NONE;
  }

  // The kinds of pictures that there are of every head.
  get kinds() {
    return this.manifest.embedded?.kinds || null;
  }

  hasRows(layer, head) {
    return this.hasDense(layer, head) ? "all" : this.sections.has(`keys/${layer}.${head}`) ? "top" : null;
  }

  async tile(layer, head, level, row, col, kind) {
    const picture = await this.picture(layer, head, level, kind);
    return picture && picture.tile(row, col);
  }

  picture(layer, head, level, kind) {
    const deepest = this.depth(layer, head, kind);
    if (level > deepest) return Promise.resolve(null);
    const name = `${kind}/${layer}.${head}/${level}`;
    if (!this.pictures.has(name)) {
      const made = level === deepest ? this.deepestPicture(layer, head, level, kind) : this.coarser(layer, head, level, kind);
      this.pictures.set(name, made);
      if (this.pictures.size > 96) this.pictures.delete(this.pictures.keys().next().value);
    }
    return this.pictures.get(name);
  }

  async coarser(layer, head, level, kind) {
    return (await this.picture(layer, head, level + 1, kind)).halved();
  }

  async deepestPicture(layer, head, level, kind) {
    const { T, S, levels } = this.manifest;
    const dense = await this.dense(layer, head);
    if (dense) return pictureOfWeights(dense.values, T, S, kind, await this.reach(layer, head), this.manifest.first);
    const { shape, values } = await this.sections.get(this.pictureName(layer, head, kind));
    return new Picture(values, shape[0], shape[1], 2 ** (levels - level), T, kind);
  }

  async reach(layer, head) {
    return new Reach(await this.sections.get(`reach/${this.manifest.layers[layer].reach}`), head);
  }

  // A small picture: of all weights, or without the first token.
  async thumbnail(layer, head, without = false) {
    return pictureIn(await this.sections.get(`${without ? "patterns" : "thumbnails"}/${layer}`), head);
  }

  // How much of a head's rows is on the first token, on average over the tokens after it; null if that is not known.
  async onFirst(layer, head) {
    return this.manifest.layers[layer].heads[head].numbers.sink;
  }

  // Numbers along the edges, in bins of `bin`: entropy, largest weight and distance by query, received weight by key.
  async margins(layer, head) {
    const [rows, received] = await Promise.all([this.sections.get(`rows/${layer}`), this.sections.get(`received/${layer}`)]);
    const [R, C] = [rows.shape[2], received.shape[1]];
    const at = (i) => rows.values.subarray((3 * head + i) * R, (3 * head + i + 1) * R);
    return { bin: this.manifest.bin, entropy: at(0), peak: at(1), distance: at(2), received: received.values.subarray(head * C, (head + 1) * C) };
  }

  async row(layer, head, query) {
    const { S } = this.manifest;
    const dense = await this.dense(layer, head);
    if (dense) {
      const [weights, reach] = [dense.values.subarray(query * S, (query + 1) * S), await this.reach(layer, head)];
      const keys = Array.from(weights.keys()).filter((key) => reach.sees(query, key, Math.abs(weights[key])));
      keys.sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]) || a - b);
      const error = await this.errorAt(layer, head);
      return { keys, weights: keys.map((key) => weights[key]), errors: keys.map((key) => error(query, key, weights[key])), whole: true };
    }
    const known = await this.known(layer, head);
    if (!known) return this.coarseRow(layer, head, query);
    const most = Math.min(known.k, (await this.reach(layer, head)).count(query));
    const [from, to] = [query * known.k, query * known.k + most];
    return { keys: Array.from(known.keys.subarray(from, to)), weights: Array.from(known.weights.subarray(from, to)), whole: false };
  }

  // Without single weights: what the finest picture says of the queries around this one, in ranges of keys.
  async coarseRow(layer, head, query, kind = "mass") {
    const level = this.depth(layer, head, kind);
    if (level === NONE) return null;
    const picture = await this.picture(layer, head, level, kind);
    const from = Math.floor(query / picture.span) * picture.cols;
    const values = picture.values.subarray(from, from + picture.cols);
    const order = Array.from(values.keys()).filter((col) => values[col] !== 0).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, 64);
    const error = this.sections.error(this.pictureName(layer, head, kind));
    return { keys: order.map((col) => col * picture.span), weights: order.map((col) => values[col]), errors: order.map((col) => error(values[col])), span: picture.span, kind, whole: false };
  }

  // The pixel of the finest picture that covers a pair.
  async pixel(layer, head, query, key, kind) {
    const level = this.depth(layer, head, kind);
    if (level === NONE) return null;
    const { values, cols, span } = await this.picture(layer, head, level, kind);
    const sum = values[Math.floor(query / span) * cols + Math.floor(key / span)];
    return { weight: null, sum, span, kind, error: this.sections.error(this.pictureName(layer, head, kind))(sum) };
  }

  // For one query, what each head attends to most besides the first token: place, key, weight; the strongest first.
  async ranking(query) {
    const found = await Promise.all(this.manifest.layers.flatMap((layer, l) => layer.heads.map((_, h) => this.strongest(l, h, query))));
    return found.filter((one) => one?.weight > 0).sort((a, b) => b.weight - a.weight);
  }

  // All heads from single weights, or all from pictures, whose rows cover several queries: the two cannot be compared.
  async strongest(layer, head, query) {
    const { T, S, first } = this.manifest;
    const place = `${layer}.${head}`;
    const dense = await this.dense(layer, head);
    if (dense) {
      const found = largestKey(dense.values.subarray(query * S, (query + 1) * S), place, first);
      return { ...found, error: (await this.errorAt(layer, head))(query, found.key, found.weight) };
    }
    const [keys, weights] = await Promise.all(this.bestNames(layer).map((name) => this.sections.get(name)));
    if (keys) return { place, key: keys.values[head * T + query], weight: weights.values[head * T + query], span: 1 };
    const row = await this.coarseRow(layer, head, query);
    if (!row) return null;
    const i = row.keys.findIndex((key) => first < key || first >= key + row.span);
    return i < 0 ? null : { place, key: row.keys[i], weight: row.weights[i], error: row.errors[i], span: row.span };
  }

  bestNames(layer) {
    return [`best-keys/${layer}`, `best/${layer}`];
  }

  // The largest weights of a head, to draw below the finest picture.
  async known(layer, head) {
    if (this.hasRows(layer, head) !== "top") return null;
    const [keys, values] = await Promise.all(["keys", "values"].map((name) => this.sections.get(`${name}/${layer}.${head}`)));
    return { keys: keys.values, weights: values.values, k: keys.shape[1] };
  }

  async column(layer, head, key) {
    const { T, S } = this.manifest;
    const found = [];
    const [dense, error] = await Promise.all([this.dense(layer, head), this.errorAt(layer, head)]);
    if (dense) {
      const reach = await this.reach(layer, head);
      for (let t = 0; t < T; t++) if (reach.sees(t, key, Math.abs(dense.values[t * S + key]))) found.push([t, dense.values[t * S + key]]);
    } else {
      const known = await this.known(layer, head);
      if (!known) return null;
      known.keys.forEach((each, i) => each === key && known.weights[i] > 0 && found.push([Math.floor(i / known.k), known.weights[i]]));
    }
    found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]) || a[0] - b[0]);
    return { queries: found.map((x) => x[0]), weights: found.map((x) => x[1]), errors: found.map(([query, weight]) => error(query, key, weight)), whole: Boolean(dense) };
  }

  async cell(layer, head, query, key, kind = "mass") {
    const reach = await this.reach(layer, head);
    const visible = reach.count(query);
    const row = await this.row(layer, head, query);
    if (!row || row.span) return reach.sees(query, key, 1) ? this.pixel(layer, head, query, key, kind) : { weight: 0, logit: -Infinity, rank: null, visible, hidden: true };
    const place = row.keys.indexOf(key);
    if (place < 0 && (row.whole || !reach.sees(query, key, 1))) return { weight: 0, logit: -Infinity, rank: null, visible, hidden: true };
    if (place < 0) return { weight: null, below: row.weights.at(-1), visible };
    const logs = await this.sections.get(`logs/${layer}.${head}`);
    const weight = row.weights[place];
    return { weight, error: row.errors?.[place] || 0, logit: logs ? Math.log(weight) + logs.values[query] : null, rank: row.weights.indexOf(weight) + 1, visible };
  }
}

// The picture of one head among those of its layer.
function pictureIn({ shape: [, rows, cols], values }, head) {
  return { rows, cols, values: values.subarray(head * rows * cols, (head + 1) * rows * cols) };
}

// The largest weight of a row besides the first.
function largestKey(row, place, first) {
  let key = first ? 0 : 1;
  for (let i = key + 1; i < row.length; i++) if (i !== first && row[i] > row[key]) key = i;
  return { place, key, weight: row[key] || 0, span: 1 };
}
