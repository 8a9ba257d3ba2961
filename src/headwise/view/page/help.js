// The help sheet.

const HELP = [
  ["Everywhere", [["?", "this sheet"], ["Esc", "unlock a word, or go back to all heads"], ["1  2  3", "atlas, table, map"], ["/", "find a word"], ["d", "light or dark theme"], ["[  ]", "previous head, next head"]]],
  ["Map", [["arrows", "move the cursor, with Shift by ten"], ["+  −", "zoom at the cursor; wheel and pinch too"], ["0", "the whole map"], ["Enter", "lock the query token"], ["m  r  p  u", "mass, without first, peak, × uniform"], ["x", "cycle through a comparison"]]],
  ["Atlas", [["arrows", "move among heads"], ["Enter", "open a head"]]],
  ["Text", [["arrows", "move among words"], ["Enter", "lock a word"]]],
];

const TERMS = [
  ["Weight", "the share of its attention that a query gives to a key. The weights of a row sum to 1. They show where a head attends, not what the model uses."],
  ["Mass", "the value of a pixel that covers many weights: summed over its keys and averaged over its queries, so that a row of pixels sums to 1 at every zoom and thin stripes never fade."],
  ["First token", "many heads attend to it when they have nothing to do. “Without first” leaves it out and rescales the other weights to sum to 1."],
  ["× Uniform", "the weight times the number of keys that its query sees: 1 is uniform attention."],
  ["Entropy", "0 if a query attends to one key; the logarithm of the number of keys if it attends to all of them equally."],
  ["Received", "the sum of the weights that all queries give to a key."],
];

function helpSheet() {
  const part = ([title, keys]) => el("section", {}, el("h3", { text: title }), el("dl", {}, ...keys.flatMap(([key, text]) => [el("dt", {}, ...key.split("  ").map((k) => el("kbd", { text: k }))), el("dd", { text })])));
  const sheet = el("dialog", { class: "help", "aria-label": "Help" },
    el("form", { method: "dialog" }, el("h2", { text: "Reading the heads" }), el("button", { class: "icon", text: "×", "aria-label": "Close", autofocus: true })),
    el("dl", { class: "terms" }, ...TERMS.flatMap(([term, text]) => [el("dt", { text: term }), el("dd", { text })])),
    el("div", { class: "keys" }, ...HELP.map(part)));
  sheet.addEventListener("click", (event) => event.target === sheet && sheet.close());
  return sheet;
}
