// Tokens and numbers as readers see them; the same words as in the terminal.

const UNSEEN = /[\p{C}\p{Zl}\p{Zp}\p{Zs}]/u;

function visibleLetter(letter) {
  if (letter === " ") return "␣";
  if (letter === "\n") return "⏎";
  if (!UNSEEN.test(letter)) return letter;
  return "\\x" + letter.codePointAt(0).toString(16).padStart(2, "0");
}

// One word for labels and lists: outer spaces left out, line ends and control characters shown as such.
function wordOf(token, most = 14) {
  const trimmed = token.replace(/^ +| +$/g, "") || token;
  const letters = Array.from(trimmed, visibleLetter);
  const text = letters.join("");
  return Array.from(text).length <= most ? text : Array.from(text).slice(0, most - 1).join("") + "…";
}

// For running text: spaces stay spaces.
const readable = (token) => Array.from(token, (x) => (x === " " ? x : visibleLetter(x))).join("");

function weightText(weight) {
  if (weight === 0) return "0";
  const size = Math.abs(weight);
  return size >= 0.0005 ? weight.toFixed(3) : weight.toExponential(1);
}

const signed = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + weightText(Math.abs(x));
const timesText = (x) => (x >= 100 ? count(Math.round(x)) : x >= 10 ? x.toFixed(1) : x >= 0.01 || x === 0 ? x.toFixed(2) : x.toExponential(1)) + "×";
const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const statName = (key) => key.replace("_", " ");
