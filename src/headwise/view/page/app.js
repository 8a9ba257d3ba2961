// The whole page: the sentence, the text, and the atlas, the table or the map.

const SINK = "first-token sink"; // the kind of heads that put SHARED.sink or more on the first token
// What is shown where a pixel of the map is not the number itself.
const KINDS_TOLD = {
  peak: (what) => `the largest of the ${what} under each pixel.`,
  uniform: (what) => `${what} as multiples of uniform attention: 1× is what each token would get if its row were spread evenly over all tokens that it may attend to.`,
};
const VIEWS = [["atlas", "Heads", "All heads as pictures"], ["words", "Text", "One head as lines between words"], ["map", "Map", "One head as a map of weights"], ["table", "Table", "All heads as numbers"]];

class App {
  constructor(root, sides) {
    Object.assign(this, { root, sides, side: sides[0], data: new SubjectData(this), store: new Store({ without: this.sinksOf(sides[0]) ? "1" : "" }) });
    this.first = this.firstHead();
    if (!Subject.parse(this.store.get("head"), sides)) this.store.values.head = this.first;
    if (this.side.manifest.about.importance && this.store.get("color") === "none") this.store.values.color = "importance";
    for (const { manifest } of sides) Object.assign(manifest, { labels: labelsOf(manifest.tokens, manifest.starts), keyLabels: manifest.keys ? labelsOf(manifest.keys, manifest.key_starts) : labelsOf(manifest.tokens, manifest.starts) });
    // A second sink of exactly 0 is none: too few queries see any one key.
    for (const { manifest } of sides) for (const { heads } of manifest.layers) for (const { numbers, without_first: rest } of heads) for (const one of [numbers, rest]) if (one.second_sink === 0) one.second_sink = null;
    this.reading = new Reading(this);
    this.lines = new Lines(this);
    this.atlas = new Atlas(this);
    this.table = new HeadTable(this);
    this.stage = new Stage(this);
    this.saving = new Saving(this);
    this.help = helpSheet();
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.build();
    this.store.listen((changed, fromAddress) => this.changed(changed, fromAddress));
    this.onkey = (event) => this.key(event);
    this.onscheme = () => this.recolor();
    this.onprint = (event) => this.paper(event.type === "beforeprint");
    this.onresize = debounced(() => this.fit(), 60);
    document.addEventListener("keydown", this.onkey);
    this.scheme.addEventListener("change", this.onscheme);
    for (const type of ["beforeprint", "afterprint"]) addEventListener(type, this.onprint);
    addEventListener("resize", this.onresize);
  }

  close() {
    document.removeEventListener("keydown", this.onkey);
    this.scheme.removeEventListener("change", this.onscheme);
    for (const type of ["beforeprint", "afterprint"]) removeEventListener(type, this.onprint);
    removeEventListener("resize", this.onresize);
    for (const map of this.stage.shown) map.close();
    this.store.close();
    this.root.replaceChildren();
  }

  // What stands above has another height, or the window another size.
  fit() {
    for (const part of [this.atlas, this.lines, this.table, this.reading]) part.fit();
    if (this.view === "map") this.stage.fit();
  }

  // The head that does one thing most clearly, among those whose rows are in the page.
  firstHead() {
    const { manifest, source } = this.side;
    const there = manifest.clearest.filter(([l, h]) => !source.hasRows || source.hasRows(l, h));
    const busy = there.filter(([l, h]) => manifest.layers[l].heads[h].numbers.sink < 0.5);
    return [...busy, ...there, ...manifest.clearest][0].join(".");
  }

  // Whether everything that was asked for is drawn.
  get resting() {
    const maps = this.view === "map" ? this.stage.shown : [];
    return !awaited.count && !this.lines.frame && maps.every((map) => map.reach && map.drawn && !map.frame && !map.tiles.waiting);
  }

  get dark() {
    const chosen = document.documentElement.style.colorScheme;
    return chosen ? chosen === "dark" : this.scheme.matches;
  }

  // The colors of the theme, in a form that a canvas accepts.
  colors() {
    if (this.palette) return this.palette;
    const probe = el("span");
    this.root.append(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    const names = ["ink", "soft", "paper", "card", "line", "accent", "second", "margin"];
    this.palette = Object.fromEntries(names.map((name) => [name, read(name)]));
    this.palette.font = getComputedStyle(probe).fontFamily;
    probe.remove();
    return this.palette;
  }

  build() {
    const { manifest } = this.side;
    this.root.classList.add("headwise");
    this.tabs = el("div", { class: "segments tabs", role: "tablist", "aria-label": "View" });
    this.tabs.addEventListener("keydown", (event) => this.tabKey(event));
    this.options = el("div", { class: "options" });
    this.about = el("p", { class: "soft about" });
    this.main = el("main", { class: "main", role: "tabpanel", id: "headwise-panel", tabindex: "-1" });
    const [size, ...facts] = manifest.sentence.split(" · ");
    this.controls = el("div", { class: "controls-row" });
    this.legend = el("div", { class: "legend" });
    this.settings = el("section", { class: "settings", "aria-label": "What is shown" }, this.controls, this.legend);
    const sentence = el("p", { class: "sentence" }, el("b", { text: size }), ["", ...facts].join(" · "));
    const menu = el("details", { class: "menu" }, el("summary", { text: "Save" }), el("div", { class: "menu-list" },
      ...[["Picture (PNG)", () => this.saving.png()], ["Drawing (SVG)", () => this.saving.svg()], ["All heads (CSV)", () => this.saving.csv()], ["All heads (JSON)", () => this.saving.json()], ["Weights in the window (CSV)", () => this.saving.weights()], ["Print or save as PDF", () => print()]]
        .map(([text, run]) => el("button", { text, onclick: () => { menu.open = false; run(); } }))));
    const tools = el("div", { class: "tools" }, this.tabs, menu,
      icon("◐", "Light or dark theme", () => this.flipTheme(), "Light or dark theme  d"),
      icon("?", "Help", () => this.help.showModal(), "Help  ?"));
    this.shown = el("p", { class: "soft note shown" });
    this.noted = el("p", { class: "soft note noted" });
    this.told = el("div", { class: "told" }, this.shown, this.noted);
    const header = el("header", { class: "top" }, el("div", { class: "top-line" }, el("h1", {}, el("bdi", { text: manifest.title })), tools), sentence);
    fill(this.root, header, this.settings, el("div", { class: "columns" }, this.reading.root, this.main), this.help);
    this.atlas.build();
    this.reading.build();
    this.show();
  }

  // What the reader should know about this file.
  notes() {
    const { embedded, model, T } = this.side.manifest;
    if (!embedded) return "";
    if (embedded.weights) return this.precision(embedded);
    return `${count(T)} tokens are too many to store every weight: this file has pictures of all heads, and the largest weights of ${plural(embedded.keys.length, "head")}.${model && this.measures.length < 2 ? " With values=True or --values it would also show what the weights carry." : ""}`;
  }

  // How precise the numbers of a short text are, where that can be seen.
  precision({ steps, contributions }) {
    const within = (what, code) => `This file stores ${what} in one byte: one of 0.5 to within ${errorOf(code)(0.5).toFixed(3)}, one of 0.01 to within ${errorOf(code)(0.01).toFixed(4)}. Numbers are shown with no more digits than that.`;
    if (this.measure !== "contribution") return steps ? within("every weight", `sqrt ${steps}`) : "";
    const span = this.data.spanOf(new Subject(0, 0, 0), "mass");
    return span > 1 ? `This file has pictures of contributions, in which a pixel covers ${span} × ${span} of them: single ones would take too much room.` : contributions ? within("every contribution", contributions) : "";
  }

  // What is shown of the model: weights, what they carry, or contributions; see carried.js.
  get measures() {
    return Object.keys(MEASURES).filter((name) => this.sides.every(({ manifest }) => (manifest.measures || ["weights"]).includes(name)));
  }

  // The statistics shown as bars and sorted by; one that was measured for another text is not shown for this one.
  get bars() {
    return this.store.get("color") in this.side.manifest.about ? this.store.get("color") : "none";
  }

  get statistics() {
    const { about, corner } = this.side.manifest;
    return Object.keys(about).filter((name) => name !== "next" || !corner); // a causal model sees no next token
  }

  get sort() {
    return this.store.get("sort") in this.side.manifest.about ? this.store.get("sort") : "place";
  }

  get view() {
    return this.store.get("view");
  }

  get measure() {
    return this.measures.includes(this.store.get("what")) ? this.store.get("what") : "weights";
  }

  // The kinds of pictures that there are of it, and the chosen one. Where every weight has a pixel of its own even in
  // the whole map, the largest weight of a pixel is that weight.
  get kinds() {
    const known = this.side.source.as(this.measure).kinds || KINDS.map(([name]) => name);
    return this.stage?.single ? known.filter((name) => name !== "peak") : known;
  }

  get kind() {
    const kind = this.store.get("kind");
    return kind !== "mass" && this.kinds.includes(kind) ? kind : this.without ? "rest" : "mass";
  }

  // What heads are ranked by for a word.
  get taking() {
    return this.measure === "weights" ? "attend most from this word" : "take most from one word here";
  }

  // Whether the first token is left out of all pictures: of heads, of lines and of the map.
  get without() {
    return Boolean(this.store.get("without")) && this.kinds.includes("rest");
  }

  scale(powers = POWERS) {
    return new Scale(this.measure === "contribution" ? "difference" : "share", this.contrast, 1, powers);
  }

  measureControl() {
    if (this.measures.length < 2) return null;
    return radios("measures", "What is shown", this.measure, this.measures.map((name) => [name, MEASURES[name].name, `Show ${MEASURES[name].told}`]), (name) => this.store.set({ what: name }));
  }

  // How many heads attend to the first token; only where some do is it left out from the start.
  sinksOf({ manifest }) {
    return manifest.layers.flatMap(({ heads }) => heads).filter(({ traits }) => traits.some(([name]) => name === SINK)).length;
  }

  tellShown() {
    this.noted.textContent = [this.side.manifest.note, this.notes()].filter(Boolean).join(" ");
    const view = this.view;
    const difference = view === "map" ? this.stage.difference : null;
    const kind = view === "map" && !difference ? KINDS_TOLD[this.kind] : null;
    const what = view === "table" ? "averages per head, of attention weights." : kind ? kind(MEASURES[this.measure].name.toLowerCase()) : MEASURES[this.measure].told;
    this.shown.textContent = `Shown: ${difference ? `the difference of two heads (${difference}), of ` : ""}${what}${this.firstTold(view)}`;
    this.reading.fit(); // what stands above may have grown
    if (view === "map") this.stage.fit();
  }

  // What is done with the first token, in the same words in every view.
  firstTold(view) {
    if (view === "table" ? !this.store.get("without") : view === "map" ? this.kind !== "rest" : !this.without) return this.measure === "contribution" && view !== "table" ? "" : " All tokens count.";
    const sinks = this.sinksOf(this.side);
    const why = sinks ? `, to which ${plural(sinks, "head")} give${sinks === 1 ? "s" : ""} ${100 * SHARED.sink} % or more` : "";
    return ` Without the first token${why}: the other weights of a row are scaled up to sum to 1.${view === "table" ? "" : " In the lists of words and heads, all tokens count."}`;
  }

  subject() {
    return Subject.parse(this.store.get("head"), this.sides) || Subject.parse(this.first, this.sides);
  }

  rowsOf(subject) {
    return this.data.exact(subject);
  }

  locked() {
    const at = this.store.get("word");
    return at === "" || !(Number(at) < this.side.manifest.T) ? null : Number(at);
  }

  lock(at) {
    this.store.set({ word: at === null ? "" : at });
  }

  open(place) {
    this.store.set({ head: place, view: "map", at: "" });
  }

  openPair(pair) {
    this.store.set({ head: `${pair.layer}.${pair.head}`, view: "map", word: pair.query });
    this.stage.point({ query: pair.query, key: pair.key });
    if (!this.stage.view.fitted || this.stage.view.scale < 12) {
      this.stage.view.reveal(pair.query, pair.key, Math.max(14, this.stage.view.fit));
      this.stage.moved();
    }
  }

  // The next head in the order of the atlas.
  step(by) {
    const places = Array.from(this.atlas.root.querySelectorAll(".head"), (cell) => cell.dataset.place);
    const at = places.indexOf(this.store.get("head"));
    this.store.set({ head: places[(at + by + places.length) % places.length] });
  }

  show() {
    const view = this.view;
    fill(this.tabs, ...VIEWS.map(([name, text, about]) => el("button", { role: "tab", id: `tab-${name}`, "aria-controls": "headwise-panel", "aria-selected": String(view === name), tabindex: view === name ? "0" : "-1", text, title: about, onclick: () => this.store.set({ view: name }) })));
    this.main.setAttribute("aria-labelledby", `tab-${view}`);
    this.root.dataset.view = view;
    fill(this.legend);
    this.control(view);
    if (view === "map") this.stage.edges.before(this.told);
    else this.settings.append(this.told);
    if (view === "map") {
      fill(this.main, this.stage.root);
      this.stage.build();
    } else if (view === "words") {
      fill(this.main, this.lines.root);
      this.lines.build();
    } else {
      this.headOptions(view);
      fill(this.main, el("div", { class: "options-row" }, view === "atlas" ? this.atlas.told : null, this.options, this.about), view === "table" ? this.table.root : this.atlas.root);
      if (view === "table") this.table.build();
      else this.atlas.arrange();
    }
    this.tellShown();
  }

  tabKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = VIEWS.findIndex(([name]) => name === this.view);
    this.store.set({ view: VIEWS[(at + step + VIEWS.length) % VIEWS.length][0] });
    this.tabs.querySelector('[aria-selected="true"]').focus();
    event.preventDefault();
    event.stopPropagation();
  }

  // Point at a word, from the text, the lines or the map.
  pointAt(at, follow = false) {
    if (at === this.reading.at) return;
    this.reading.show(at);
    this.lines.show(at);
    if (follow && at !== null) this.reading.reveal(at);
  }

  get contrast() {
    return clamp(Math.round(Number(this.store.get("contrast"))) || 0, 0, CONTRASTS - 1);
  }

  contrastControl() {
    const input = el("input", { type: "range", min: 0, max: CONTRASTS - 1, step: 1, value: this.contrast, title: "How strongly small weights are inked", oninput: (event) => this.store.set({ contrast: event.target.value }) });
    return el("label", { class: "chooser contrast" }, el("span", { text: "Contrast" }), input);
  }

  check(name, text, about) {
    return el("label", { class: "check", title: about }, el("input", { type: "checkbox", checked: Boolean(this.store.get(name)), onchange: (event) => this.store.set({ [name]: event.target.checked ? "1" : "" }) }), text);
  }

  // The controls that all views share, in one place: what is shown, of which tokens, and how strongly it is inked.
  control(view = this.view) {
    refill(this.controls, view === "table" ? null : this.measureControl(), this.tokensControl(view), view === "table" ? null : this.contrastControl(),
      view === "atlas" ? this.check("rows", "scale each row", "Each row of a picture is scaled to its largest value, so that patterns show. Otherwise colors stand for weights from 0 to 1.") : null);
  }

  // All tokens or all but the first, in every view; the map can show two more kinds.
  tokensControl(view) {
    const offered = view === "table" ? KINDS.slice(0, 2) : KINDS.filter(([name]) => this.kinds.includes(name) && (view === "map" || name === "mass" || name === "rest"));
    if (offered.length < 2) return null;
    const chosen = view === "table" ? (this.store.get("without") ? "rest" : "mass") : view === "map" ? this.kind : this.without ? "rest" : "mass";
    return radios("kinds", "Which tokens count", chosen, offered, (name) => this.choose(name));
  }

  // A kind of picture; the first two are those of all views.
  choose(kind) {
    this.store.set(kind === "mass" || kind === "rest" ? { kind: "mass", without: kind === "rest" ? "1" : "" } : { kind });
  }

  headOptions(view) {
    const { manifest } = this.side;
    const { store } = this;
    const stats = this.statistics.map((name) => [name, statName(name)]);
    const atlas = view === "atlas";
    const bars = atlas ? this.bars : "none";
    const named = bars !== "importance" && bars !== "sink" && !store.get("without") && this.sinksOf(this.side) ? " The first token is included; names of heads describe what is left without it." : "";
    const told = bars in manifest.about ? `Bars: ${manifest.about[bars]}.${named}` : "";
    const about = told || manifest.about[this.sort] || "";
    fill(this.options, this.stage.chooser("Sort by", this.sort, [["place", "layer and head"], ...stats], (value) => store.set({ sort: value })),
      atlas ? this.stage.chooser("Bars", this.bars, [["none", "none"], ...stats], (value) => store.set({ color: value })) : null);
    fill(this.about, about);
    if (atlas) this.atlas.drawLegend();
  }

  changed(keys, fromAddress) {
    const any = (...names) => names.some((name) => keys.has(name));
    if (any("what", "kind", "without", "rows")) this.control(); // the contrast slider is left alone
    if (any("view") || (any("what") && this.view !== "map")) this.show();
    else if (this.view === "map" && any("head", "with", "show", "what", "kind", "without", "contrast")) this.stage.update(keys);
    else if (this.view === "words" && any("head", "without", "contrast")) this.lines.build();
    else if (any("sort", "color", "without", "rows")) this.show();
    else if (any("contrast")) this.recontrast();
    this.tellShown();
    if (fromAddress && any("at") && this.stage.view) {
      this.stage.view.read(this.store.get("at"));
      this.stage.redraw();
    }
    if (any("head")) this.atlas.mark();
    if (any("head", "word", "what")) {
      this.reading.show(this.locked() ?? this.reading.at);
      this.lines.show(this.locked() ?? this.reading.at);
    }
    if (any("word")) this.stage.redraw();
    if (any("view") && this.view === "map" && !fromAddress) this.stage.shown[0].canvas.focus({ preventScroll: true });
  }

  // Pixels from an element's upper edge to the end of the window.
  roomFor(element) {
    return innerHeight - element.getBoundingClientRect().top - scrollY;
  }

  // The slider keeps the focus: only what it colors is redrawn.
  recontrast() {
    this.atlas.paintAll();
    this.atlas.color();
    this.atlas.drawLegend();
  }

  flipTheme() {
    document.documentElement.style.colorScheme = this.dark ? "light" : "dark";
    this.recolor();
  }

  recolor() {
    this.palette = null;
    if (this.view === "map") this.stage.update();
    else if (this.view === "words") this.lines.recolor();
    else this.show();
  }

  // Paper is light and does not scroll. The browser waits for no frame before it prints.
  paper(on) {
    const { style } = document.documentElement;
    this.printing = on;
    if (on) this.theme = style.colorScheme;
    style.colorScheme = on ? "light" : this.theme;
    this.recolor();
  }

  key(event) {
    const typing = event.target.closest?.("input:not([type=range], [type=checkbox]), select, textarea, dialog") || (event.target.type === "range" && event.key.length > 1);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (this.atlas.onkey(event)) return event.preventDefault();
    const kinds = { m: "mass", r: "rest", p: "peak", u: "uniform" };
    const acts = {
      "?": () => this.help.showModal(), "/": () => this.finding(), d: () => this.flipTheme(),
      ...Object.fromEntries(VIEWS.map(([name], i) => [i + 1, () => this.store.set({ view: name })])),
      "[": () => this.step(-1), "]": () => this.step(1), Escape: () => this.escape(), x: () => this.flip(),
    };
    if (event.key === "w" && this.measures.length > 1) this.store.set({ what: this.measures[(this.measures.indexOf(this.measure) + 1) % this.measures.length] });
    else if ((this.view === "map" || event.key === "m" || event.key === "r") && this.kinds.includes(kinds[event.key])) this.choose(kinds[event.key]);
    else if (acts[event.key]) acts[event.key]();
    else return undefined;
    return event.preventDefault();
  }

  finding() {
    if (this.view === "table") this.store.set({ view: "atlas" }); // the table stands alone
    this.reading.find.focus();
  }

  escape() {
    if (this.locked() === null) return this.store.set({ view: "atlas" });
    this.lock(null);
    return this.pointAt(null);
  }

  flip() {
    const ways = ["difference", "a", "b"];
    if (this.stage.minus) this.store.set({ show: ways[(ways.indexOf(this.store.get("show")) + 1) % ways.length] });
  }
}
