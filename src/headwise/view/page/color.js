// The colors of numbers. The color maps come from Python (view/color.py), in SHARED: 256 colors each. Zero is the color of
// the background, and more is more ink.

const RAMPS = Object.fromEntries(Object.entries(SHARED.colors).map(([name, hex]) => [name, Uint8ClampedArray.from(hex.match(/../g), (byte) => parseInt(byte, 16))]));
const POWERS = [1, 0.7, 0.5, 0.35, 0.25]; // of a weight, by contrast: 1 is a linear scale, 0.5 the square root
const ROW_POWERS = [1, 0.85, 0.7, 0.5, 0.35]; // where rows are scaled, which takes less contrast
const OCTAVES = [8, 7, 6, 4, 2]; // of a ratio, on either side of 1
const CONTRASTS = POWERS.length;

// Where numbers of one kind lie on a color map.
class Scale {
  // name: share (0 to limit), ratio (1 in the middle) or difference (0 in the middle).
  constructor(name, contrast = 2, limit = 1, powers = POWERS) {
    Object.assign(this, { name, limit, power: powers[contrast], octaves: OCTAVES[contrast] });
  }

  // From 0 to 255.
  place(x) {
    if (this.name === "share") return 255 * clamp(x / this.limit, 0, 1) ** this.power;
    if (this.name === "ratio") return x > 0 ? 127.5 + (127.5 / this.octaves) * clamp(Math.log2(x), -this.octaves, this.octaves) : 0;
    return 127.5 + 127.5 * Math.sign(x) * Math.min(1, Math.abs(x) / this.limit) ** this.power;
  }

  ramp(dark) {
    return RAMPS[(dark ? "dark" : "light") + (this.name === "share" ? "" : " difference")];
  }

  color(x, dark) {
    const at = 3 * Math.round(this.place(x));
    const table = this.ramp(dark);
    return `rgb(${table[at]} ${table[at + 1]} ${table[at + 2]})`;
  }

  // The color of letters on the color of this number.
  letters(x, dark) {
    const at = 3 * Math.round(this.place(x));
    const table = this.ramp(dark);
    return 0.299 * table[at] + 0.587 * table[at + 1] + 0.114 * table[at + 2] > 120 ? "#14181d" : "#f2f0eb";
  }

  // Numbers for a legend, far enough apart to be read.
  get ticks() {
    const { limit, octaves } = this;
    if (this.name === "ratio") return [2 ** -octaves, 2 ** -Math.round(octaves / 2), 1, 2 ** Math.round(octaves / 2), 2 ** octaves];
    if (this.name === "difference") return [-limit, 0, limit];
    const kept = [limit];
    for (const share of [0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.001]) if (this.place(kept[0]) - this.place(share * limit) > 32 && this.place(share * limit) > 28) kept.unshift(share * limit);
    return [0, ...kept];
  }

  text(x) {
    if (this.name === "ratio") return x >= 1 ? `${x}×` : `1/${Math.round(1 / x)}`;
    const number = String(Number(x.toPrecision(2))).replace("-", "−");
    return this.name === "difference" && x > 0 ? `+${number}` : number;
  }

  // A tick of the legend; the colors of a scale of differences and ratios end where numbers may not.
  tickText(x) {
    if (this.name === "share") return this.text(x);
    const { ticks } = this;
    return `${x === ticks[0] ? "≤ " : x === ticks.at(-1) ? "≥ " : ""}${this.text(x)}`;
  }
}

// A picture (rows × cols) of numbers, painted pixel by pixel.
function paint(values, cols, rows, scale, dark) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [cols, rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(cols, rows);
  const [table, data] = [scale.ramp(dark), image.data];
  for (let i = 0; i < values.length; i++) {
    const at = 3 * Math.round(scale.place(values[i]));
    data[4 * i] = table[at];
    data[4 * i + 1] = table[at + 1];
    data[4 * i + 2] = table[at + 2];
    data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function rampOf(scale, dark) {
  const canvas = el("canvas", { class: "legend-ramp", "aria-hidden": "true", width: 256, height: 1 });
  const [context, table] = [canvas.getContext("2d"), scale.ramp(dark)];
  for (let i = 0; i < 256; i++) {
    context.fillStyle = `rgb(${table[3 * i]} ${table[3 * i + 1]} ${table[3 * i + 2]})`;
    context.fillRect(i, 0, 1, 1);
  }
  return canvas;
}

// A legend: the color map with numbers below it, and what they are.
function legendOf(scale, name, dark) {
  const canvas = rampOf(scale, dark);
  const ticks = scale.ticks.map((tick) => {
    const mark = el("span", { class: "tick", text: scale.tickText(tick) });
    mark.style.left = `${(100 * scale.place(tick)) / 255}%`;
    return mark;
  });
  const about = `Color scale: ${name}, from ${scale.text(scale.ticks[0])} to ${scale.text(scale.ticks.at(-1))}`;
  return el("div", { class: "legend-scale", role: "img", "aria-label": about }, canvas, el("div", { class: "ticks" }, ...ticks), el("div", { class: "soft legend-name", text: name }));
}
