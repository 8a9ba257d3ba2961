// The help sheet.

const HELP = [
  ["Everywhere", [["?", "this sheet"], ["Esc", "deselect the word, or go back to all heads"], ["1  2  3  4", "heads, text, map, table"], ["/", "find a word"], ["d", "light or dark theme"], ["[  ]", "previous head, next head"], ["w", "weights, what they carry, contributions"]]],
  ["Map", [["arrows", "move the cursor, with Shift by ten"], ["+  −", "zoom at the cursor; wheel and pinch too"], ["0", "the whole map"], ["Enter", "keep the word"], ["m  r  p  u", "all tokens, without first token, largest, × uniform"], ["x", "cycle through a comparison"]]],
  ["Heads", [["arrows", "move among heads"], ["Enter", "open a head"]]],
  ["Text", [["arrows", "move among words"], ["Enter", "keep a word"]]],
];

const TERMS = [
  ["Weight", "the share of its attention that a token (the query) gives to another (the key). The weights of a row sum to 1. They show where a head attends, not what the model uses."],
  ["Pictures", "every row is a token, every column a token that it may attend to. No ink means a weight of 0; more ink means more weight."],
  ["Scaled rows", "in the small pictures, each row is scaled to its largest value, so that patterns show."],
  ["Many weights in a pixel", "are summed over keys and averaged over queries, so that a row of pixels sums to 1 at every zoom."],
  ["First token", "many heads attend to it when they have nothing to do. “Without first token” leaves it out of all pictures and of the table, and scales the other weights of a row up to sum to 1. The lists of words and heads always give the weights themselves."],
  ["× uniform", "the weight times the number of tokens that may be attended to: 1 is uniform attention."],
  ["What weights carry", "a weight on a token that passes nothing on does nothing. “Weights × what they carry” multiplies each weight by the size of the value it reads, after the output projection."],
  ["Contribution", "the share of what a head writes at a token that comes from each attended token. The shares of a row sum to 1; a negative one pulls the other way."],
  ["Importance", "what removing a head adds to the loss. Below 0, the head does harm on this text."],
  ["Contrast", "how strongly small weights are inked."],
  ["Sink", `a head that puts ${100 * SHARED.sink} % or more on the first token, on average. “Sink + broad” is a sink whose other attention is broad.`],
  ["Second sink", "a head that keeps attending to one other token, whatever the query."],
  ["Induction", "attends to what followed an earlier copy of the token, where there is one."],
  ["Local", `attends within ${SHARED.near} tokens.`],
  ["Broad", "spreads its attention almost evenly over the whole text."],
  ["Mixed", "does none of these clearly."],
  ["Nats", "units of loss and entropy: natural logarithms. A loss of 0.69 nats is a probability of one half."],
  ["Entropy", "how evenly a query spreads its attention. Of heads (table, bars, files), from 0 for one key to 1 for all keys alike. Beside the map, in nats: from 0 to the logarithm of the number of keys."],
  ["Received", "the sum of the weights that all queries give to a key."],
];

function helpSheet() {
  const part = ([title, keys]) => el("section", {}, el("h3", { text: title }), el("dl", {}, ...keys.flatMap(([key, text]) => [el("dt", {}, ...key.split("  ").map((k) => el("kbd", { text: k }))), el("dd", { text })])));
  const sheet = el("dialog", { class: "help", "aria-label": "Help" },
    el("form", { method: "dialog" }, el("h2", { text: "Reading the heads" }), el("button", { class: "icon", text: "×", "aria-label": "Close" })),
    el("dl", { class: "terms" }, ...TERMS.flatMap(([term, text]) => [el("dt", { text: term }), el("dd", { text })])),
    el("div", { class: "keys" }, ...HELP.map(part)));
  sheet.addEventListener("click", (event) => event.target === sheet && sheet.close());
  return sheet;
}
