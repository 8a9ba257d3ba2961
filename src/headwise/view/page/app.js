// The whole page: the sentence, the text, and the atlas, the table or the map.

class App {
  constructor(root, sides) {
    Object.assign(this, { root, sides, side: sides[0], data: new SubjectData(sides), store: new Store() });
    this.first = this.firstHead();
    if (!Subject.parse(this.store.get("head"), sides)) this.store.values.head = this.first;
    this.reading = new Reading(this);
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
    this.onresize = debounced(() => this.atlas.fit(), 60);
    document.addEventListener("keydown", this.onkey);
    this.scheme.addEventListener("change", this.onscheme);
    addEventListener("resize", this.onresize);
  }

  close() {
    document.removeEventListener("keydown", this.onkey);
    this.scheme.removeEventListener("change", this.onscheme);
    removeEventListener("resize", this.onresize);
    for (const map of this.stage.shown) map.close();
    this.store.close();
    this.root.replaceChildren();
  }

  // The head that does one thing most clearly, among those whose rows are in the page.
  firstHead() {
    const { manifest, source } = this.side;
    const there = manifest.clearest.filter(([l, h]) => !source.hasRows || source.hasRows(l, h));
    const busy = there.filter(([l, h]) => !/^(first-token sink|broad|mixed)/.test(manifest.layers[l].heads[h].reading));
    return [...busy, ...there, ...manifest.clearest][0].join(".");
  }

  get dark() {
    const chosen = document.documentElement.dataset.theme;
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
    const names = ["ink", "soft", "paper", "card", "line", "accent", "second", "veil", "margin"];
    this.palette = Object.fromEntries(names.map((name) => [name, read(name)]));
    this.palette.font = getComputedStyle(probe).fontFamily;
    probe.remove();
    return this.palette;
  }

  build() {
    const { manifest } = this.side;
    this.root.classList.add("headwise");
    this.tabs = el("div", { class: "segments tabs", role: "tablist", "aria-label": "View" });
    this.options = el("div", { class: "options" });
    this.main = el("main", { class: "main" });
    const [size, ...facts] = manifest.sentence.split(" · ");
    const sentence = el("p", { class: "sentence" }, el("b", { text: size }), ...facts.flatMap((fact) => [el("span", { class: "dot", text: " · " }), el("span", { text: fact })]));
    const menu = el("details", { class: "menu" }, el("summary", { text: "Save" }), el("div", { class: "menu-list" },
      ...[["Picture (PNG)", () => this.saving.png()], ["Drawing (SVG)", () => this.saving.svg()], ["All heads (CSV)", () => this.saving.csv()], ["All heads (JSON)", () => this.saving.json()], ["Weights in the window (CSV)", () => this.saving.weights()]]
        .map(([text, run]) => el("button", { type: "button", text, onclick: () => { menu.open = false; run(); } }))));
    const tools = el("div", { class: "tools" }, this.tabs, menu,
      el("button", { type: "button", class: "icon", text: "◐", "aria-label": "Light or dark theme", title: "Light or dark theme  d", onclick: () => this.flipTheme() }),
      el("button", { type: "button", class: "icon", text: "?", "aria-label": "Help", title: "Help  ?", onclick: () => this.help.showModal() }));
    const header = el("header", { class: "top" }, el("div", { class: "top-line" }, el("h1", { text: manifest.title || "What the heads do" }), tools), sentence, this.notes());
    fill(this.root, header, el("div", { class: "columns" }, this.reading.root, this.main), this.help);
    this.atlas.build();
    this.reading.build();
    this.show();
  }

  // What the reader should know about this file.
  notes() {
    const { embedded, T } = this.side.manifest;
    if (!embedded || embedded.weights === "float32") return null;
    const text = embedded.weights === "float16" ? "This file stores the weights in float16, to three digits."
      : `${count(T)} tokens: this file has a picture of every head, and single weights of ${embedded.keys.length || "no"} head${embedded.keys.length === 1 ? "" : "s"}.`;
    return el("p", { class: "soft note", text });
  }

  headsWithRows() {
    const { embedded, clearest } = this.side.manifest;
    return embedded?.keys || clearest.map((place) => place.join("."));
  }

  subject() {
    return Subject.parse(this.store.get("head"), this.sides) || Subject.parse(this.first, this.sides);
  }

  rowsOf(subject) {
    const { source } = this.sides[subject.side];
    return subject.single && source.hasRows ? source.hasRows(subject.layer, subject.head) : "all";
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
    const view = this.store.get("view");
    const names = [["atlas", "Atlas"], ["table", "Table"], ["map", "Map"]];
    fill(this.tabs, ...names.map(([name, text]) => el("button", { type: "button", role: "tab", "aria-selected": String(view === name), text, onclick: () => this.store.set({ view: name }) })));
    this.root.dataset.view = view;
    if (view === "map") {
      fill(this.main, this.stage.root);
      this.stage.build();
    } else {
      this.atlasOptions();
      fill(this.main, this.options, view === "table" ? this.table.root : this.atlas.root);
      if (view === "table") this.table.build();
      else this.atlas.arrange();
    }
  }

  atlasOptions() {
    const { manifest } = this.side;
    const { store } = this;
    const stats = Object.keys(manifest.about).map((name) => [name, statName(name)]);
    const check = el("label", { class: "check" }, el("input", { type: "checkbox", checked: Boolean(store.get("without")), onchange: (event) => store.set({ without: event.target.checked ? "1" : "" }) }), "without the first token");
    const about = manifest.about[store.get("color")] || manifest.about[store.get("sort")] || "";
    fill(this.options,
      this.stage.chooser("Sort by", store.get("sort"), [["place", "layer and head"], ...stats], (value) => store.set({ sort: value })),
      this.stage.chooser("Color by", store.get("color"), [["none", "nothing"], ...stats], (value) => store.set({ color: value })), check,
      el("span", { class: "soft about", text: about }), this.scaleKey());
  }

  // The color scale, the same in every page.
  scaleKey() {
    const strip = Float32Array.from({ length: 64 }, (_, i) => (i / 63) ** 2);
    const canvas = paint(strip, 64, 1, "share", this.dark);
    canvas.className = "key-ramp";
    return el("span", { class: "scale-key", role: "img", "aria-label": "Color scale from 0 (dark blue) to 1 (yellow), by square root" }, el("span", { text: "0" }), canvas, el("span", { text: "1" }));
  }

  changed(keys, fromAddress) {
    if (keys.has("view")) this.show();
    else if (this.store.get("view") === "map" && ["head", "with", "show", "kind"].some((key) => keys.has(key))) this.stage.update();
    else if (["sort", "color", "without"].some((key) => keys.has(key))) this.show();
    if (fromAddress && keys.has("at") && this.stage.view) {
      this.stage.view.read(this.store.get("at"));
      this.stage.redraw();
    }
    if (keys.has("head")) this.atlas.mark();
    if (keys.has("head") || keys.has("word")) this.reading.show(this.locked() ?? this.reading.at);
    if (keys.has("word")) this.stage.redraw();
  }

  stageHeight() {
    return innerHeight - this.root.querySelector(".columns").getBoundingClientRect().top - scrollY;
  }

  flipTheme() {
    document.documentElement.dataset.theme = this.dark ? "light" : "dark";
    this.recolor();
  }

  recolor() {
    this.palette = null;
    if (this.store.get("view") === "map") this.stage.update();
    else this.show();
  }

  key(event) {
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (this.atlas.onkey(event)) return event.preventDefault();
    const kinds = { m: "mass", r: "rest", p: "peak", u: "uniform" };
    const acts = {
      "?": () => this.help.showModal(), "/": () => this.reading.find.focus(), d: () => this.flipTheme(),
      1: () => this.store.set({ view: "atlas" }), 2: () => this.store.set({ view: "table" }), 3: () => this.store.set({ view: "map" }),
      "[": () => this.step(-1), "]": () => this.step(1), Escape: () => this.escape(), x: () => this.flip(),
    };
    if (kinds[event.key]) this.store.set({ kind: kinds[event.key] });
    else if (acts[event.key]) acts[event.key]();
    else return undefined;
    return event.preventDefault();
  }

  escape() {
    if (this.locked() !== null) this.lock(null);
    else this.store.set({ view: "atlas" });
  }

  flip() {
    const ways = ["difference", "a", "b"];
    if (this.stage.minus) this.store.set({ show: ways[(ways.indexOf(this.store.get("show")) + 1) % ways.length] });
  }
}
