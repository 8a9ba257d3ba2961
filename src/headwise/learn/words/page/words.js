// The ten steps on words. Everything after step 1 is computed here, so that the switches can change it.
// Words and numbers reach the page as text nodes only; the policy allows no other script and no request.
(() => {
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const words = data.words, T = words.length;
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = { step: 1, mask: true, scale: true, heads: data.own, pinned: false };

// Numbers ------------------------------------------------------------------------------------------------------------

function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
  const raw = packed.bits === 32 ? new Float32Array(bytes.buffer) : halves(new Uint16Array(bytes.buffer));
  return { shape: packed.shape, at: raw };
}

function halves(bits) {
  const out = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const b = bits[i], sign = b & 0x8000 ? -1 : 1, power = (b >> 10) & 31, part = b & 1023;
    out[i] = power === 0 ? sign * part * 2 ** -24 : power === 31 ? sign * (part ? NaN : Infinity)
      : sign * (1 + part / 1024) * 2 ** (power - 15);
  }
  return out;
}

const x = unpack(data.x), E = x.shape[1];
const projected = Object.fromEntries(Object.entries(data.projected).map(([name, p]) => [name, unpack(p)]));
const linears = data.linears && data.linears.map((l) => ({ weight: unpack(l.weight), bias: l.bias && unpack(l.bias) }));
const givenOutput = unpack(data.output), OUT = givenOutput.shape[1];
const cuts = Object.fromEntries(Object.entries(data.cuts).map(([heads, cut]) =>
  [heads, Object.fromEntries(Object.entries(cut).map(([name, p]) => [name, unpack(p)]))]));

const hides = data.visible.some((row) => row.includes(0));

function isAsInModel() { return state.mask && state.scale && state.heads === data.own; }

// All results for the present switches.
function compute() {
  const cut = cuts[state.heads], H = state.heads, D = cut.query.shape[2];
  const seen = (t, s) => !state.mask || data.visible[t][s] === 1;
  const raw = [], masked = [], scaled = [], weights = [], heads = [];
  for (let h = 0; h < H; h++) {
    const r = new Float32Array(T * T), m = new Float32Array(T * T), c = new Float32Array(T * T), w = new Float32Array(T * T);
    const o = new Float32Array(T * D);
    for (let t = 0; t < T; t++) {
      for (let s = 0; s < T; s++) {
        let sum = 0;
        for (let d = 0; d < D; d++) sum += cut.query.at[(h * T + t) * D + d] * cut.key.at[(h * T + s) * D + d];
        r[t * T + s] = sum;
        m[t * T + s] = seen(t, s) ? sum : -Infinity;
        c[t * T + s] = state.scale ? m[t * T + s] / Math.sqrt(D) : m[t * T + s];
      }
      const row = c.subarray(t * T, t * T + T), top = Math.max(...row);
      let total = 0;
      for (let s = 0; s < T; s++) total += w[t * T + s] = top === -Infinity ? 0 : Math.exp(row[s] - top);
      for (let s = 0; s < T; s++) w[t * T + s] = total ? w[t * T + s] / total : 0;
      for (let d = 0; d < D; d++) {
        let sum = 0;
        for (let s = 0; s < T; s++) sum += w[t * T + s] * cut.value.at[(h * T + s) * D + d];
        o[t * D + d] = sum;
      }
    }
    raw.push(r); masked.push(m); scaled.push(c); weights.push(w); heads.push(o);
  }
  const W = H * D, merged = new Float32Array(T * W);
  for (let h = 0; h < H; h++) for (let t = 0; t < T; t++) for (let d = 0; d < D; d++)
    merged[t * W + h * D + d] = heads[h][t * D + d];
  return { cut, H, D, W, raw, masked, scaled, weights, heads, merged, output: outputOf(merged, W) };
}

function outputOf(merged, W) {
  if (!linears) return isAsInModel() ? givenOutput.at : null;
  const { weight, bias } = linears[3], out = new Float32Array(T * OUT);
  for (let t = 0; t < T; t++) for (let j = 0; j < OUT; j++) {
    let sum = bias ? bias.at[j] : 0;
    for (let i = 0; i < W; i++) sum += merged[t * W + i] * weight.at[j * W + i];
    out[t * OUT + j] = sum;
  }
  return out;
}

let now = compute();

// Small parts ----------------------------------------------------------------------------------------------------------

function make(tag, className = "", text = null) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== null) node.textContent = text;
  return node;
}

function show(n, digits = 2) {
  if (n === -Infinity) return "−∞";
  return n.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
}

function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function largest(numbers) {
  let most = 0;
  for (const n of numbers) if (Number.isFinite(n) && Math.abs(n) > most) most = Math.abs(n);
  return most || 1;
}

// A matrix of many numbers as a strip of ink: a row is a word, zero is the background, orange is positive, blue negative.
function strip(caption, numbers, columns, group, hover) {
  const figure = make("figure", "wide"), title = make("figcaption"), box = make("div", "strip");
  caption(title);
  const labels = make("div", "labels"), canvas = make("canvas");
  const row = T > 16 ? 14 : 20;
  labels.style.gridAutoRows = `${row}px`;
  for (const word of words) { const label = make("span", "", word); label.style.lineHeight = `${row}px`; labels.append(label); }
  canvas.style.height = `${row * T}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${title.textContent}: ${T} tokens by ${columns} numbers`);
  box.append(labels, canvas);
  figure.append(title, box);
  const most = largest(numbers), gaps = group ? columns / group - 1 : 0;
  const place = () => {
    const width = canvas.clientWidth, gap = gaps ? Math.min(8, width / 80) : 0;
    return { width, gap, cell: (width - gap * gaps) / columns };
  };
  function draw(t0 = -1, j0 = -1) {
    const { width, gap, cell } = place(), ratio = window.devicePixelRatio || 1;
    if (!width) return;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(row * T * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const plus = ink("--plus"), minus = ink("--minus");
    for (let t = 0; t < T; t++) for (let j = 0; j < columns; j++) {
      const n = numbers[t * columns + j], left = j * cell + (group ? Math.floor(j / group) * gap : 0);
      pen.fillStyle = `rgba(${n < 0 ? minus : plus}, ${Math.min(1, Math.abs(n) / most) ** 0.75})`;
      pen.fillRect(left, t * row, Math.max(cell - (cell > 4 ? 1 : 0), 0.6), row - 1);
    }
    if (gap) {
      pen.fillStyle = ink("--paper");
      for (let g = 1; g <= gaps; g++) pen.fillRect(g * group * cell + (g - 1) * gap, 0, gap, row * T);
    }
    if (t0 >= 0) {
      const left = j0 * cell + (group ? Math.floor(j0 / group) * gap : 0);
      pen.strokeStyle = ink("--ink"); pen.lineWidth = 1.5;
      pen.strokeRect(left - 1, t0 * row - 0.5, Math.max(cell, 3) + 1, row);
    }
  }
  canvas.addEventListener("pointermove", (event) => point(event, false));
  canvas.addEventListener("pointerdown", (event) => point(event, true));
  function point(event, pin) {
    if (state.pinned && !pin) return;
    const box = canvas.getBoundingClientRect(), { gap, cell } = place();
    const t = Math.min(T - 1, Math.max(0, Math.floor((event.clientY - box.top) / row)));
    let left = event.clientX - box.left, j;
    if (group) {
      const step = group * cell + gap, g = Math.floor(left / step);
      j = Math.min(columns - 1, g * group + Math.min(group - 1, Math.floor((left - g * step) / cell)));
    } else j = Math.floor(left / cell);
    j = Math.min(columns - 1, Math.max(0, j));
    if (pin) state.pinned = event.pointerType !== "mouse" ? false : !state.pinned;
    draw(t, j);
    hover(t, j);
  }
  draws.push(draw);
  return figure;
}

// A matrix of words by words, as a table with numbers.
function grid(caption, numbers, kind, hover) {
  const figure = make("figure"), title = make("figcaption");
  caption(title);
  const table = make("table", T > 12 ? "grid small" : "grid"), head = make("thead"), body = make("tbody");
  const top = make("tr");
  top.append(make("th"));
  for (const word of words) { const th = make("th"); th.append(make("span", "", word)); top.append(th); }
  head.append(top);
  const most = largest(numbers);
  for (let t = 0; t < T; t++) {
    const row = make("tr");
    row.append(make("th", "", words[t]));
    for (let s = 0; s < T; s++) row.append(cell(numbers[t * T + s], most, kind));
    body.append(row);
  }
  table.append(head, body);
  figure.append(title, table);
  const at = (event) => {
    const td = event.target.closest("td");
    return td && [td.parentNode.sectionRowIndex, td.cellIndex - 1, td];
  };
  const mark = (t, s, td) => {
    for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
    td.classList.add("on");
    top.cells[s + 1].classList.add("on"); td.parentNode.cells[0].classList.add("on");
    hover(t, s);
  };
  table.addEventListener("pointerover", (event) => { const found = at(event); if (found && !state.pinned) mark(...found); });
  table.addEventListener("click", (event) => { const found = at(event); if (found) { state.pinned = !state.pinned; mark(...found); } });
  return figure;
}

function cell(n, most, kind) {
  const td = make("td", "", kind === "weight" ? (n === 0 ? "" : show(n).replace(/^0/, "")) : show(n, Math.abs(n) < 100 ? 1 : 0));
  if (n === -Infinity || (kind === "weight" && n === 0)) { td.classList.add("off"); return td; }
  const share = kind === "weight" ? Math.sqrt(n) : 0.85 * Math.abs(n) / most;
  const color = ink(kind === "weight" ? "--weight" : n < 0 ? "--minus" : "--plus");
  td.style.background = `rgba(${color}, ${share.toFixed(3)})`;
  td.style.color = readableOn(color, share);
  return td;
}

// Black or white, whichever stands out more from a color of this opacity on the paper: by at least 4.5 to 1.
function readableOn(color, share) {
  const paper = ink("--paper").slice(1).match(/../g).map((digits) => parseInt(digits, 16));
  const linear = color.split(",").map((part, i) => {
    const level = (share * Number(part) + (1 - share) * paper[i]) / 255;
    return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000" : "#fff";
}

// What a number is made of ---------------------------------------------------------------------------------------------

function tell(what, value, how, terms = null, names = null) {
  const panel = $("made");
  panel.classList.remove("idle");
  panel.replaceChildren();
  const line = make("p", "what", `${what} = `);
  line.append(make("span", "value", value));
  panel.append(line, make("p", "how", how));
  if (!terms) return;
  if (names) {
    const list = make("div", "terms");
    terms.forEach((n, i) => {
      const item = make("span", "", `${names[i]} `);
      item.append(make("span", "n", show(n, 3)));
      list.append(item);
    });
    panel.append(list);
  } else panel.append(bars(terms));
}

function bars(terms) {
  const canvas = make("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${terms.length} products`);
  requestAnimationFrame(() => {
    const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext("2d"), most = largest(terms), wide = Math.min(18, width / terms.length);
    pen.scale(ratio, ratio);
    terms.forEach((n, i) => {
      const tall = Math.max(0.5, Math.abs(n) / most * (height / 2 - 1));
      pen.fillStyle = `rgb(${ink(n < 0 ? "--minus" : "--plus")})`;
      pen.fillRect(i * wide, n < 0 ? height / 2 : height / 2 - tall, Math.max(1, wide - 1), tall);
    });
    pen.fillStyle = ink("--line");
    pen.fillRect(0, height / 2, wide * terms.length, 1);
  });
  return canvas;
}

const short = { query: "q", key: "k", value: "v" };

function toldProjection(name, index, t, j) {
  const width = projected[name].shape[1], value = projected[name].at[t * width + j];
  const what = `${short[name]}(${words[t]})[${j}]`;
  const how = `row “${words[t]}” of x · column ${j} of W_${short[name]}: the sum of ${E} products`;
  if (!linears) return tell(what, show(value, 4), how);
  const { weight, bias } = linears[index], terms = [];
  for (let e = 0; e < E; e++) terms.push(x.at[t * E + e] * weight.at[j * E + e]);
  tell(what, show(value, 4), how + (bias ? `, and a bias of ${show(bias.at[j], 4)}` : ""), terms);
}

function toldSplit(name, t, j) {
  const D = now.D, width = projected[name].shape[1], h = Math.floor(j / D);
  tell(`${short[name]}(${words[t]}), head ${h}, number ${j % D}`, show(projected[name].at[t * width + j], 4),
    `number ${j} of ${width}, unchanged: head ${h} takes numbers ${h * D} to ${h * D + D - 1}`);
}

function toldHead(name, h, t, d) {
  const value = now.cut[name].at[(h * T + t) * now.D + d];
  const moved = name !== "value" && data.notes.some((note) => note.includes("changed by position"));
  const before = projected[name].at[t * projected[name].shape[1] + h * now.D + d];
  tell(`${short[name]}(${words[t]}), head ${h}, number ${d}`, show(value, 4),
    moved && Math.abs(value - before) < 1e-6 ? `the number of step 2: position ${t} leaves it as it is`
      : moved ? "the number of step 2, changed by the word’s position: a pair of numbers turns by an angle that grows with it"
      : "the number of step 2; only the order of the axes changed");
}

function products(h, t, s) {
  const terms = [];
  for (let d = 0; d < now.D; d++) terms.push(now.cut.query.at[(h * T + t) * now.D + d] * now.cut.key.at[(h * T + s) * now.D + d]);
  return terms;
}

function toldSquare(step, h, t, s) {
  const at = t * T + s, pair = `${words[t]} → ${words[s]}, head ${h}`, root = show(Math.sqrt(now.D), 3);
  if (step === 4) {
    return tell(`score(${pair})`, show(now.raw[h][at], 4), `q(${words[t]}) · k(${words[s]}): row “${words[t]}” times column “${words[s]}”, the sum of ${now.D} products`, products(h, t, s));
  }
  if (step === 5) {
    const hidden = now.masked[h][at] === -Infinity;
    return tell(`masked score(${pair})`, show(now.masked[h][at], 4), hidden ? `“${words[s]}” ${s > t ? `comes after “${words[t]}”, so it is hidden` : "is hidden by the mask of this layer"}: −∞`
      : state.mask ? `“${words[t]}” may see “${words[s]}”: the score of step 4, unchanged` : "the mask is off: the score of step 4");
  }
  if (step === 6) {
    return tell(`scaled score(${pair})`, show(now.scaled[h][at], 4), state.scale ? `${show(now.masked[h][at], 4)} / √${now.D} = ${show(now.masked[h][at], 4)} / ${root}`
      : "the scale is off: the score of step 5");
  }
  const row = Array.from(now.scaled[h].subarray(t * T, t * T + T)), top = Math.max(...row);
  const powers = row.map((n) => (top === -Infinity ? 0 : Math.exp(n - top)));
  const total = powers.reduce((a, b) => a + b, 0);
  tell(`weight(${pair})`, show(now.weights[h][at], 4), `exp(${show(row[s], 3)} − ${show(top, 3)}) / ${show(total, 3)}: its share of row “${words[t]}”, whose powers are`, powers, words);
}

function toldRead(h, t, d) {
  const terms = [];
  for (let s = 0; s < T; s++) terms.push(now.weights[h][t * T + s] * now.cut.value.at[(h * T + s) * now.D + d]);
  tell(`head ${h} of “${words[t]}”, number ${d}`, show(now.heads[h][t * now.D + d], 4),
    `row “${words[t]}” of the weights · column ${d} of the values: weight × value of each word`, terms, words);
}

function toldMerged(t, j) {
  const h = Math.floor(j / now.D);
  tell(`merged(${words[t]})[${j}]`, show(now.merged[t * now.W + j], 4), `number ${j % now.D} of head ${h}, unchanged: heads are side by side`);
}

function toldOutput(t, j) {
  const what = `output(${words[t]})[${j}]`, how = `row “${words[t]}” of the merged heads · column ${j} of W_o`;
  if (!linears) return tell(what, show(now.output[t * OUT + j], 4), how);
  const { weight, bias } = linears[3], byHead = new Array(now.H).fill(0);
  for (let i = 0; i < now.W; i++) byHead[Math.floor(i / now.D)] += now.merged[t * now.W + i] * weight.at[j * now.W + i];
  tell(what, show(now.output[t * OUT + j], 4), `${how}; what each head adds${bias ? `, and a bias of ${show(bias.at[j], 4)}` : ""}:`,
    byHead, byHead.map((_, h) => `head ${h}`));
}

// The picture of a step --------------------------------------------------------------------------------------------------

let draws = [];
const label = (name, rest) => (node) => { node.append(make("b", "", name), document.createTextNode(rest)); };

function headFigure(name, h, numbers, hover) {
  return strip(label(`head ${h}`, name ? ` · ${name}` : ""), numbers, now.D, 0, hover);
}

function figures(step) {
  const names = Object.keys(projected);
  if (step === 1) {
    return [strip(label("x", ` · the tokens as the layer gets them, ${E} numbers each`), x.at, E, 0,
      (t, j) => tell(`x(${words[t]})[${j}]`, show(x.at[t * E + j], 4), "the input of this layer, from the layers before it")),
    ...names.map((name, i) => strip(label(short[name], ` · ${{ query: "what a token looks for", key: "what it offers", value: "what it passes on" }[name]}`),
      projected[name].at, projected[name].shape[1], 0, (t, j) => toldProjection(name, i, t, j)))];
  }
  if (step === 2) return names.map((name) => strip(label(short[name], ` · cut into heads of ${now.D}`), projected[name].at, projected[name].shape[1], now.D,
    (t, j) => toldSplit(name, t, j)));
  if (step === 3 || step === 8) {
    const all = [];
    for (let h = 0; h < now.H; h++) {
      const block = (name, numbers, hover) => { const f = headFigure(name, h, numbers, hover); f.classList.remove("wide"); f.style.flex = "1 1 13rem"; return f; };
      const triple = make("div", "triple");
      if (step === 3) for (const name of names) triple.append(block(short[name], now.cut[name].at.subarray(h * T * now.D, (h + 1) * T * now.D), (t, d) => toldHead(name, h, t, d)));
      if (step === 3) all.push(triple);
      else all.push(block("what it reads", now.heads[h], (t, d) => toldRead(h, t, d)));
    }
    return all;
  }
  if (step <= 7) {
    const source = { 4: now.raw, 5: now.masked, 6: now.scaled, 7: now.weights }[step];
    return source.map((numbers, h) => grid(label(`head ${h}`, step === 7 ? ` · ${reading(numbers)}` : ""), numbers, step === 7 ? "weight" : "score", (t, s) => toldSquare(step, h, t, s)));
  }
  if (step === 9) return [strip(label("merged", " · all heads side by side"), now.merged, now.W, now.D, toldMerged)];
  if (!now.output) {
    const note = make("p", "soft", "The output projection is too large for this page, so the output is shown only as in the model.");
    return [note];
  }
  return [strip(label("output", ` · ${OUT} numbers for each word, back in the model`), now.output, OUT, 0, toldOutput)];
}

// Where most of a head's weight goes, in words.
function reading(weights) {
  let first = 0, previous = 0, self = 0, rows = 0;
  for (let t = 1; t < T; t++) {
    rows++;
    first += weights[t * T]; previous += weights[t * T + t - 1]; self += weights[t * T + t];
  }
  if (!rows) return "one word";
  const best = [[first, "the first token"], [previous, "the previous token"], [self, "the token itself"]].sort((a, b) => b[0] - a[0])[0];
  return best[0] / rows > 0.5 ? `mostly ${best[1]}` : "several words";
}

// The page -----------------------------------------------------------------------------------------------------------------

function shapes() {
  const { H, D, W } = now, square = `(1, ${H}, ${T}, ${T})`;
  return [`(1, ${T}, ${W})`, `(1, ${T}, ${H}, ${D})`, `(1, ${H}, ${T}, ${D})`, square, square, square, square, `(1, ${H}, ${T}, ${D})`, `(1, ${T}, ${W})`, `(1, ${T}, ${OUT})`];
}

function lane() {
  const bar = $("lane"), all = shapes();
  bar.replaceChildren(...data.steps.map((step, i) => {
    const button = make("button");
    button.type = "button";
    button.append(make("span", "k", `${i + 1} ${step.name}`), make("span", "shape", all[i]));
    button.title = all[i];
    if (i + 1 < state.step) button.classList.add("done");
    if (i + 1 === state.step) button.setAttribute("aria-current", "step");
    button.addEventListener("click", () => go(i + 1));
    return button;
  }));
  const current = bar.children[state.step - 1];
  if (bar.scrollWidth > bar.clientWidth) bar.scrollLeft = current.offsetLeft - bar.clientWidth / 2 + current.offsetWidth / 2;
}

// The code and the reason of a step for the present switches.
function asSwitched(step) {
  const off = [...(state.heads > 1 ? [] : ["several heads"]), ...(state.mask && hides ? [] : ["mask"]), ...(state.scale ? [] : ["scale"])];
  return off.map((name) => step.without[name]).filter(Boolean).pop() || step;
}

// What the letters in a line of code are now.
function sizesIn(code) {
  const sizes = { B: 1, T, H: now.H, D: now.D }, used = Object.keys(sizes).filter((name) => new RegExp(`\\b${name}\\b`).test(code));
  return used.length ? `  # ${used.map((name) => `${name} = ${sizes[name]}`).join(", ")}` : "";
}

function render() {
  const step = data.steps[state.step - 1];
  document.documentElement.dataset.step = state.step;
  $("step").value = state.step;
  $("step").setAttribute("aria-valuetext", `${state.step}: ${step.name}`);
  $("name").textContent = `${state.step}. ${step.name}`;
  $("headline").textContent = data.headline + (state.heads === data.own ? "" : `; here cut into ${now.H} head${now.H === 1 ? "" : "s"} of width ${now.D}`);
  const told = asSwitched(step);
  $("why").textContent = told.why + (state.step === 2 && state.heads !== data.own ? ` The model itself has ${data.own}.` : "");
  $("code").textContent = told.code + sizesIn(told.code);
  $("key").textContent = state.step === 7 ? "More color means more weight; zero is the background."
    : "Orange is positive, blue is negative; zero is the background.";
  $("mask").setAttribute("aria-pressed", state.mask && hides);
  $("scale").setAttribute("aria-pressed", state.scale);
  for (const button of $("heads").children) button.setAttribute("aria-pressed", Number(button.textContent) === state.heads);
  $("reset").classList.toggle("shown", !isAsInModel());
  $("notes").replaceChildren(...data.notes.map((note) => make("li", "", note)));
  lane();
  draws = [];
  $("picture").replaceChildren(...figures(state.step));
  for (const draw of draws) draw();
  align([...$("picture").children]);
  state.pinned = false;
  $("made").classList.add("idle");
  const how = make("p", "how", "Point at a number, or tap it, to see what it is made of; click to hold it.");
  how.append(make("span", "keys", " ← and → move through the steps."));
  $("made").replaceChildren(how);
}

// Tables of all heads take the same width, so that they stand in columns.
function align(figures) {
  if (state.step < 4 || state.step > 7) return;
  const widest = Math.max(...figures.map((figure) => figure.offsetWidth));
  for (const figure of figures) figure.style.minWidth = `min(100%, ${widest}px)`;
}

function go(step) { state.step = Math.min(10, Math.max(1, step)); render(); }
function change(what) { Object.assign(state, what); now = compute(); render(); }

$("mask").disabled = !hides;
$("mask").title = hides ? "" : "this layer hides nothing: every token sees every token";
for (const word of words) $("text").append(make("b", "", word), document.createTextNode(" "));
for (const count of Object.keys(cuts)) {
  const button = make("button", "", count);
  button.type = "button";
  button.addEventListener("click", () => change({ heads: Number(count) }));
  $("heads").append(button);
}
$("step").addEventListener("input", (event) => go(Number(event.target.value)));
$("mask").addEventListener("click", () => change({ mask: !state.mask }));
$("scale").addEventListener("click", () => change({ scale: !state.scale }));
$("reset").addEventListener("click", () => change({ mask: true, scale: true, heads: data.own }));
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT" || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowRight") go(state.step + 1);
  if (event.key === "ArrowLeft") go(state.step - 1);
});
window.addEventListener("resize", () => { for (const draw of draws) draw(); });
dark.addEventListener("change", render);
const asked = Number(location.hash.slice(1));
if (asked >= 1 && asked <= 10) state.step = Math.floor(asked);
render();
document.documentElement.dataset.ready = "true";
})();
