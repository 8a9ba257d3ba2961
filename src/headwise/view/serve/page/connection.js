// Talking to the server: every request carries what shows that it is this page's own, and says in words what failed.

class Lost extends Error {} // the server does not answer
class Locked extends Error {} // it answers, and does not know this page: it was started anew
class Refused extends Error {
  constructor(status, words, after) {
    super(words);
    [this.status, this.after] = [status, after];
  }
}

class Connection {
  constructor() {
    this.token = null; // only where the cookie is of an earlier run
    this.onlost = () => {};
    this.onlocked = () => {};
  }

  async ask(path, options = {}) {
    const headers = { "X-Headwise": "1", ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.onlost();
      throw new Lost("The server does not answer.");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      this.onlocked();
      throw new Locked("The server was started anew and has another token.");
    }
    throw new Refused(answer.status, await wordsOf(answer), Number(answer.headers.get("Retry-After")) || 0);
  }

  async json(path, options) {
    return (await this.ask(path, options)).json();
  }

  post(path, body) {
    return this.json(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  // A question that may be asked again when the server is busy.
  async patiently(path, options) {
    for (let tries = 0; ; tries++) {
      try {
        return await this.ask(path, options);
      } catch (error) {
        if (!(error instanceof Refused) || error.status !== 429 || tries >= 8) throw error;
        await rest(250 * (error.after || 1));
      }
    }
  }

  // The token in an address that somebody pastes, or the token itself; a new cookie comes with it.
  async unlock(given) {
    const match = /[?&]token=([\w-]+)/.exec(given);
    this.token = match ? match[1] : given.trim();
    await this.ask(`/?token=${encodeURIComponent(this.token)}`);
    this.token = null;
  }
}

async function wordsOf(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `The server answers with status ${answer.status}.`;
  }
}

const rest = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
