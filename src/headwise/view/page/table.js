// The atlas as a table: the same numbers, for sorting, copying and screen readers.

class HeadTable {
  constructor(app) {
    this.app = app;
    this.more = el("b", { text: " Scroll the table to the right for more numbers.", hidden: true });
    this.note = el("p", { class: "soft note", id: "table-note" });
    this.box = el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "All heads as a table" });
    this.root = el("section", { class: "table-view" }, this.note, this.box);
  }

  build() {
    const { manifest } = this.app.side;
    const { store } = this.app;
    const names = this.app.statistics;
    const { sort } = this.app;
    const column = (key, text, about) => el("th", { scope: "col", class: key === "place" ? null : "number-head", "aria-sort": key === sort ? (key === "place" ? "ascending" : "descending") : null },
      el("button", { class: "plain", text, title: about, onclick: () => store.set({ sort: key }) }));
    const header = el("tr", {}, column("place", "head", "by layer and head"), el("th", { scope: "col", text: "what it does" }), ...names.map((name) => column(name, statName(name), manifest.about[name])));
    const places = Array.from(this.app.atlas.cells.keys());
    if (sort !== "place") places.sort((a, b) => this.app.atlas.number(b)(sort) - this.app.atlas.number(a)(sort));
    fill(this.box, el("table", { "aria-describedby": "table-note" }, el("thead", {}, header), el("tbody", {}, ...places.map((place) => this.row(place, names)))));
    this.note.replaceChildren(this.caption(), this.more);
    requestAnimationFrame(() => this.fit());
  }

  // Its lower edge is in the window; what is beyond the right edge is announced.
  fit() {
    if (!this.root.isConnected) return;
    this.box.style.maxHeight = `${Math.max(320, this.app.roomFor(this.box) - 14)}px`;
    this.more.hidden = this.box.scrollWidth <= this.box.clientWidth;
  }

  caption() {
    const without = this.app.store.get("without");
    const left = without ? " Sink is the weight on the first token, averaged over the tokens after it; every other column is without the first token." : "";
    return `Averages over the tokens to which a number applies (induction, for example, needs an earlier copy): shares from 0 to 1, distance in tokens.${left} A weight shows where a head attends, not what the model uses.`;
  }

  row(place, names) {
    const [l, h] = place.split(".").map(Number);
    const head = this.app.side.manifest.layers[l].heads[h];
    const number = this.app.atlas.number(place);
    const cells = names.map((name) => {
      const value = number(name);
      const cell = el("td", { class: "number", text: value === null ? "–" : name === "importance" ? signed(value) : value.toFixed(name === "distance" ? 1 : 2) });
      if (name !== "distance" && name !== "importance") cell.style.setProperty("--share", `${Math.round(100 * clamp(value, 0, 1))}%`);
      return cell;
    });
    return el("tr", { "aria-current": place === this.app.store.get("head") ? "true" : null },
      el("th", { scope: "row" }, el("button", { class: "plain strong", text: headName(this.app.side.manifest, l, h), onclick: () => this.app.open(place) })), el("td", { class: "reading-cell", text: head.about }), ...cells);
  }
}
