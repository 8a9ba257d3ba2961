// Heads that are switched off: chosen in the atlas or in the map, and listed here.

class SilentHeads {
  constructor(live) {
    Object.assign(this, { live, places: new Set(), clicking: false, predicts: true });
    this.root = el("section", { class: "silent", "aria-label": "Heads that are switched off", hidden: true });
    document.addEventListener("click", (event) => this.onclick(event), true);
    document.addEventListener("keydown", (event) => this.onkey(event));
    this.told = debounced(() => live.retry(), 250);
  }

  get pairs() {
    return Array.from(this.places, (place) => place.split(".").map(Number)).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  }

  onclick(event) {
    const head = (event.shiftKey || this.clicking) && event.target.closest?.("#headwise .head");
    if (!head) return;
    event.preventDefault();
    event.stopPropagation();
    this.toggle(head.dataset.place);
  }

  onkey(event) {
    if (event.key !== "o" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog")) return;
    const place = event.target.closest?.("#headwise .head")?.dataset.place || this.current();
    if (place) this.toggle(place);
  }

  current() {
    const place = this.live.app?.store.get("head") || "";
    return /^\d+\.\d+$/.test(place) ? place : null;
  }

  setClicking(on) {
    this.clicking = on;
    document.documentElement.classList.toggle("switching", on);
  }

  toggle(place) {
    if (!this.places.delete(place)) this.places.add(place);
    this.show();
    this.told();
  }

  clear() {
    if (!this.places.size) return;
    this.places.clear();
    this.show();
    this.told();
  }

  restore(pairs) {
    this.places = new Set(pairs.map((pair) => pair.join(".")));
    this.show();
  }

  show() {
    this.root.hidden = !this.live.app;
    for (const head of document.querySelectorAll("#headwise .head")) head.toggleAttribute("data-off", this.places.has(head.dataset.place));
    const place = this.current();
    const chips = this.pairs.map(([l, h]) => el("button", { type: "button", class: "chip off", text: `${l}.${h} ×`, "aria-label": `Switch head ${l}.${h} on again`, onclick: () => this.toggle(`${l}.${h}`) }));
    const many = this.places.size;
    const mode = el("label", { class: "check", title: "You can also Shift-click a head, or press o" }, el("input", { type: "checkbox", checked: this.clicking, onchange: (event) => this.setClicking(event.target.checked) }), "click a head to switch it off");
    fill(this.root, el("h3", { text: many ? "Switched off" : "Switch heads off" }),
      el("p", { class: "chips" }, mode, ...chips),
      el("p", { class: "acts" },
        place ? el("button", { type: "button", class: "act switch", text: `Switch ${place} ${this.places.has(place) ? "on" : "off"}`, onclick: () => this.toggle(place) }) : null,
        this.live.app && this.predicts ? el("button", { type: "button", class: "act sweep", text: "Switch each head off in turn", title: "Switch each head off in turn, and show as bars what that does to the loss", onclick: () => this.live.sweep() }) : null,
        many ? el("button", { type: "button", class: "act", text: "All on", onclick: () => this.clear() }) : null,
        this.again()));
  }

  // The maps are those of all heads, or without some; the button offers the other.
  again() {
    const [many, shown] = [this.places.size, this.live.side?.off || []];
    const button = (text, title, onclick) => el("button", { type: "button", class: "act again", text, title, onclick });
    const there = shown.length === many && shown.every((pair) => this.places.has(pair.join(".")));
    if (many && !there) return button(`Run again without ${many === 1 ? "it" : "them"}`, "Show the maps of the model without these heads, to compare with those of all heads", () => this.live.begin({ maps: true, compare: true }));
    if (shown.length) return button("Run again with all heads", `The maps are those of the model ${headsText(shown)}; this shows those of all heads again`, () => this.whole());
    return null;
  }

  whole() {
    this.restore([]);
    this.live.begin({ maps: true, same: true });
  }
}
