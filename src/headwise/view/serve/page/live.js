// The live page: the user types or pastes a text or opens a file, and the server runs a model on it.

const STAGES = { waiting: "waiting", writing: "the model writes the text of its decoder", running: "running the model", measuring: "measuring heads", refining: "refining", finished: "", cancelled: "cancelled", failed: "failed" };

// Which heads are on, in words.
const headsText = (off) => (!off.length ? "all heads" : `without ${off.length > 8 ? plural(off.length, "head") : off.map((pair) => pair.join(".")).join(", ")}`);

const EXAMPLE = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the";
const TYPED = 4000; // characters up to which the page updates while you type
const STATES = { current: ["✓ Up to date", "The pictures are those of this text and model"], running: ["Updating…", ""], changed: ["Run", "Run the model on this text  Ctrl Enter"], empty: ["Run", "Type or paste a text first"] };
const PART_NAMES = { encoder: "Encoder", decoder: "Decoder", "cross-attention": "Cross-attention" };
const HARDEST = 8; // nats: the loss of a word in full color

class Live {
  constructor(root, stage) {
    Object.assign(this, { root, stage, connection: new Connection(), file: null, asked: null, id: null, turn: 0, app: null, side: null, part: null, parts: [], written: "", working: false, pending: false });
    this.connection.onlost = () => this.reconnect();
    this.connection.onlocked = () => this.locked();
    this.outcome = new OutcomePanel(this);
    this.silent = new SilentHeads(this);
    this.build();
    new ResizeObserver(() => this.app?.fit()).observe(root); // it takes room from the pictures below it
    this.start();
  }

  build() {
    this.last = kept();
    this.text = el("textarea", { class: "ask-text", rows: "2", "aria-label": "Text to analyze", placeholder: "Type or paste a text, or drop a file here", spellcheck: "false", maxlength: "4000000" });
    this.text.value = this.begun = this.last ? this.last.asked.text : EXAMPLE; // at once: later it would be written into what the user types
    this.target = el("textarea", { class: "ask-target", rows: "1", "aria-label": "Text of the decoder", spellcheck: "false", maxlength: "4000000", hidden: true });
    this.typed = debounced(() => this.typedEnough(), 300);
    this.text.addEventListener("input", () => this.bring(null));
    for (const field of [this.text, this.target]) {
      field.addEventListener("input", () => this.expect());
      field.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && (event.preventDefault(), this.state === "changed" || this.pending) && this.begin({ maps: true }));
    }
    this.text.addEventListener("dragover", (event) => event.preventDefault());
    this.text.addEventListener("drop", (event) => this.dropped(event));
    this.models = el("select", { "aria-label": "Model", onchange: () => this.otherModel() });
    this.partsBar = el("div", { class: "segments parts", role: "radiogroup", "aria-label": "Part of the model", hidden: true });
    this.picker = el("input", { type: "file", class: "picker", "aria-label": "Open a text file", onchange: () => this.picked(this.picker.files[0]) });
    this.named = el("span", { class: "soft file-name" });
    this.go = el("button", { type: "button", class: "act go", onclick: () => this.begin({ maps: true }) });
    this.stopper = el("button", { type: "button", class: "act stop", text: "Cancel", hidden: true, onclick: () => this.cancel() });
    this.progress = el("progress", { max: "1", value: "0", hidden: true, "aria-label": "Progress" });
    this.status = el("p", { class: "status soft", role: "status" });
    this.banner = el("div", { class: "banner", role: "alert", hidden: true });
    const opener = el("label", { class: "act opener" }, "Open a file", this.picker);
    this.writer = el("button", { type: "button", class: "act write", text: "Continue the text", title: "Let the model write the next 16 tokens", onclick: () => this.write() });
    this.byLoss = el("input", { type: "checkbox", onchange: () => this.colorWords() });
    this.lossCheck = el("label", { class: "check", title: `Color the words that the model did not expect: no color for a loss of 0, full color for ${HARDEST} nats` }, this.byLoss, "color words by their loss");
    this.lossLegend = el("span", { class: "soft loss-legend" });
    fill(this.root, this.banner,
      el("p", { class: "live-title" }, el("b", { text: "headwise" }), el("span", { class: "soft", text: " What does every attention head do with your text? Type, and the pictures update." }), this.partsBar, el("label", { class: "chooser" }, "Model", this.models)),
      el("form", { class: "ask", onsubmit: (event) => event.preventDefault() }, el("span", { class: "soft field-name", text: "The encoder reads" }), this.text, el("span", { class: "soft field-name", text: "The decoder reads" }), this.target, el("div", { class: "ask-line" }, this.go, this.stopper, this.writer, opener, this.named, this.lossCheck, this.lossLegend, this.progress, this.status)),
      el("div", { class: "results" }, this.outcome.root, this.silent.root));
    this.mark();
  }

  // What the fields ask for.
  get wanted() {
    return { file: this.file, text: this.file ? "" : this.text.value, target: this.target.value, model: this.models.value, part: this.part };
  }

  // Whether the pictures are those of the text, or will soon be, or the user must ask for them.
  get state() {
    if (!this.file && !this.text.value) return "empty";
    if (!this.limits || this.pending) return "running";
    if (this.working) return this.asksFor(this.asked) ? "running" : "changed";
    return this.asksFor(this.side?.asked) && !this.outdated ? "current" : "changed";
  }

  // Whether the pictures are without heads that are on again, or with some that were left out since.
  get outdated() {
    const off = this.side?.off || [];
    return off.length > 0 && String(off) !== String(this.silent.pairs);
  }

  // Whether the fields ask for the same as before.
  asksFor(before) {
    return Boolean(before) && Object.entries(this.wanted).every(([name, value]) => value === before[name]);
  }

  // The button says which of these it is.
  mark() {
    const { state } = this;
    const other = this.side && !this.asksFor(this.side.asked); // the loss and the next tokens are those of another text
    document.documentElement.classList.toggle("no-text", state === "empty" || (state === "changed" && other));
    const [text, title] = STATES[state];
    if (this.go.dataset.state === state) return;
    Object.assign(this.go, { textContent: text, title, disabled: state !== "changed" });
    this.go.dataset.state = state;
  }

  // The user types: a short text is run after a pause.
  expect() {
    this.pending = this.text.value.length > 0 && this.text.value.length + this.target.value.length <= TYPED && !this.file;
    this.typed();
    this.mark();
    if (!this.text.value) this.say("Type or paste a text. The pictures are those of the text before.");
  }

  typedEnough() {
    if (!this.pending) return;
    this.pending = false;
    if (this.state === "changed") this.begin({ maps: true });
    else if (this.state === "current") this.tell(this.told);
    this.mark();
  }

  otherModel() {
    [this.part, this.target.value] = [null, ""];
    this.silent.restore([]); // heads of the model before
    if (this.asked) this.begin({ maps: true });
    this.mark();
  }

  choosePart(part) {
    this.part = part;
    this.silent.restore([]);
    this.showParts();
    this.begin({ maps: true });
  }

  // What an encoder–decoder model has besides: its parts, and the text of its decoder.
  showParts() {
    const { parts, part } = this;
    this.partsBar.hidden = this.target.hidden = !parts.length;
    this.root.classList.toggle("two-texts", parts.length > 0);
    this.target.placeholder = this.written ? `What the model writes: ${this.written}` : "What the model writes, which is nothing here. Type a text of your own.";
    fill(this.partsBar, ...parts.map((name) => el("button", { type: "button", role: "radio", "aria-checked": String(name === part), text: PART_NAMES[name], onclick: () => this.choosePart(name) })));
  }

  // Only a model that predicts tokens has a loss, and writes; the encoder's words have none.
  showAbilities({ outcome, part }) {
    const predicts = outcome.next.length > 0;
    this.writer.hidden = !predicts;
    this.lossCheck.hidden = !predicts || part === "encoder";
    this.writer.textContent = part ? "Continue the decoder’s text" : "Continue the text";
    this.silent.predicts = predicts;
  }

  append(text) {
    if (this.parts.length) this.target.value = (this.target.value || this.written) + text;
    else {
      this.text.value = (this.file ? "" : this.text.value) + text;
      this.bring(null);
    }
    this.begin({ maps: true });
  }

  async write() {
    if (!this.text.value) return this.say("The text is empty: type or paste one.", true);
    this.say("the model writes");
    try {
      const { text } = await this.connection.post("/api/continuation", { text: this.text.value, model: this.models.value, target: this.parts.length ? this.target.value || this.written : "" });
      if (text) this.append(text);
      else this.say("The model ends the text here.");
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
      this.say("Each head was switched off in turn: see the bars.");
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
    const losses = this.byLoss.checked && id && !this.lossCheck.hidden ? await this.connection.json(`/api/runs/${id}/losses`).catch(() => []) : [];
    this.lossLegend.textContent = losses.length ? `no color: 0 nats, full color: ${HARDEST} nats or more, ${headsText(this.side.off)}; point at a word for its loss` : "";
    const reading = this.app?.reading;
    if (!reading) return;
    reading.text.classList.toggle("by-number", losses.length > 0);
    reading.words.forEach((word, i) => word.style.setProperty("--number", `${Math.round(100 * clamp((losses[i] ?? 0) / HARDEST, 0, 1))}%`));
    reading.numberOf = (at) => (!losses.length ? "" : losses[at] === null ? " · no loss: nothing comes before it" : ` · loss ${losses[at].toFixed(2)} nats`);
    reading.show(reading.at);
  }

  async start() {
    try {
      await this.offer();
      this.resume();
    } catch (error) {
      if (error instanceof Refused) this.end(error.message);
    }
    this.text.focus();
  }

  // The page begins with an example; after a reload with the last text, and its run if the server still has it.
  async resume() {
    const last = this.file || this.text.value !== this.begun ? null : this.last; // nothing is restored over what the user was quick to bring
    if (last) {
      this.bring(last.asked.file);
      [this.target.value, this.part] = [last.asked.target || "", last.asked.part || null];
    }
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
    this.mark();
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
    this.begin({ maps: true });
  }

  bring(file) {
    this.file = file;
    this.named.textContent = file ? file.name : "";
    this.mark();
  }

  // Runs.

  // The same text with other heads switched off: only the loss, which is quicker.
  retry() {
    if (this.asked && String(this.silent.pairs) !== this.off) this.begin({ maps: false }); // unless that is already running
  }

  // Start a run of the text in the field, or of the same text again.
  async begin({ maps, compare = false, same = compare }) {
    if (!this.limits) return undefined; // the models are not known yet: resume() begins when they are
    const turn = ++this.turn;
    const off = this.silent.pairs;
    this.off = String(off);
    this.pending = false;
    if (maps && !same) this.asked = this.wanted;
    if (!this.asked.file && !this.asked.text) return this.end("The text is empty: type or paste one.");
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
    const { file, text, model, target, part } = this.asked;
    if (!file) return this.connection.post("/api/runs", { text, model, off, maps, sweep, target, part });
    const query = new URLSearchParams({ model, off: JSON.stringify(off), maps: maps ? "1" : "0", sweep: sweep ? "1" : "0", target, ...(part ? { part } : {}) });
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
    source.onrows = () => this.tell(this.told);
    const before = compare ? this.before || this.side : null;
    for (const side of [this.before, this.side]) if (side && side !== before) side.source.close();
    const name = headsText(run.off);
    document.title = manifest.title;
    if (!this.part) this.part = this.asked.part = run.part || null; // the server has chosen
    [this.before, this.side] = [before, { manifest, source, name, off: run.off, asked: this.asked }];
    [this.parts, this.written] = [run.parts, run.written || ""];
    this.showParts();
    this.showAbilities(run);
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

  // What is shown stays, with the heads that it is without.
  cancel() {
    this.turn++;
    this.drop();
    this.silent.restore(this.outcome.off || []);
    this.off = String(this.silent.pairs);
    if (this.side) this.asked = this.side.asked;
    this.end(this.asksFor(this.side?.asked) ? "Cancelled." : "Cancelled. The pictures are those of the text before.");
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
    this.working = is;
    this.mark();
    if (is) this.progress.removeAttribute("value");
  }

  tell(run) {
    if (!run) return;
    this.told = run;
    if (this.state === "empty") return;
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
