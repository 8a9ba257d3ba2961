// A head's map as a picture with one number per square of `span` queries and keys, at several zoom levels.

const SIDE = 256;

class Picture {
  constructor(values, rows, cols, span, T, kind, pairs = null) {
    Object.assign(this, { values, rows, cols, span, T, kind, pairs });
  }

  // The next coarser level. mass: summed over keys, averaged over queries; peak: the largest; uniform: averaged over
  // visible pairs. The same pooling as in Python (view/pictures.py), for pages without a server.
  halved() {
    const [rows, cols] = [Math.ceil(this.rows / 2), Math.ceil(this.cols / 2)];
    const values = new Float32Array(rows * cols);
    const pairs = this.pairs && new Float32Array(rows * cols);
    for (let r = 0; r < this.rows; r++) {
      const share = this.queries(r) / this.queries(r - (r % 2), 2);
      for (let c = 0; c < this.cols; c++) {
        const [from, to] = [r * this.cols + c, (r >> 1) * cols + (c >> 1)];
        if (this.kind === "peak") values[to] = Math.max(values[to], this.values[from]);
        else if (pairs) {
          values[to] += this.values[from] * this.pairs[from];
          pairs[to] += this.pairs[from];
        } else values[to] += this.values[from] * share;
      }
    }
    if (pairs) for (let i = 0; i < values.length; i++) values[i] /= Math.max(1, pairs[i]);
    return new Picture(values, rows, cols, 2 * this.span, this.T, this.kind, pairs);
  }

  // The number of queries in one row of squares, or in several.
  queries(row, rows = 1) {
    return Math.min(this.T, (row + rows) * this.span) - row * this.span;
  }

  tile(row, col) {
    const found = new Float32Array(SIDE * SIDE);
    const [top, left] = [row * SIDE, col * SIDE];
    const width = Math.min(SIDE, this.cols - left);
    if (width <= 0) return found;
    for (let r = 0; r < Math.min(SIDE, this.rows - top); r++) {
      const from = (top + r) * this.cols + left;
      found.set(this.values.subarray(from, from + width), r * SIDE);
    }
    return found;
  }
}

// The finest picture of a kind, from all weights T × S.
function pictureOfWeights(weights, T, S, kind, reach, first) {
  if (kind === "mass" || kind === "peak") return new Picture(weights, T, S, 1, T, kind);
  const values = new Float32Array(T * S);
  const pairs = kind === "uniform" ? new Float32Array(T * S) : null;
  for (let t = 0; t < T; t++) {
    const row = weights.subarray(t * S, (t + 1) * S);
    if (pairs) {
      for (let s = 0; s < S; s++) {
        pairs[t * S + s] = reach.sees(t, s, row[s]) ? 1 : 0;
        values[t * S + s] = row[s] * reach.count(t);
      }
    } else {
      let rest = 0;
      for (let s = 0; s < S; s++) if (s !== first) rest += row[s];
      for (let s = 0; s < S; s++) values[t * S + s] = rest > 0 && s !== first ? row[s] / rest : 0;
    }
  }
  return new Picture(values, T, S, 1, T, kind, pairs);
}

// Which keys each query may see.
class Reach {
  constructor(section, head) {
    const [, heads, T] = section.shape;
    const start = Math.min(head, heads - 1) * T;
    [this.firsts, this.ends, this.counts] = [0, 1, 2].map((i) =>
      section.values.subarray(i * heads * T + start, i * heads * T + start + T),
    );
  }

  first(query) {
    return this.firsts[query];
  }

  end(query) {
    return this.ends[query];
  }

  count(query) {
    return this.counts[query];
  }

  sees(query, key, weight = 0) {
    const [first, end] = [this.firsts[query], this.ends[query]];
    if (key < first || key >= end) return false;
    return this.counts[query] === end - first || weight > 0;
  }
}
