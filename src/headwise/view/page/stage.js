// The map view: which head is shown, what it is compared with, how, and what is under the cursor.

const KINDS = [
  ["mass", "All tokens", "every token counts; a pixel that covers several shows their sum over keys, averaged over queries"],
  ["rest", "Without first token", "the first token left out, the other weights rescaled to sum to 1"],
  ["peak", "Largest", "the largest weight under each pixel"],
  ["uniform", "× uniform", "the weight as a multiple of uniform attention"],
];

class Stage {
  constructor(app) {
    this.app = app;
    this.bar = el("div", { class: "bar-row" });
    this.maps = el("div", { class: "maps" });
    this.info = el("div", { class: "info", "aria-live": "polite" });
    this.edges = el("div", { class: "edges" });
    this.limit = el("p", { class: "limit soft" });
    this.choosers = el("div", { class: "controls" });
    this.under = el("div", { class: "under" }, this.info, this.limit, this.edges);
    this.root = el("section", { class: "stage-map", "aria-label": "The map of a head" }, this.bar, el("div", { class: "table-top" }, this.choosers, this.maps, this.under));
    this.shown = [];
    this.remember = debounced(() => this.app.store.set({ at: this.view.text }), 200);
  }

  get minus() {
    return Subject.parse(this.app.store.get("with"), this.app.sides);
  }

  // How two heads are compared: those of texts of different length have no difference.
  get way() {
    const { minus } = this;
    const show = this.app.store.get("show");
    return !minus ? "a" : show === "difference" && !this.sameSize(minus) ? "both" : show;
  }

  // The names of the two heads whose difference is shown; null if none is.
  get difference() {
    const { minus, app } = this;
    if (this.way !== "difference") return null;
    return `${app.subject().name(app.side.manifest)} minus ${this.named(minus)}`;
  }

  // A subject, with the other text or model that it is of.
  named(subject) {
    const side = this.app.sides[subject.side];
    return `${subject.side ? `${side.name}: ` : ""}${subject.name(side.manifest)}`;
  }

  build() {
    const { manifest } = this.app.side;
    this.view = new Viewport(manifest.T, manifest.S);
    this.view.read(this.app.store.get("at"));
    this.update();
  }

  // Rebuild for the subject, what it is compared with, and the kind of picture.
  update(changed = null) {
    const { app, minus } = this;
    const subject = app.subject();
    const { kind } = app;
    if (!(changed?.has("contrast") && changed.size === 1)) this.toolbar(subject, minus, kind); // the slider keeps the focus
    const wanted = { a: [[subject, null]], b: [[minus, null]], difference: [[subject, minus]], both: [[subject, null], [minus, null]] }[this.way] || [[subject, minus]];
    this.arrange(wanted.length);
    wanted.forEach(([who, than], i) => this.showMap(this.shown[i], who, than, kind));
    this.view.limit = Math.min(...wanted.flat().filter(Boolean).map((who) => this.closest(who, kind)));
    this.view.settle();
    this.tellLimit(subject, kind);
    this.tellZoom();
    this.tell(this.shown[0].cursor);
  }

  // The most screen pixels per token: unlimited if single weights are known, else a few per pixel of the picture.
  closest(subject, kind) {
    const { manifest } = this.app.sides[subject.side];
    const depth = this.app.data.depth(subject, kind);
    const single = depth >= manifest.levels || (this.app.rowsOf(subject) === "top" && (kind === "mass" || kind === "peak"));
    return single ? Infinity : 24 / 2 ** (manifest.levels - depth);
  }

  sameSize(other) {
    const { T, S } = this.app.sides[other.side].manifest;
    return T === this.app.side.manifest.T && S === this.app.side.manifest.S;
  }

  arrange(howMany) {
    if (this.shown.length === howMany && this.shown[0].view === this.view) return;
    for (const map of this.shown) map.close();
    this.shown = Array.from({ length: howMany }, () => new HeadMap(this.app, this.view));
    for (const map of this.shown) {
      new Gestures(map, {
        moved: () => this.moved(),
        point: (cell) => this.point(cell, map),
        choose: (cell, again = true) => map.subject.side || this.app.lock(again && cell.query === this.app.locked() ? null : cell.query),
      });
    }
    fill(this.maps, ...this.shown.map((map) => map.root));
    this.root.classList.toggle("both", howMany > 1);
  }

  // Two texts of different length have separate windows.
  showMap(map, who, than, kind) {
    if (who.side && !this.sameSize(who)) {
      const { T, S } = this.app.sides[who.side].manifest;
      if (map.view === this.view || map.view.T !== T) {
        map.view = new Viewport(T, S);
        map.resize();
      }
    }
    tracked(map.show(who, than, kind)).then(() => map === this.shown[0] && map.scale && this.drawLegend(map.scale, than ? [who, than] : null));
    map.exact = null;
    if (than || !who.single || kind === "uniform" || kind === "rest") return;
    const source = this.app.data.source(who);
    source.known?.(who.layer, who.head).then((rows) => {
      if (map.subject !== who || !rows) return;
      map.exact = new KnownWeights(rows, rows.k);
      map.redraw();
    });
  }

  moved() {
    for (const map of this.shown) map.redraw();
    if (!this.view.fitted) this.app.reading.follow(Math.round(this.view.y), Math.round(this.view.y + this.view.height / this.view.scale));
    this.tellLimit(this.app.subject(), this.app.kind);
    this.tellZoom();
    this.remember();
  }

  // The words beside the map are those of the first text.
  point(cell, map = this.shown[0]) {
    for (const map of this.shown) {
      map.cursor = cell;
      map.redraw();
    }
    this.tell(cell, map === this.shown[1] || undefined);
    if (this.app.locked() === null) this.app.pointAt(cell && !map.subject.side ? cell.query : null, true);
  }

  redraw() {
    for (const map of this.shown) map.redraw();
  }

  fit() {
    for (const map of this.shown) map.resize();
  }

  // Controls.

  // What a map shows, and what its numbers are compared with.
  compared(second = this.way === "b") {
    const pair = [this.app.subject(), this.minus];
    return second ? pair.reverse() : pair;
  }

  toolbar(subject, minus, kind) {
    const { app } = this;
    const { manifest } = app.side;
    const { difference } = this;
    const drawn = this.compared()[0];
    const its = app.sides[drawn.side].manifest;
    const title = el("h2", { class: "subject" }, el("b", { text: difference ? `Heads ${difference}` : drawn.title(its) }), soft(difference ? "" : ` ${drawn.about(its)}`));
    this.offered = String(app.kinds);
    app.control();
    const average = this.chooser("Show", subject.id, this.averages(subject), (value) => app.store.set({ head: value }));
    const compare = this.chooser("Compare with", minus ? minus.id : "", this.others(), (value) => app.store.set({ with: value }));
    const ways = minus && radios("ways", "How to compare", this.way, [["difference", "Difference"], ["both", "Side by side"], ["a", "This"], ["b", "Other"]].slice(this.sameSize(minus) ? 0 : 1), (show) => app.store.set({ show }));
    this.zooms = {
      out: icon("−", "Zoom out", () => this.zoom(0.5)),
      in: icon("+", "Zoom in", () => this.zoom(2)),
      all: icon("⤢", "Show the whole map", () => this.whole(), "Whole map  0"),
    };
    const zoom = el("span", { class: "steps" }, ...Object.values(this.zooms));
    refill(this.bar, el("div", { class: "bar-line" }, this.backButton(), title, zoom, this.stepButtons()));
    refill(this.choosers, average, compare, ways);
  }

  backButton() {
    return el("button", { class: "plain back", text: "← All heads", title: "Escape", onclick: () => this.app.store.set({ view: "atlas" }) });
  }

  stepButtons() {
    const { app } = this;
    return el("span", { class: "steps" },
      icon("‹", "Previous head", () => app.step(-1), "Previous head  ["),
      icon("›", "Next head", () => app.step(1), "Next head  ]"));
  }

  // Whether every weight has at least a pixel, however far one zooms out.
  get single() {
    return Boolean(this.view) && this.view.width > 1 && this.view.fit * (window.devicePixelRatio || 1) > 0.99;
  }

  // Controls that would do nothing are off, or not there.
  tellZoom() {
    if (!this.zooms) return;
    if (this.offered !== String(this.app.kinds)) this.toolbar(this.app.subject(), this.minus, this.app.kind);
    const { fitted, scale, closest } = this.view;
    this.zooms.out.disabled = this.zooms.all.disabled = fitted;
    this.zooms.in.disabled = scale >= closest * 0.999;
  }

  zoom(factor) {
    this.view.zoom(factor, this.view.width / 2, this.view.height / 2);
    this.moved();
  }

  whole() {
    for (const map of this.shown) map.view.showAll();
    this.moved();
  }

  // One head and the averages that it is part of; an average leads back to the head that it was chosen from.
  averages(subject) {
    const { manifest } = this.app.side;
    const base = this.baseOf(subject);
    const { layer, head } = base;
    const found = [[base.id, `head ${base.name(manifest)}`], [`${layer}.*`, `average of layer ${numberOf(manifest, layer)}`]];
    if (manifest.layers.length > 1 && manifest.layers.every(({ heads }) => heads.length > head)) found.push([`*.${head}`, `head ${head}, averaged over layers`]);
    if (manifest.layers.length > 1) found.push(["*.*", "average of all heads"]);
    return found;
  }

  baseOf(subject) {
    if (subject.single) return (this.base = subject);
    const fits = (one) => one && subject.members(this.app.side.manifest).some(([l, h]) => l === one.layer && h === one.head);
    if (!fits(this.base)) this.base = new Subject(0, ...subject.members(this.app.side.manifest)[0]);
    return this.base;
  }

  others() {
    const found = [];
    const same = `b:${this.app.subject().id}`;
    this.app.sides.forEach((side, i) => {
      const before = i ? "b:" : "";
      const named = i ? `${side.name}: ` : "";
      side.manifest.layers.forEach((layer, l) => {
        layer.heads.forEach((head, h) => found.push([`${before}${l}.${h}`, `${named}${headName(side.manifest, l, h)}  ${traitName(head)}`]));
        found.push([`${before}${l}.*`, `${named}average of layer ${numberOf(side.manifest, l)}`]);
      });
      found.push([`${before}*.*`, `${named}average of all heads`]);
    });
    return [["", "nothing"], ...found.filter(([id]) => id === same), ...found.filter(([id]) => id !== same)];
  }

  chooser(label, value, options, choose) {
    const select = el("select", { onchange: (event) => choose(event.target.value) }, ...options.map(([key, text]) => el("option", { value: key, text })));
    select.value = value;
    return el("label", { class: "chooser" }, el("span", { text: label }), select);
  }

  // What is known about the pair under the cursor.
  async tell(cell, second) {
    const turn = (this.turn = (this.turn || 0) + 1);
    const { app } = this;
    const [drawn, than] = this.compared(second);
    const { manifest } = app.sides[drawn.side];
    if (!cell || cell.query >= manifest.T || cell.key >= manifest.S) {
      fill(this.info, soft("Point at the map, or tap it. Zoom with the wheel, a pinch, or + and −. Move by dragging or with the arrow keys."));
      return;
    }
    const [found, other] = await tracked(Promise.all([app.data.cell(drawn, cell.query, cell.key, app.kind), than && this.sameSize(this.minus) ? app.data.cell(than, cell.query, cell.key, app.kind) : null]));
    if (app.kind === "rest") await Promise.all([[found, drawn], [other, than]].map(([one, subject]) => this.leaveOut(one, subject, cell)));
    if (turn !== this.turn) return;
    fill(this.info, el("p", {}, ...this.words(cell, manifest, found?.hidden)), this.figures(found, other), ...this.context(cell, manifest));
  }

  // The number of a picture without the first token, besides the weight itself.
  async leaveOut(found, subject, { query, key }) {
    const { first } = this.app.sides[subject?.side ?? 0].manifest;
    if (!found || found.weight === null || found.hidden) return;
    if (!subject.single) return void (await this.averageLeft(found, subject, query, key));
    const one = await tracked(this.app.data.cell(subject, query, first));
    if (!one || (one.weight ?? null) === null) return;
    const left = 1 - one.weight;
    found.rest = key === first || left < 1e-6 ? 0 : Math.min(1, found.weight / left);
    found.restError = left < 1e-6 ? 0 : ((found.error || 0) + found.rest * (one.error || 0)) / left;
  }

  // Of several heads: what is drawn, at the finest level.
  async averageLeft(found, subject, query, key) {
    const { data, sides } = this.app;
    const tile = await tracked(data.tile(subject, sides[subject.side].manifest.levels, query >> 8, key >> 8, "rest"));
    if (!tile) return;
    found.rest = tile[(query & 255) * SIDE + (key & 255)];
    found.restError = found.weight > 0 ? (2 * (found.error || 0) * found.rest) / found.weight : 0;
  }

  words(cell, manifest, hidden) {
    const word = (token, at, kind) => el("span", { class: kind }, el("bdi", { class: "token", text: wordOf(token, 18) }), soft(` ${count(at)}`));
    return [word(manifest.labels[cell.query], cell.query, "to-word"), soft(hidden ? " may not attend to " : " attends to "), word(manifest.keyLabels[cell.key], cell.key, "from-word")];
  }

  figures(found, other) {
    const figure = (text, name) => el("span", { class: "fact" }, el("b", { text }), soft(` ${name}`));
    if (!found) return el("span", { class: "facts" }, soft("This file has no single numbers here, only the picture."));
    if (found.span) return el("span", { class: "facts" }, figure(found.kind === "uniform" ? timesText(found.sum, found.error) : shareText(found.sum, this.app.measure, found.error), `${this.pooled(found)}. This file has no single numbers here.`));
    if (found.hidden) return el("span", { class: "facts" }, soft("hidden by the mask, so the weight is 0"));
    if (found.weight === null) return el("span", { class: "facts" }, figure(`≤ ${ceiling(found.below, 3)}`, "not among the 8 largest of its row; only those are in the file"));
    const { measure, kind } = this.app;
    const drawn = (one) => (kind === "uniform" ? [one.weight * one.visible, (one.error || 0) * one.visible] : kind === "rest" && one.rest !== undefined ? [one.rest, one.restError] : [one.weight, one.error]);
    const text = (...number) => (kind === "uniform" ? timesText(...number) : shareText(number[0], measure, number[1]));
    const [mine, error = 0] = drawn(found);
    const rest = [];
    if (other && other.weight !== null) {
      const [its, itsError = 0] = drawn(other);
      rest.push(figure(signed(mine - its, error + itsError), this.difference ? `difference, as drawn (${text(mine, error)} here, ${text(its, itsError)} there)` : `${mine < its ? "less" : "more"} than the other’s ${text(its, itsError)}`));
    }
    if (kind === "rest" && found.rest !== undefined && !this.difference) rest.unshift(figure(text(mine, error), "without the first token, as drawn"));
    const plain = [figure(weightText(found.weight, found.error), kind === "rest" ? "weight, where all tokens count" : "weight"), figure(timesText(found.weight * found.visible, (found.error || 0) * found.visible), "uniform attention")];
    const facts = measure === "weights" ? [...rest, ...(kind === "uniform" ? plain.reverse() : plain), ...this.rank(found)] : [...rest, figure(shareText(found.weight, measure, found.error), MEASURES[measure].short), ...((found.plain ?? null) === null ? [] : [figure(weightText(found.plain, found.plainError), "weight")])];
    if (Number.isFinite(found.logit)) facts.push(figure(minusSign(found.logit.toFixed(2)), "logit"));
    return el("span", { class: "facts", "data-weight": found.weight, "data-logit": found.logit }, ...facts);
  }

  // Stored weights that are all 0 have no order.
  rank({ weight, error, rank, visible }) {
    if (error && !weight) return rank > 1 ? [soft(`below #${count(rank - 1)} of ${count(visible)} in its row`)] : [];
    return [el("span", { class: "fact" }, el("b", { text: `${error ? "≈ " : ""}#${count(rank)}` }), soft(` of ${count(visible)} in its row`))];
  }

  // What the number of a pixel is.
  pooled({ kind, span }) {
    const { unit } = MEASURES[this.app.measure];
    if (kind === "peak") return `largest ${unit} of ${count(span)} × ${count(span)}`;
    if (kind === "uniform") return `uniform attention, averaged over ${count(span)} tokens together`;
    return `${unit}${kind === "rest" ? " without the first token" : ""}, for ${count(span)} tokens together: summed over their keys, averaged over their queries`;
  }

  context(cell, manifest) {
    const around = (tokens, at, kind, starts) => {
      const part = (from, to) => range(Math.max(0, from), Math.min(to, tokens.length)).map((i) => (starts && (starts[i] < i || i === starts[at]) ? "" : readable(tokens[i]))).join(""); // each character once
      return el("p", { class: `snippet ${kind}` }, el("bdi", {}, `${at > 6 ? "…" : ""}${part(at - 6, at)}`, el("mark", { text: readable(tokens[at]) }), `${part(at + 1, at + 5)}${at + 5 < tokens.length ? "…" : ""}`));
    };
    const { tokens, keys, starts, key_starts } = manifest;
    return [around(tokens, cell.query, "to", starts), around(keys || tokens, cell.key, "from", keys ? key_starts : starts)];
  }

  drawLegend(scale, pair) {
    const { manifest } = this.app.side;
    const { unit } = MEASURES[this.app.measure];
    const names = { share: this.app.kind === "rest" ? `${unit} without the first token` : unit, ratio: "multiple of uniform attention", difference: pair ? this.difference : unit };
    if (this.app.view !== "map") return;
    fill(this.app.legend, legendOf(scale, names[scale.name], this.app.dark));
    this.fit();
    fill(this.edges, manifest.masked ? el("p", { class: "soft legend-name" }, el("span", { class: "hidden-key" }), this.app.kind === "rest" ? " hidden by the mask or, at the first token, left out" : " hidden by the mask") : null, this.bars(pair));
  }

  // What the bars along the edges are, if there are any.
  bars(pair) {
    if (pair || this.app.measure !== "weights") return null;
    const all = this.app.kind === "rest" ? " They include the first token." : "";
    const { bin } = this.app.side.manifest;
    const binned = bin > 1 ? ` Each bar covers ${count(bin)} tokens: what they received together, and their mean entropy and distance.` : "";
    return el("p", { class: "soft legend-name", text: `Bars: attention that each key received, summed over queries; entropy in nats${this.app.side.manifest.keys ? "" : " and mean distance in tokens"} of each query. A full bar is the number after ≤: the largest there is or, for entropy, the largest possible, rounded up.${binned}${all}` });
  }

  // Where the pictures of the file end, how to go on.
  tellLimit(subject, kind) {
    const { data, side } = this.app;
    const { levels, model } = side.manifest;
    const depth = data.depth(subject, kind);
    const span = 2 ** (levels - depth);
    const rows = this.app.rowsOf(subject);
    this.limit.hidden = depth >= levels;
    if (depth >= levels) return;
    const atEnd = this.view && this.view.scale * span * (window.devicePixelRatio || 1) > 8;
    const known = rows === "top" && !this.difference && (kind === "mass" || kind === "peak") ? " The 8 largest weights of every row are drawn as single cells." : "";
    const one = this.app.measure === "contribution" ? "contribution" : "weight";
    const command = model === "builtin" ? "headwise serve" : `headwise serve --model ${(model || "FOLDER").replace(/ \([a-z-]+\)$/, "")}`;
    fill(this.limit, `One pixel of this file covers ${count(span)} × ${count(span)} ${one}s.${known} For every single ${one}, run `, el("code", { text: command }), " and open the text there.");
    this.limit.classList.toggle("at-end", Boolean(atEnd));
  }
}
