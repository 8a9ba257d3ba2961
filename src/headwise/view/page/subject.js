// What is shown: one head, the average of a layer ("3.*"), of one head over layers ("*.5") or of all ("*.*");
// of the first text or, with the prefix "b:", of the one it is compared with.

// The number of a layer in its model, and the name of one of its heads.
const numberOf = (manifest, l) => manifest.layers[l].number ?? l;
const headName = (manifest, l, h) => `${numberOf(manifest, l)}.${manifest.layers[l].heads[h].head}`;

class Subject {
  constructor(side, layer, head) {
    Object.assign(this, { side, layer, head });
  }

  static parse(text, sides) {
    const match = /^(b:)?(\d+|\*)\.(\d+|\*)$/.exec(text || "");
    if (!match) return null;
    const [layer, head] = match.slice(2).map((part) => (part === "*" ? "*" : Number(part)));
    const found = new Subject(match[1] ? 1 : 0, layer, head);
    return sides[found.side] && found.members(sides[found.side].manifest).length ? found : null;
  }

  get id() {
    return `${this.side ? "b:" : ""}${this.layer}.${this.head}`;
  }

  get single() {
    return this.layer !== "*" && this.head !== "*";
  }

  members(manifest) {
    const found = [];
    manifest.layers.forEach((layer, l) => {
      if (this.layer !== "*" && this.layer !== l) return;
      layer.heads.forEach((_, h) => (this.head === "*" || this.head === h) && found.push([l, h]));
    });
    return found;
  }

  name(manifest) {
    if (this.single) return headName(manifest, this.layer, this.head);
    if (this.layer !== "*") return `layer ${numberOf(manifest, this.layer)}, average`;
    return this.head === "*" ? "average of all heads" : `head ${this.head}, average over layers`;
  }

  title(manifest) {
    const name = this.name(manifest);
    return this.single ? `Head ${name}` : name[0].toUpperCase() + name.slice(1);
  }

  // What it does, to follow its name.
  about(manifest) {
    if (this.single) return manifest.layers[this.layer].heads[this.head].about;
    return `covers ${plural(this.members(manifest).length, "head")}`;
  }
}

// Data of subjects: the data of a source, averaged over the heads of the subject.
class SubjectData {
  constructor(app) {
    this.app = app;
  }

  side(subject) {
    return this.app.sides[subject.side];
  }

  // Its data, of the measure that is shown.
  source(subject) {
    return this.side(subject).source.as(this.app.measure);
  }

  members(subject) {
    return subject.members(this.side(subject).manifest);
  }

  depth(subject, kind) {
    const source = this.source(subject);
    return Math.min(...this.members(subject).map(([l, h]) => source.depth(l, h, kind)));
  }

  async tile(subject, level, row, col, kind) {
    const source = this.source(subject);
    const found = await Promise.all(this.members(subject).map(([l, h]) => source.tile(l, h, level, row, col, kind)));
    return averaged(found);
  }

  async difference(a, b, level, row, col, kind) {
    const [x, y] = await Promise.all([a, b].map((subject) => this.tile(subject, level, row, col, kind)));
    return x && y && x.map((value, i) => value - y[i]);
  }

  async margins(subject) {
    const source = this.source(subject);
    const found = await Promise.all(this.members(subject).map(([l, h]) => source.margins(l, h)));
    if (found.some((x) => !x)) return null;
    const mean = (name) => averaged(found.map((x) => x[name]));
    return { bin: found[0].bin, entropy: mean("entropy"), peak: mean("peak"), distance: mean("distance"), received: mean("received") };
  }

  reach(subject) {
    const [layer, head] = this.members(subject)[0];
    return this.source(subject).reach(layer, head);
  }

  // kind: of the pictures that the row is read from where there are no single numbers.
  row(subject, query, kind = "mass") {
    return this.list(subject, "row", "keys", query, kind);
  }

  column(subject, key) {
    return this.list(subject, "column", "queries", key);
  }

  // How many tokens each number of a row covers: 1 if the source has single ones.
  spanOf(subject, kind) {
    if (this.exact(subject)) return 1;
    return 2 ** (this.side(subject).manifest.levels - this.depth(subject, kind));
  }

  // The average of several heads needs all their weights; the largest of each do not give it.
  exact(subject) {
    const [source, members] = [this.source(subject), this.members(subject)];
    const rows = members.map(([l, h]) => source.hasRows(l, h));
    return members.length === 1 ? rows[0] : rows.every((has) => has === "all") ? "all" : null;
  }

  // A row or column; for several heads the average.
  async list(subject, verb, places, index, kind) {
    const source = this.source(subject);
    const exact = this.exact(subject);
    if (!exact && verb === "column") return null;
    const found = await Promise.all(this.members(subject).map(([l, h]) => (exact ? source[verb](l, h, index) : source.coarseRow(l, h, index, kind))));
    if (found.length === 1 || found.some((x) => !x)) return found.length === 1 ? found[0] : null;
    const [sums, errors] = [new Map(), new Map()];
    for (const part of found) part[places].forEach((place, i) => {
      sums.set(place, (sums.get(place) || 0) + part.weights[i]);
      errors.set(place, (errors.get(place) || 0) + (part.errors?.[i] || 0));
    });
    const order = Array.from(sums).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]) || a[0] - b[0]);
    return { [places]: order.map((x) => x[0]), weights: order.map((x) => x[1] / found.length), errors: order.map((x) => errors.get(x[0]) / found.length), whole: found[0].whole, span: found[0].span };
  }

  async cell(subject, query, key, kind) {
    const source = this.source(subject);
    const members = this.members(subject);
    if (members.length === 1) return source.cell(...members[0], query, key, kind);
    if (!this.exact(subject)) return null;
    const row = await this.row(subject, query);
    if (!row) return null;
    const place = row.keys.indexOf(key);
    const visible = (await this.reach(subject)).count(query);
    if (place < 0) return { weight: 0, logit: null, rank: null, visible, hidden: true };
    return { weight: row.weights[place], error: row.errors[place], logit: null, rank: row.weights.indexOf(row.weights[place]) + 1, visible };
  }
}

function averaged(arrays) {
  if (arrays.length === 1 || arrays.some((x) => !x)) return arrays.length === 1 ? arrays[0] : null;
  const found = new Float32Array(arrays[0].length);
  for (const values of arrays) for (let i = 0; i < found.length; i++) found[i] += values[i];
  return found.map((x) => x / arrays.length);
}
