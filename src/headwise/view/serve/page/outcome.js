// The loss and the likeliest next tokens, with all heads and without some.

const lossText = (loss) => (loss === null ? "–" : loss.toFixed(3));
const percent = (share) => (share >= 0.0995 ? (100 * share).toFixed(0) : (100 * share).toFixed(1)) + " %";

class OutcomePanel {
  constructor(live) {
    this.live = live;
    this.root = el("section", { class: "outcome", "aria-label": "Loss and next token", "aria-live": "polite", hidden: true });
  }

  show(run) {
    this.off = run.off;
    const [all, now] = [run.with_all_heads, run.outcome];
    this.root.hidden = !now;
    if (now) fill(this.root, this.loss(all, now, run.off.length), this.next(all, now, run.off.length));
  }

  loss(all, now, off) {
    const [title, unit] = [el("h3", { text: this.live.parts.length ? "Loss of the decoder’s text" : "Loss" }), el("span", { class: "soft", text: " nats per token" })];
    if (now.loss === null) return el("div", { class: "loss" }, title, el("p", { class: "soft", text: now.missing || "A single token has no loss: nothing comes before it." }));
    const change = off && all ? now.loss - all.loss : 0;
    const told = off && all
      ? [el("span", { class: "before", text: lossText(all.loss) }), " → ", el("b", { class: "after", text: lossText(now.loss) }), unit, el("span", { class: "change", text: ` ${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(3)}` })]
      : [el("b", { class: "after", text: lossText(now.loss) }), unit];
    return el("div", { class: "loss" }, title, el("p", {}, ...told));
  }

  // The likeliest tokens with all heads and without some, each with both numbers if known; the likeliest now first.
  next(all, now, off) {
    if (!now.next.length) return null;
    const others = off && all ? all.next : [];
    const shares = (next) => new Map(next.map((x) => [x.id, x.probability]));
    const [before, after] = [shares(others), shares(now.next)];
    const found = new Map([...now.next.slice(0, 6), ...others.slice(0, 2)].map((x) => [x.id, x]));
    const tokens = [...found.values()].sort((a, b) => (after.get(b.id) ?? 0) - (after.get(a.id) ?? 0));
    const cell = (map, { id }) => {
      const share = map.get(id);
      const made = el("td", { class: "number", text: share === undefined ? "< " + percent(Math.min(...map.values())) : percent(share) });
      made.style.setProperty("--share", `${Math.round(100 * (share || 0))}%`);
      return made;
    };
    const row = (name, title, map) => el("tr", { class: name }, el("th", { scope: "row", text: title }), ...tokens.map((token) => cell(map, token)));
    const heads = el("tr", {}, el("th", { scope: "col", text: "next token" }), ...tokens.map((one) => el("th", { scope: "col" }, this.candidate(one, tokens))));
    return el("table", { class: "next" }, el("thead", {}, heads), el("tbody", {},
      off && all ? row("before", "all heads", before) : null,
      row("after", off ? `without ${plural(off, "head")}` : "probability", after)));
  }

  // A button that appends the token; one that cannot be written alone is only named. Equal labels are told apart by ids.
  candidate(found, tokens) {
    const { text, id } = found;
    const spaced = (one) => /^ +[^ ]/.test(one.token);
    const label = (one) => (one.text ? wordOf(one.token) : readable(one.token));
    const same = tokens.filter((other) => label(other) === label(found) && spaced(other) === spaced(found)).length > 1;
    const name = [spaced(found) ? soft(SIGNS[" "]) : null, el("bdi", { text: label(found) }), same ? soft(` #${id}`) : null];
    if (!text) return el("span", { title: `Token ${id} cannot be appended: it is no text alone` }, ...name);
    return el("button", { type: "button", class: "plain candidate", title: `Append this token to the text (token ${id})`, onclick: () => this.live.append(text) }, ...name);
  }
}
