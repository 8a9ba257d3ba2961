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

  // The likeliest tokens with all heads and without some, each with both numbers if known.
  next(all, now, off) {
    if (!now.next.length) return null;
    const before = new Map((off && all ? all.next : []).map((x) => [x.token, x.probability]));
    const after = new Map(now.next.map((x) => [x.token, x.probability]));
    const texts = new Map([...now.next, ...(all?.next || [])].map((x) => [x.token, x.text]));
    const tokens = [...new Set([...now.next.slice(0, 6), ...(off && all ? all.next.slice(0, 2) : [])].map((x) => x.token))];
    const cell = (map, token) => {
      const share = map.get(token);
      const made = el("td", { class: "number", text: share === undefined ? "< " + percent(Math.min(...map.values())) : percent(share) });
      made.style.setProperty("--share", `${Math.round(100 * (share || 0))}%`);
      return made;
    };
    const row = (name, title, map) => el("tr", { class: name }, el("th", { scope: "row", text: title }), ...tokens.map((token) => cell(map, token)));
    const heads = el("tr", {}, el("th", { scope: "col", text: "next token" }), ...tokens.map((token) => el("th", { scope: "col" }, el("button", { type: "button", class: "plain candidate", title: "Append this token to the text", onclick: () => this.live.append(texts.get(token)) }, /^ +[^ ]/.test(token) ? el("span", { class: "soft", text: SIGNS[" "] }) : null, el("bdi", { text: wordOf(token) })))));
    return el("table", { class: "next" }, el("thead", {}, heads), el("tbody", {},
      off && all ? row("before", "all heads", before) : null,
      row("after", off ? `without ${plural(off, "head")}` : "probability", after)));
  }
}
