// Colours of numbers. One ramp from dark to bright in equal steps for every eye (cividis); differences blue to orange.

const CIVIDIS = "00224e,002e6a,1a386f,32436d,434e6c,535a6d,61656f,6f7073,7d7c78,8c8878,9b9476,aba072,bcae6c,cdbb63,dec958,f0d846,fee838";

function ramp(stops) {
  const points = stops.split(",").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (points.length - 1);
    const [low, part] = [Math.min(points.length - 2, Math.floor(at)), at - Math.min(points.length - 2, Math.floor(at))];
    for (let c = 0; c < 3; c++) table[3 * i + c] = points[low][c] + part * (points[low + 1][c] - points[low][c]);
  }
  return table;
}

const RAMPS = {
  share: ramp(CIVIDIS),
  light: ramp("08306b,2f6db3,8fb8de,f3f1ec,f5b266,cc6a12,7a3500"),
  dark: ramp("9ecbff,4a8fdc,25528c,1b2027,8a4b10,e08a2e,ffd09a"),
};

// What a number of each kind looks like: the place on its ramp from 0 to 255.
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

function colourAt(scale, value, dark) {
  const at = 3 * Math.round(SCALES[scale].place(value));
  const table = rampOf(scale, dark);
  return `rgb(${table[at]} ${table[at + 1]} ${table[at + 2]})`;
}

// Whether dark letters read better on the colour of this number.
const bright = (scale, value, dark) => {
  const at = 3 * Math.round(SCALES[scale].place(value));
  const table = rampOf(scale, dark);
  return 0.299 * table[at] + 0.587 * table[at + 1] + 0.114 * table[at + 2] > 120;
};
