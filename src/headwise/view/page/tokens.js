// How tokens and numbers are written. The rules for tokens come from Python (view/tokens.py), in SHARED.

const { signs: SIGNS, hidden, joiners: JOINERS, parts: PARTS } = SHARED.tokens;
const JOINED = /^(\p{So}|\p{Sk}|\p{Lo}|\p{Mn})$/u;
const HIDDEN = new RegExp(`[${hidden.map((category) => `\\p{${category}}`).join("")}]`, "u");

function visible(letter) {
  if (letter in SIGNS) return SIGNS[letter];
  return HIDDEN.test(letter) ? "\\x" + letter.codePointAt(0).toString(16).padStart(2, "0") : letter;
}

const joins = (letters, i) => JOINERS.includes(letters[i]) && JOINED.test(letters[i - 1] ?? "") && JOINED.test(letters[i + 1] ?? "");

// All characters visible, except joiners between what they join.
const spelled = (text, show = visible) => {
  const letters = Array.from(text);
  return letters.map((letter, i) => (joins(letters, i) ? letter : show(letter))).join("");
};

// Tokens as labels: those that make up one character are numbered.
function labelsOf(tokens, starts) {
  if (!starts) return tokens;
  const several = new Set(starts.filter((start, i) => start !== i));
  return tokens.map((token, i) => (several.has(starts[i]) ? token + Array.from(String(1 + i - starts[i]), (digit) => PARTS[digit]).join("") : token));
}

// One word for labels and lists, without the spaces around it.
function wordOf(token, most = 14) {
  const trimmed = token.replace(/^ +| +$/g, "") || token;
  const text = spelled(trimmed) || SIGNS[""];
  return Array.from(text).length <= most ? text : Array.from(text).slice(0, most - 1).join("") + "…";
}

// For running text, where spaces stay spaces.
const readable = (token) => spelled(token, (letter) => (letter === " " ? letter : visible(letter))) || SIGNS[""];

// As many digits as a number has that may be wrong by `error`, and at most three.
const digitsOf = (error, most = 3) => (error > 0 ? clamp(Math.floor(-Math.log10(1.8 * error)), 0, most) : most);

// A number as text, with a real minus sign, and none before zero.
const minusSign = (text) => (Number(text) === 0 ? text.replace("-", "") : text.replaceAll("-", "−"));

// A bound is never rounded down.
const ceiling = (x, digits) => (Math.ceil(x * 10 ** digits - 1e-6) / 10 ** digits).toFixed(digits);

// A weight is never exactly 0: a softmax gives none.
function weightText(weight, error = 0) {
  const digits = digitsOf(error);
  if (Math.abs(weight) >= 0.5 * 10 ** -digits) return minusSign(weight.toFixed(digits));
  return `< ${(10 ** -digits).toFixed(digits)}`;
}

function signed(x, error = 0) {
  const size = weightText(Math.abs(x), error);
  return size.startsWith("<") ? "≈ 0" : (x > 0 ? "+" : x < 0 ? "−" : "") + size;
}

// Numbers of a picture say nothing of a single token.
const groupText = (from, span, T) => `tokens ${count(from)}–${count(Math.min(T, from + span) - 1)}`;
const averageText = (span, at, T) => `averages over ${groupText(at - (at % span), span, T)}; this file has no numbers of single tokens here`;
const shareText = (x, measure, error) => (measure === "contribution" ? signed(x, error) : weightText(x, error));

// A multiple, with no more digits than are known.
function timesText(x, error = 0) {
  const unit = error > 0 ? 10 ** Math.ceil(Math.log10(1.8 * error)) : 0; // of the last digit
  if (x < unit / 2) return `< ${Number(unit.toPrecision(1))}×`;
  if (unit >= 1) return `${count(unit * Math.round(x / unit))}×`;
  if (!unit && x > 0 && x < 0.01) return `${minusSign(x.toExponential(1))}×`;
  const digits = x >= 100 ? 0 : x >= 10 ? 1 : 2;
  return `${count(Number(x.toFixed(unit ? Math.min(digits, Math.round(-Math.log10(unit))) : digits)))}×`;
}

const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const statName = (key) => (key === "one_to_one" ? "one-to-one" : key.replaceAll("_", " "));
