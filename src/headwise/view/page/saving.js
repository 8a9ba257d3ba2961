// Downloads: the map or the atlas as PNG or SVG, numbers as CSV or JSON.

function download(name, content, type) {
  const link = el("a", { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const quoted = (value) => {
  const text = String(value);
  // A spreadsheet would run a cell that begins like a formula.
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

const csv = (rows) => rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";

class Saving {
  constructor(app) {
    this.app = app;
  }

  get name() {
    const inMap = this.app.store.get("view") === "map";
    return inMap ? `head-${this.app.store.get("head").replace("*", "all").replace(":", "-")}` : "heads";
  }

  async png() {
    const canvas = this.app.store.get("view") === "map" ? this.mapCanvas() : this.atlasCanvas();
    download(`${this.name}.png`, await new Promise((done) => canvas.toBlob(done, "image/png")), "image/png");
  }

  // With a background, since the canvas on the screen is transparent.
  mapCanvas() {
    const [map] = this.app.stage.shown;
    const canvas = el("canvas");
    const context = sharpen(canvas, map.width, map.height);
    map.render(context, this.app.colors());
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = this.app.colors().paper;
    context.fillRect(0, 0, map.width, map.height);
    return canvas;
  }

  atlasCanvas() {
    const { manifest } = this.app.side;
    const colors = this.app.colors();
    const heads = Math.max(...manifest.layers.map((layer) => layer.heads.length));
    const [size, step] = [96, 132];
    const canvas = el("canvas");
    const context = sharpen(canvas, heads * 108 + 40, manifest.layers.length * step + 20);
    context.fillStyle = colors.paper;
    context.fillRect(0, 0, 1e5, 1e5);
    context.imageSmoothingEnabled = false;
    context.font = `12px ${colors.font}`;
    for (const [place, cell] of this.app.atlas.cells) {
      const [l, h] = place.split(".").map(Number);
      const [x, y] = [30 + h * 108, 12 + l * step];
      context.drawImage(cell.querySelector("canvas"), x, y, size, size);
      context.fillStyle = colors.ink;
      context.fillText(`${l}.${manifest.layers[l].heads[h].head}`, x, y + size + 14);
      context.fillStyle = colors.soft;
      context.fillText(wordOf(traitName(manifest.layers[l].heads[h]), 16), x, y + size + 28);
    }
    return canvas;
  }

  // Colors become an image; words stay text.
  svg() {
    const inMap = this.app.store.get("view") === "map";
    const canvas = inMap ? null : this.atlasCanvas();
    const [map] = this.app.stage.shown;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = inMap ? [map.width, map.height] : [canvas.width / ratio, canvas.height / ratio];
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
    const colors = this.app.colors();
    add("rect", { width, height, fill: colors.paper });
    if (inMap) {
      const recorder = new Recorder(sharpen(el("canvas"), width, height), add, map);
      map.render(recorder.context, colors);
      recorder.finish();
    } else add("image", { width, height, href: canvas.toDataURL() });
    download(`${this.name}.svg`, new XMLSerializer().serializeToString(drawing), "image/svg+xml");
  }

  csv() {
    const { manifest } = this.app.side;
    const names = Object.keys(manifest.about);
    const rows = [["layer", "head", "reading", ...names, ...names.filter((name) => name !== "sink").map((name) => `${name} without first token`)]];
    manifest.layers.forEach((layer, l) => layer.heads.forEach((head) => rows.push([l, head.head, head.reading, ...names.map((name) => head.numbers[name]), ...names.filter((name) => name !== "sink").map((name) => head.apart[name])])));
    download("heads.csv", csv(rows), "text/csv");
  }

  // The known weights in the window.
  async weights() {
    const { view } = this.app.stage;
    const subject = this.app.subject();
    const { manifest } = this.app.side;
    const keys = manifest.keys || manifest.tokens;
    const [bottom, right] = [Math.min(view.T, Math.ceil(view.y + view.height / view.scale)), Math.min(view.S, Math.ceil(view.x + view.width / view.scale))];
    const rows = [["query", "query token", "key", "key token", "weight"]];
    for (let query = Math.floor(view.y); query < bottom && rows.length < 500000; query++) {
      const row = await this.app.data.row(subject, query);
      if (!row) break;
      row.keys.forEach((key, i) => key >= Math.floor(view.x) && key < right && rows.push([query, manifest.tokens[query], key, keys[key], row.weights[i]]));
    }
    download(`${this.name}-weights.csv`, csv(rows), "text/csv");
  }

  json() {
    const { sentence, tokens, keys, layers, pairs } = this.app.side.manifest;
    download("heads.json", JSON.stringify({ sentence, tokens, keys, layers, pairs }, null, 1), "application/json");
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
      this.add("text", { transform: `matrix(${place})`, x, y, "font-size": font.slice(0, font.indexOf(" ")), "font-family": font.slice(font.indexOf(" ") + 1), fill: color, "text-anchor": anchors[align] || "start", "dominant-baseline": lines[base] || "auto" }, text);
    }
  }
}
