// DOM elements from data. Text is always inserted as text, never as markup, so a token can never run as code.

function el(name, props = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return parent;
}

// The same for a bar of controls: the one that has the focus keeps it.
function refill(bar, ...children) {
  const controls = () => Array.from(bar.querySelectorAll("button, input, select"));
  const at = controls().indexOf(document.activeElement);
  fill(bar, ...children);
  controls()[at]?.focus();
}

// Buttons of which one is chosen, each with its name, its text and what it does.
const radios = (kind, label, chosen, choices, choose) => el("div", { class: `segments ${kind}`, role: "radiogroup", "aria-label": label }, ...choices.map(([name, text, title]) =>
  el("button", { role: "radio", "aria-checked": String(name === chosen), text, title, onclick: () => choose(name) })));

const soft = (text) => el("span", { class: "soft", text });
const icon = (text, label, onclick, title = label) => el("button", { class: "icon", text, "aria-label": label, title, onclick });

// A canvas with one pixel per screen pixel.
function sharpen(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// How many answers are awaited that will change what is shown; `App.resting` is for whoever takes pictures.
const awaited = { count: 0 };

function tracked(answer) {
  const done = () => awaited.count--;
  awaited.count++;
  answer.then(done, done);
  return answer;
}

// Draw before the next frame, once; on paper at once.
function nextFrame(picture) {
  if (picture.app.printing) return picture.draw();
  picture.frame ||= requestAnimationFrame(() => {
    picture.frame = 0;
    picture.draw();
  });
}

const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

function debounced(run, wait) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...args), wait);
  };
}
