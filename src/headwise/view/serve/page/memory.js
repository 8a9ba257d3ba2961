// What was looked at last, kept by the browser for this tab alone: reloading the page brings it back.

const LAST_LOOK = "headwise: the last look";

function keep({ file, text, model }, id, off) {
  const held = file ? new TextDecoder("utf-8", { ignoreBOM: true }).decode(file.bytes) : text;
  try {
    sessionStorage.removeItem(LAST_LOOK);
    sessionStorage.setItem(LAST_LOOK, JSON.stringify({ file: file?.name ?? null, text: held, model, id, off }));
  } catch {
    // It is longer than browsers keep, or this one keeps nothing: a reload begins with an empty field.
  }
}

function kept() {
  try {
    const { file, text, model, id, off } = JSON.parse(sessionStorage.getItem(LAST_LOOK));
    const brought = file === null ? null : { name: file, bytes: new TextEncoder().encode(text).buffer };
    return { asked: { file: brought, text: brought ? "" : text, model }, id, off };
  } catch {
    return null;
  }
}
