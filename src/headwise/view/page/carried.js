// What weights carry (view/carried.py): the same data as of weights, of weights times what they carry or of contributions.

const MEASURES = {
  weights: { name: "Weights", unit: "attention weight", short: "weight", told: "attention weights, the share of its attention that each token gives to each other token." },
  value: { name: "Weights × what they carry", unit: "weight × what it carries", short: "weight × what it carries", told: "weights × what they carry, each weight times the size of what the attended token passes on, with rows rescaled to sum to 1. Names and percentages of heads describe their weights." },
  contribution: { name: "Contributions", unit: "share of what the head writes", short: "of what the head writes here", told: "contributions, how much of what the head writes at each token comes from each attended token. Below 0, it pulls the other way. The first token is included. Names and percentages of heads describe their weights." },
};

const WEIGHED = 24; // heads whose weighted maps are kept

class CarriedSource extends EmbeddedSource {
  constructor(plain, measure) {
    super(plain.manifest, plain.sections);
    Object.assign(this, { plain, measure, made: new Map(), small: new Map() });
  }

  as(measure) {
    return this.plain.as(measure);
  }

  // All kinds can be made of weighted maps; shares of either sign can only be added up.
  get kinds() {
    return this.measure === "value" && this.plain.hasDense(0, 0) ? null : ["mass"];
  }

  hasDense(layer, head) {
    if (this.measure === "value") return this.plain.hasDense(layer, head);
    const name = this.pictureName(layer, head);
    return this.sections.has(name) && this.sections.shape(name)[0] === this.manifest.T;
  }

  // A weighted number is as precise as its weight, in proportion, and as the sum of its row, which should be 1.
  async errorAt(layer, head) {
    if (this.measure !== "value") {
      const error = this.sections.error(this.pictureName(layer, head));
      return (query, key, value) => error(value);
    }
    if (!this.hasDense(layer, head)) return () => 0;
    const [plain, error] = await Promise.all([this.plain.dense(layer, head), this.plain.errorAt(layer, head)]);
    const { S } = this.manifest;
    const missing = new Map();
    const ofRow = (query) => {
      if (!missing.has(query)) missing.set(query, Math.abs(1 - plain.values.subarray(query * S, (query + 1) * S).reduce((a, b) => a + b, 0)));
      return missing.get(query);
    };
    return (query, key, value) => {
      const weight = plain.values[query * S + key];
      const its = error(query, key, weight);
      return weight > 0 && its > 0 ? value * (its / weight + ofRow(query)) : 0;
    };
  }

  hasRows(layer, head) {
    return this.hasDense(layer, head) ? "all" : null;
  }

  dense(layer, head) {
    if (!this.hasDense(layer, head)) return Promise.resolve(null);
    if (this.measure !== "value") return this.sections.get(this.pictureName(layer, head));
    const name = `${layer}.${head}`;
    if (!this.made.has(name)) this.made.set(name, this.weighed(layer, head));
    if (this.made.size > WEIGHED) this.made.delete(this.made.keys().next().value);
    return this.made.get(name);
  }

  async weighed(layer, head) {
    const { T, S } = this.manifest;
    const [weights, sizes] = await Promise.all([this.plain.dense(layer, head), this.sections.get(`norms/${layer}`)]);
    const norms = sizes.values.subarray(head * S, (head + 1) * S);
    const values = new Float32Array(T * S);
    for (let t = 0; t < T; t++) {
      let sum = 0;
      for (let s = 0; s < S; s++) sum += values[t * S + s] = weights.values[t * S + s] * norms[s];
      for (let s = 0; s < S; s++) values[t * S + s] = sum > 0 ? values[t * S + s] / sum : weights.values[t * S + s];
    }
    return { shape: [T, S], values };
  }

  pictureName(layer, head) {
    return `${this.measure}/${layer}.${head}`;
  }

  // Made from the finest picture, which is halved until it is small.
  thumbnail(layer, head, without = false) {
    const kind = without && !this.kinds ? "rest" : "mass";
    const name = `${kind} ${layer}.${head}`;
    if (!this.small.has(name)) this.small.set(name, this.reduced(layer, head, kind));
    return this.small.get(name);
  }

  async reduced(layer, head, kind) {
    let picture = await this.deepestPicture(layer, head, this.depth(layer, head, kind), kind);
    while (Math.max(picture.rows, picture.cols) > 64) picture = picture.halved();
    return picture;
  }

  async onFirst(layer, head) {
    const dense = await this.dense(layer, head);
    if (!dense) return null;
    const { T, S, first } = this.manifest;
    let sum = 0;
    for (let t = first + 1; t < T; t++) sum += dense.values[t * S + first];
    return sum / Math.max(1, T - first - 1);
  }

  async margins() {
    return null; // they are those of weights
  }

  async known() {
    return null;
  }

  bestNames() {
    return []; // those of the page are weights
  }

  async cell(layer, head, query, key, kind) {
    const [found, plain] = await Promise.all([super.cell(layer, head, query, key, kind), this.plain.cell(layer, head, query, key)]);
    return found && { ...found, logit: null, plain: plain?.weight ?? null, plainError: plain?.error || 0 };
  }
}
