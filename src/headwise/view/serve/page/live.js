// The live page: the user types or pastes a text or opens a file, and the server runs a model on it.

const STAGES = { waiting: "waiting", running: "running the model", measuring: "measuring heads", refining: "refining", finished: "", cancelled: "cancelled", failed: "failed" };

// Which heads are on, in words.
const headsText = (off) => (!off.length ? "all heads" : `without ${off.length > 8 ? plural(off.length, "head") : off.map((pair) => pair.join(".")).join(", ")}`);

const EXAMPLE = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the";
const TYPED = 4000; // characters up to which the page updates while you type
const HARDEST = 8; // nats: the loss of a word in full color

class Live {
  constructor(root, stage) {
    Object.assign(this, { root, stage, connection: new Connection(), file: null, asked: null, id: null, turn: 0, app: null, side: null });
    this.connection.onlost = () => this.reconnect();
    this.connection.onlocked = () => this.locked();
    this.outcome = new OutcomePanel(this);
    this.silent = new SilentHeads(this);
    this.build();
    new ResizeObserver(() => this.app?.atlas.fit()).observe(root); // it takes room from the pictures below it
    this.start();
  }

  build() {
    this.last = kept();
    this.text = el("textarea", { class: "ask-text", rows: "2", "aria-label": "Text to analyze", placeholder: "Type or paste a text, or drop a file here", spellcheck: "false", maxlength: "4000000" });
    this.text.value = this.begun = this.last ? this.last.asked.text : EXAMPLE; // at once: later it would be written into what the user types
    this.typed = debounced(() => this.text.value && this.text.value.length <= TYPED && this.text.value !== this.asked?.text && this.begin({ maps: true, typing: true }), 300);
    this.text.addEventListener("input", () => (this.bring(null), this.typed()));
    this.text.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.fresh());
    this.text.addEventListener("dragover", (event) => event.preventDefault());
    this.text.addEventListener("drop", (event) => this.dropped(event));
    this.models = el("select", { "aria-label": "Model", onchange: () => this.asked && this.fresh() });
    this.picker = el("input", { type: "file", class: "picker", "aria-label": "Open a text file", onchange: () => this.picked(this.picker.files[0]) });
    this.named = el("span", { class: "soft file-name" });
    this.go = el("button", { type: "button", class: "act go", text: "Run", title: "Ctrl Enter. Short texts run while you type.", onclick: () => this.fresh() });
    this.stopper = el("button", { type: "button", class: "act stop", text: "Cancel", hidden: true, onclick: () => this.cancel() });
    this.progress = el("progress", { max: "1", value: "0", hidden: true, "aria-label": "Progress" });
    this.status = el("p", { class: "status soft", role: "status" });
    this.banner = el("div", { class: "banner", role: "alert", hidden: true });
    const opener = el("label", { class: "act opener" }, "Open a file", this.picker);
    this.writer = el("button", { type: "button", class: "act write", text: "Continue the text", title: "Let the model write the next 16 tokens", onclick: () => this.write() });
    this.byLoss = el("input", { type: "checkbox", onchange: () => this.colorWords() });
    const losses = el("label", { class: "check", title: `Color the words that the model did not expect: no color for a loss of 0, full color for ${HARDEST} nats` }, this.byLoss, "color words by their loss");
    fill(this.root, this.banner,
      el("p", { class: "live-title" }, el("b", { text: "headwise" }), el("span", { class: "soft", text: " What does every attention head do with your text? Type, and the pictures update." }), el("label", { class: "chooser" }, "Model", this.models)),
      el("form", { class: "ask", onsubmit: (event) => event.preventDefault() }, this.text, el("div", { class: "ask-line" }, this.go, this.stopper, this.writer, opener, this.named, losses, this.progress, this.status)),
      el("div", { class: "results" }, this.outcome.root, this.silent.root));
  }

  append(token) {
    this.bring(null);
    this.text.value = (this.file ? "" : this.text.value) + token;
    this.begin({ maps: true, typing: true });
  }

  async write() {
    if (!this.text.value) return this.say("The text is empty: type or paste one.", true);
    this.say("the model writes");
    try {
      const { text } = await this.connection.post("/api/continuation", { text: this.text.value, model: this.models.value });
      this.append(text);
    } catch (error) {
      this.failed(error, this.turn);
    }
    return undefined;
  }

  // Remove every head in turn and show what that does to the loss.
  async sweep() {
    const turn = ++this.turn;
    this.drop();
    this.busy(true);
    try {
      const { id } = await this.post([], false, true);
      this.id = id;
      for (;;) {
        const run = await this.connection.json(`/api/runs/${id}`);
        if (turn !== this.turn) return;
        this.progress.value = run.done;
        this.say(`switching each head off in turn ${Math.round(100 * run.done)} %`);
        if (run.error) return this.end(run.error);
        if (run.effects.length) this.showEffects(run);
        if (["finished", "cancelled"].includes(run.stage)) break;
        await rest(120);
      }
      this.say("Bars: what removing the head adds to the loss, in nats per token. Orange: it hurts; blue: it helps.");
      this.busy(false);
    } catch (error) {
      this.failed(error, turn);
    }
  }

  showEffects({ effects, way }) {
    if (!this.app) return;
    const { manifest } = this.app.side;
    manifest.about.importance = `what removing the head adds to the loss, in nats per token (${way})`;
    for (const [l, h, effect] of effects) manifest.layers[l].heads[h].importance = effect;
    this.app.store.set({ view: "atlas", color: "importance" });
    this.app.show();
  }

  async colorWords() {
    const id = this.side?.source.id;
    const losses = this.byLoss.checked && id ? await this.connection.json(`/api/runs/${id}/losses`).catch(() => []) : [];
    this.app?.reading.colorBy(losses.length ? losses.map((loss) => (loss === null ? 0 : loss / HARDEST)) : null);
  }

  async start() {
    try {
      await this.offer();
      this.resume();
    } catch (error) {
      if (error instanceof Refused) this.say(error.message, true);
    }
    this.text.focus();
  }

  // The page begins with an example; after a reload with the last text, and its run if the server still has it.
  async resume() {
    const last = this.file || this.text.value !== this.begun ? null : this.last; // nothing is restored over what the user was quick to bring
    if (last) this.bring(last.asked.file);
    if (!last || !Array.from(this.models.options).some(({ value }) => value === last.asked.model)) return this.begin({ maps: true });
    [this.asked, this.id] = [last.asked, last.id];
    this.models.value = last.asked.model;
    this.silent.restore(last.off);
    const turn = ++this.turn;
    this.busy(true);
    try {
      await this.follow(last.id, turn, { compare: false });
    } catch (error) {
      this.failed(error, turn);
    }
    return undefined;
  }

  async offer() {
    const { models, limits } = await this.connection.json("/api/models");
    this.limits = limits;
    const chosen = this.models.value;
    fill(this.models, ...models.map(({ name }) => el("option", { value: name, text: name })));
    if (models.some(({ name }) => name === chosen)) this.models.value = chosen;
  }

  // Files.

  dropped(event) {
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    this.picked(file);
  }

  async picked(file) {
    if (!file) return;
    if (this.limits && file.size > this.limits.body) return this.say(`${file.name} has ${count(file.size)} bytes, and the limit is ${count(this.limits.body)}.`, true);
    this.bring({ name: file.name, bytes: await file.arrayBuffer() });
    this.text.value = "";
    this.picker.value = "";
    this.fresh();
  }

  bring(file) {
    this.file = file;
    this.named.textContent = file ? file.name : "";
  }

  // Runs.

  fresh() {
    this.silent.forget();
    return this.begin({ maps: true });
  }

  // The same text with other heads switched off: only the loss, which is quicker.
  retry() {
    if (this.asked && String(this.silent.pairs) !== this.off) this.begin({ maps: false }); // unless that is already running
  }

  // Start a run of the text in the field, or of the same text again.
  async begin({ maps, compare = false, same = compare, typing = false }) {
    if (!this.limits) return undefined; // the models are not known yet: resume() begins when they are
    const turn = ++this.turn;
    if (typing) this.silent.restore([]);
    const off = this.silent.pairs;
    this.off = String(off);
    if (maps && !same) this.asked = { file: this.file, text: this.text.value, model: this.models.value };
    if (!this.asked.file && !this.asked.text) return this.say("The text is empty: type or paste one.", true);
    this.drop();
    this.busy(true);
    this.say(maps ? "sending" : "running the model without them");
    try {
      const { id } = await this.post(off, maps);
      if (turn !== this.turn) return this.connection.ask(`/api/runs/${id}`, { method: "DELETE" });
      this.id = id;
      if (maps) keep(this.asked, id, off);
      await this.follow(id, turn, { compare });
      // The run whose maps are shown may have been refined in the meantime.
      if (!maps && this.side) await this.follow(this.side.source.id, turn, { compare: Boolean(this.before), version: this.version, told: false });
    } catch (error) {
      this.failed(error, turn);
    }
    return undefined;
  }

  post(off, maps, sweep = false) {
    const { file, text, model } = this.asked;
    if (!file) return this.connection.post("/api/runs", { text, model, off, maps, sweep });
    const query = new URLSearchParams({ model, off: JSON.stringify(off), maps: maps ? "1" : "0", sweep: sweep ? "1" : "0" });
    return this.connection.json(`/api/runs?${query}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file.bytes });
  }

  async follow(id, turn, { compare, version = 0, told = true }) {
    while (turn === this.turn) {
      const run = await this.connection.json(`/api/runs/${id}`);
      if (turn !== this.turn) return;
      this.tell(run);
      if (run.error) return this.end(run.error);
      if (run.version > version) {
        await this.see(run, turn, compare);
        this.version = version = run.version;
      }
      if (told && run.outcome) this.outcome.show(run);
      if (run.ready) this.busy(false);
      if (["finished", "cancelled"].includes(run.stage)) return this.busy(false);
      await rest(run.stage === "refining" ? 800 : 120);
    }
  }

  async see(run, turn, compare) {
    const { manifest, sections } = await this.connection.json(`/api/runs/${run.id}/manifest`);
    if (turn !== this.turn) return;
    const source = new LiveSource(manifest, new Sections(sections), this.connection, run.id);
    source.onrefined = (place) => this.redraw(place);
    source.onrows = () => this.tell(this.last);
    const before = compare ? this.before || this.side : null;
    for (const side of [this.before, this.side]) if (side && side !== before) side.source.close();
    const name = headsText(run.off);
    document.title = manifest.title;
    [this.before, this.side] = [before, { manifest, source, name, off: run.off }];
    this.app = show(this.stage, manifest, source, before);
    this.app.store.listen((changed) => changed.has("head") && this.silent.show());
    this.silent.show();
    this.colorWords();
  }

  // A tile that has become exact replaces the one on the screen.
  redraw({ level, row, col }) {
    for (const map of this.app.stage.shown) {
      const tile = map.tiles?.known.get(`${level}/${row}/${col}`);
      if (tile) map.tiles.load(tile, level, row, col);
    }
  }

  cancel() {
    this.turn++;
    this.drop();
    this.end("Cancelled.");
  }

  // Cancel the current run, unless its maps are shown.
  drop() {
    const id = this.id;
    this.id = null;
    if (id && id !== this.side?.source.id && id !== this.before?.source.id) this.connection.ask(`/api/runs/${id}`, { method: "DELETE" }).catch(() => {});
  }

  failed(error, turn) {
    if (turn !== this.turn || error instanceof Lost || error instanceof Locked) return undefined;
    if (error.status === 404 && this.id) return this.begin({ maps: true }); // the server has dropped it or was restarted
    return this.end(error.message);
  }

  end(words) {
    this.busy(false);
    this.say(words, true);
  }

  // Messages.

  busy(is) {
    this.progress.hidden = !is;
    this.stopper.hidden = !is;
    if (is) this.progress.removeAttribute("value");
  }

  tell(run) {
    if (!run) return;
    this.last = run;
    this.progress.value = run.done;
    const [rows, of] = this.side?.source.rows || run.rows;
    const part = rows && rows < of ? `${count(rows)} of ${count(of)} rows` : "";
    const stage = STAGES[run.stage];
    const share = run.done > 0 && run.done < 1 ? ` ${Math.round(100 * run.done)} %` : "";
    this.say([part, stage && stage + share, run.note].filter(Boolean).join(" · "));
  }

  say(words, wrong = false) {
    this.status.textContent = words;
    this.status.classList.toggle("wrong", wrong);
  }

  // When the server restarts, the text stays here.

  async reconnect() {
    if (this.trying) return;
    this.trying = true;
    this.turn++;
    this.busy(false);
    this.warn("The server is not responding. Your text is kept here, and this page will keep trying.");
    for (let wait = 400; ; wait = Math.min(4000, 1.5 * wait)) {
      await rest(wait);
      try {
        await this.offer();
        break;
      } catch (error) {
        if (error instanceof Locked) break;
      }
    }
    this.trying = false;
    if (!this.banner.classList.contains("locked")) this.returned();
  }

  returned() {
    this.banner.hidden = true;
    this.banner.classList.remove("locked");
    this.say("The server is back.");
    if (this.asked) this.begin({ maps: true });
  }

  locked() {
    if (this.banner.classList.contains("locked")) return;
    this.turn++;
    this.busy(false);
    const address = el("input", { type: "text", class: "find address", "aria-label": "New address", placeholder: "http://127.0.0.1:8765/#token=…", autocomplete: "off" });
    const form = el("form", { onsubmit: (event) => { event.preventDefault(); this.unlock(address.value); } }, address, el("button", { class: "act", text: "Continue" }));
    this.warn(this.connection.token ? "The server was restarted and has a new token. Your text is kept here: to continue, paste the address that the server printed." : "This page needs the token of the server: paste the address that the server printed.", form);
    this.banner.classList.add("locked");
  }

  async unlock(address) {
    this.banner.classList.remove("locked");
    try {
      await this.connection.unlock(address);
      await this.offer();
    } catch (error) {
      return undefined;
    }
    return this.returned();
  }

  warn(words, ...more) {
    fill(this.banner, el("p", { text: words }), ...more);
    this.banner.hidden = false;
  }
}

window.headwiseLive = new Live(document.getElementById("live"), document.getElementById("headwise"));
