// The last run, kept by the browser for this tab only, and restored when the page is reloaded.

const LAST_RUN = "headwise: last run";

function keep({ file, text, model, target, part }, id, off) {
  const held = file ? new TextDecoder("utf-8", { ignoreBOM: true }).decode(file.bytes) : text;
  try {
    sessionStorage.removeItem(LAST_RUN);
    sessionStorage.setItem(LAST_RUN, JSON.stringify({ file: file?.name ?? null, text: held, model, target, part, id, off }));
  } catch {
    // The text is too long for the storage, or there is none: a reload starts with an empty field.
  }
}

function kept() {
  try {
    const { file, text, model, target, part, id, off } = JSON.parse(sessionStorage.getItem(LAST_RUN));
    const brought = file === null ? null : { name: file, bytes: new TextEncoder().encode(text).buffer };
    return { asked: { file: brought, text: brought ? "" : text, model, target, part }, id, off };
  } catch {
    return null;
  }
}
