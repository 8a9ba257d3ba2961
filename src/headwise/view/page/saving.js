// Downloads: the map or the atlas as PNG or SVG, numbers as CSV or JSON.

function download(name, content, type) {
  const link = el("a", { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const quoted = (value) => {
  const text = String(value ?? "");
  // A spreadsheet would run a cell that begins like a formula.
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

const csv = (rows) => rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";

const FAINT = 0.45; // as in page.css
const LINE = 17; // pixels from one line of text to the next, above and below a saved picture

// A text in lines of at most so many pixels, in the font of a drawing.
function linesOf(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (lines.at(-1) && context.measureText(longer).width > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

class Saving {
  constructor(app) {
    this.app = app;
  }

  get view() {
    return this.app.view;
  }

  get name() {
    return this.view === "map" || this.view === "words" ? this.headName : "heads";
  }

  get headName() {
    return `head-${this.app.store.get("head").replaceAll("*", "all").replace(":", "-")}`;
  }

  // What is drawn between the title and the legend: its size, how to draw it, its color scale and what that shows.
  get content() {
    const { app } = this;
    const shows = app.legend.querySelector(".legend-name")?.textContent || "";
    if (this.view === "map") {
      const [map] = app.stage.shown;
      return { width: map.width, height: map.height, draw: (context) => map.render(context, app.colors()), scale: map.scale, shows };
    }
    if (this.view === "words") {
      const [width, height] = app.lines.size;
      return { width, height, draw: (context) => app.lines.render(context, app.colors()), scale: app.scale(), shows };
    }
    const { layers } = app.side.manifest;
    const heads = Math.max(...layers.map((layer) => layer.heads.length));
    return { width: heads * 108 + 40, height: layers.length * 132, draw: (context) => this.atlas(context), scale: app.atlas.scale, shows };
  }

  // A whole picture: title, content and legend on the color of the page; its height.
  render(context, { width, height, draw, scale, shows }) {
    const { app } = this;
    const colors = app.colors();
    const { manifest } = app.side;
    let y = 4;
    const write = (text, size, color, bold = "", x = 12) => {
      [context.textAlign, context.textBaseline, context.fillStyle, context.font] = ["left", "alphabetic", color, `${bold}${size}px ${colors.font}`];
      for (const line of linesOf(context, text, width - x - 12)) context.fillText(line, x, (y += LINE));
    };
    write(manifest.title, 13, colors.ink, "600 ");
    const subject = app.subject();
    write(this.view === "map" || this.view === "words" ? `${subject.title(manifest)} ${subject.about(manifest)}` : manifest.sentence, 12, colors.soft);
    if (this.view === "words" && app.lines.caption) write(app.lines.caption, 12, colors.soft);
    y += 12;
    context.save();
    context.translate(0, y);
    draw(context);
    context.restore();
    y += height + 8;
    context.drawImage(rampOf(scale, app.dark), 12, y, 256, 9);
    context.fillStyle = colors.soft;
    context.font = `11px ${colors.font}`;
    context.textAlign = "center";
    for (const tick of scale.ticks) context.fillText(scale.text(tick), 12 + scale.place(tick), y + 21);
    const top = y;
    y -= 8;
    write(shows, 11, colors.soft, "", 286);
    return Math.max(y, top + 21) + 12;
  }

  // The content with room around it.
  get whole() {
    const { content } = this;
    const width = Math.max(content.width, 480);
    const height = this.render(el("canvas").getContext("2d"), { ...content, width });
    return [width, height, (context) => this.render(context, { ...content, width })];
  }

  canvas() {
    const [width, height, draw] = this.whole;
    const canvas = el("canvas");
    const context = sharpen(canvas, width, height);
    draw(context);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalCompositeOperation = "destination-over"; // the drawing is transparent
    context.fillStyle = this.app.colors().card;
    context.fillRect(0, 0, canvas.width, canvas.height);
    return canvas;
  }

  async png() {
    download(`${this.name}.png`, await new Promise((done) => this.canvas().toBlob(done, "image/png")), "image/png");
  }

  atlas(context) {
    const { manifest } = this.app.side;
    const colors = this.app.colors();
    const [size, step] = [96, 132];
    context.imageSmoothingEnabled = false;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    for (const [place, cell] of this.app.atlas.cells) {
      const [l, h] = place.split(".").map(Number);
      const [x, y] = [20 + h * 108, 8 + l * step];
      const canvas = cell.querySelector("canvas");
      context.globalAlpha = canvas.classList.contains("faint") ? FAINT : 1;
      context.drawImage(canvas, x, y, size, size);
      context.globalAlpha = 1;
      context.strokeStyle = colors.line;
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
      context.fillStyle = colors.ink;
      context.font = `12px ${colors.font}`;
      context.fillText(headName(manifest, l, h), x, y + size + 13);
      context.fillStyle = colors.soft;
      context.font = `11px ${colors.font}`;
      context.fillText(traitName(manifest.layers[l].heads[h]), x, y + size + 26);
    }
  }

  // Colors become an image; words stay text.
  svg() {
    const [width, height, draw] = this.whole;
    const space = "http://www.w3.org/2000/svg";
    const drawing = document.implementation.createDocument(space, "svg");
    const root = drawing.documentElement;
    const add = (name, attributes, text) => {
      const made = drawing.createElementNS(space, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      root.append(made);
    };
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) root.setAttribute(key, value);
    add("rect", { width, height, fill: this.app.colors().card });
    const recorder = new Recorder(sharpen(el("canvas"), width, height), add, { width, height });
    draw(recorder.context);
    recorder.finish();
    download(`${this.name}.svg`, new XMLSerializer().serializeToString(drawing), "image/svg+xml");
  }

  csv() {
    const { manifest } = this.app.side;
    const names = Object.keys(manifest.about);
    const without = names.filter((name) => name !== "sink" && name !== "importance");
    const rows = [["layer", "head", "reading", ...names, ...without.map((name) => `${name} without first token`)]];
    manifest.layers.forEach((layer, l) => layer.heads.forEach((head) => rows.push([numberOf(manifest, l), head.head, head.reading, ...names.map((name) => (name === "importance" ? head.importance : head.numbers[name])), ...without.map((name) => head.without_first[name])])));
    download("heads.csv", csv(rows), "text/csv");
  }

  // The known weights in the window; where there is no map, in all of it.
  async weights() {
    const subject = this.app.subject();
    const { manifest } = this.app.side;
    const { T, S } = manifest;
    const view = this.view === "map" ? this.app.stage.view : { T, S, x: 0, y: 0, width: S, height: T, scale: 1 };
    const keys = manifest.keys || manifest.tokens;
    const [bottom, right] = [Math.min(view.T, Math.ceil(view.y + view.height / view.scale)), Math.min(view.S, Math.ceil(view.x + view.width / view.scale))];
    const rows = [["query", "query token", "key", "key token", MEASURES[this.app.measure].unit]];
    for (let query = Math.floor(view.y); query < bottom && rows.length < 500000; query++) {
      const row = await this.app.data.row(subject, query);
      if (!row) break;
      row.keys.forEach((key, i) => key >= Math.floor(view.x) && key < right && rows.push([query, manifest.tokens[query], key, keys[key], row.weights[i]]));
    }
    download(`${this.headName}-weights.csv`, csv(rows), "text/csv");
  }

  json() {
    const { sentence, tokens, starts, keys, key_starts, layers, pairs } = this.app.side.manifest;
    download("heads.json", JSON.stringify({ sentence, tokens, starts, keys, key_starts, layers, pairs }, null, 1), "application/json");
  }
}

// A drawing context that records text and draws everything else.
class Recorder {
  constructor(context, add, map) {
    Object.assign(this, { add, map, words: [] });
    const { words } = this;
    this.context = new Proxy(context, {
      get(target, name) {
        if (name === "fillText") return (text, x, y) => words.push({ text, x, y, at: target.getTransform(), font: target.font, fill: target.fillStyle, align: target.textAlign, base: target.textBaseline });
        const value = target[name];
        return typeof value === "function" ? value.bind(target) : value;
      },
      set(target, name, value) {
        target[name] = value;
        return true;
      },
    });
    this.canvas = context.canvas;
  }

  finish() {
    const ratio = window.devicePixelRatio || 1;
    this.add("image", { width: this.map.width, height: this.map.height, href: this.canvas.toDataURL() });
    const [anchors, lines] = [{ left: "start", right: "end", center: "middle" }, { top: "hanging", middle: "central", bottom: "text-after-edge" }];
    for (const { text, x, y, at, font, fill: color, align, base } of this.words) {
      const place = [at.a, at.b, at.c, at.d, at.e, at.f].map((n) => Number((n / ratio).toFixed(4))).join(" ");
      this.add("text", { transform: `matrix(${place})`, x, y, "font-size": /[\d.]+px/.exec(font)[0], "font-weight": /^\d+ /.test(font) ? font.split(" ")[0] : "400", "font-family": font.slice(font.indexOf("px") + 3), fill: color, "text-anchor": anchors[align] || "start", "dominant-baseline": lines[base] || "auto" }, text);
    }
  }
}
