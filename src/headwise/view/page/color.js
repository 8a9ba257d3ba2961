// The colors of numbers. The color maps come from Python (view/color.py), in SHARED: 256 colors each.

const RAMPS = Object.fromEntries(Object.entries(SHARED.colors).map(([name, hex]) => [name, Uint8ClampedArray.from(hex.match(/../g), (byte) => parseInt(byte, 16))]));

// Where a number of each kind lies on its color map, from 0 to 255.
const SCALES = {
  share: { place: (x) => 255 * Math.sqrt(clamp(x, 0, 1)), ticks: [0, 0.01, 0.1, 0.25, 0.5, 1], text: (x) => String(x) },
  ratio: {
    place: (x) => (x > 0 ? 127.5 + (127.5 / 6) * clamp(Math.log2(x), -6, 6) : 0),
    ticks: [1 / 64, 1 / 8, 1, 8, 64],
    text: (x) => (x >= 1 ? `${x}×` : `1/${Math.round(1 / x)}`),
  },
  difference: {
    place: (x) => 127.5 + 127.5 * Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x))),
    ticks: [-1, -0.25, 0, 0.25, 1],
    text: (x) => (x > 0 ? `+${x}` : String(x).replace("-", "−")),
  },
};

const scaleOf = (kind, difference) => (difference ? "difference" : kind === "uniform" ? "ratio" : "share");
const rampOf = (scale, dark) => (scale === "share" ? RAMPS.share : dark ? RAMPS.dark : RAMPS.light);

// A picture (rows × cols) of numbers, painted pixel by pixel.
function paint(values, cols, rows, scale, dark) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [cols, rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(cols, rows);
  const [table, place, data] = [rampOf(scale, dark), SCALES[scale].place, image.data];
  for (let i = 0; i < values.length; i++) {
    const at = 3 * Math.round(place(values[i]));
    data[4 * i] = table[at];
    data[4 * i + 1] = table[at + 1];
    data[4 * i + 2] = table[at + 2];
    data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function colorAt(scale, value, dark) {
  const at = 3 * Math.round(SCALES[scale].place(value));
  const table = rampOf(scale, dark);
  return `rgb(${table[at]} ${table[at + 1]} ${table[at + 2]})`;
}

// Whether dark letters are easier to read on the color of this number.
const bright = (scale, value, dark) => {
  const at = 3 * Math.round(SCALES[scale].place(value));
  const table = rampOf(scale, dark);
  return 0.299 * table[at] + 0.587 * table[at + 1] + 0.114 * table[at + 2] > 120;
};
