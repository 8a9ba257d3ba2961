// What can be done, on one sheet.

const HELP = [
  ["Everywhere", [["?", "this sheet"], ["Esc", "back to all heads, or let a word go"], ["1  2  3", "atlas, table, map"], ["/", "find a word"], ["d", "light or dark"], ["[  ]", "previous head, next head"]]],
  ["Map", [["arrows", "move the cursor, with Shift by ten"], ["+  −", "zoom at the cursor; wheel and pinch too"], ["0", "the whole map"], ["Enter", "lock the word that looks"], ["m  r  p  u", "mass, without first, peak, × uniform"], ["x", "flip through a comparison"]]],
  ["Atlas", [["arrows", "move among heads"], ["Enter", "open a head"]]],
  ["Text", [["arrows", "move among words"], ["Enter", "lock a word"]]],
];

const TERMS = [
  ["Weight", "how much of its look a word gives to another. The weights of a row sum to 1. It shows where a head looks, and is no proof of what the model uses."],
  ["Mass", "what a pixel shows that stands for many weights: summed over its keys, averaged over its queries, so that a row of pixels sums to 1 at every zoom and thin stripes never fade."],
  ["First token", "many heads rest on it when they have nothing to do. Without first takes it out and scales the rest up to 1."],
  ["× Uniform", "the weight times the number of keys its query sees: 1 is even attention."],
  ["Entropy", "0 looks at one key; the logarithm of the number of keys looks at all alike."],
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
