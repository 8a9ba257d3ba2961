// The state of the page, also in the URL, so that a view can be shared as a link.

const DEFAULTS = { view: "atlas", head: "", with: "", show: "difference", what: "weights", kind: "mass", at: "", word: "", sort: "place", color: "none", without: "1", rows: "1", contrast: "2" };

class Store {
  // own: defaults that depend on what is shown.
  constructor(own = {}) {
    this.listeners = [];
    this.defaults = { ...DEFAULTS, ...own };
    this.values = { ...this.defaults, ...this.read() };
    this.onhash = () => this.set({ ...this.defaults, ...this.read() }, true);
    addEventListener("hashchange", this.onhash);
    this.write = debounced(() => this.writeNow(), 150);
  }

  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const known = Object.keys(DEFAULTS).filter((key) => given.has(key));
    const found = Object.fromEntries(known.map((key) => [key, given.get(key)]));
    return found.kind === "rest" ? { ...found, kind: "mass", without: "1" } : found; // an address of an earlier version
  }

  writeNow() {
    const changed = Object.entries(this.values).filter(([key, value]) => value !== this.defaults[key]);
    const text = changed.map(([key, value]) => `${key}=${encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%3A", ":")}`).join("&");
    try {
      history.replaceState(history.state, "", text ? `#${text}` : location.pathname + location.search);
    } catch {
      // A page in a notebook frame cannot change its URL; its state is lost when it is closed.
    }
  }

  get(key) {
    return this.values[key];
  }

  set(patch, fromAddress = false) {
    const changed = Object.keys(patch).filter((key) => String(patch[key]) !== this.values[key]);
    if (!changed.length) return;
    for (const key of changed) this.values[key] = String(patch[key]);
    if (!fromAddress) this.write();
    for (const listener of this.listeners) listener(new Set(changed), fromAddress);
  }

  listen(run) {
    this.listeners.push(run);
  }

  close() {
    removeEventListener("hashchange", this.onhash);
    this.listeners = [];
  }
}
