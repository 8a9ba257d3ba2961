// The connection to the server: it sends the token with every request, and turns failures into messages.

const TOKEN = "headwise: token"; // kept by the browser for this tab only

class Lost extends Error {} // the server does not respond
class Locked extends Error {} // the server does not accept our token: it was restarted
class Refused extends Error {
  constructor(status, words, after) {
    super(words);
    [this.status, this.after] = [status, after];
  }
}

class Connection {
  constructor() {
    this.token = this.brought() || held();
    this.onlost = () => {};
    this.onlocked = () => {};
  }

  // The token of the address, which it is removed from.
  brought() {
    const found = new URLSearchParams(location.hash.slice(1));
    const token = found.get("token");
    if (token === null) return null;
    found.delete("token");
    history.replaceState(history.state, "", location.pathname + (found.size ? `#${found}` : ""));
    hold(token);
    return token;
  }

  async ask(path, options = {}) {
    const headers = { ...options.headers, Authorization: `Bearer ${this.token}` };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.onlost();
      throw new Lost("The server is not responding.");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      this.onlocked();
      throw new Locked("The server was restarted and has a new token.");
    }
    throw new Refused(answer.status, await wordsOf(answer), Number(answer.headers.get("Retry-After")) || 0);
  }

  async json(path, options) {
    return (await this.ask(path, options)).json();
  }

  post(path, body) {
    return this.json(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  // Send a request, and repeat it while the server is busy.
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

  // Takes an address with a token, or the token itself.
  async unlock(given) {
    const match = /[#?&]token=([\w-]+)/.exec(given);
    this.token = match ? match[1] : given.trim();
    await this.ask("/api/models");
    hold(this.token);
  }
}

function held() {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return null; // there is no storage: after a reload the page asks for the address
  }
}

function hold(token) {
  try {
    sessionStorage.setItem(TOKEN, token);
  } catch {
    // As above.
  }
}

async function wordsOf(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `The server returned status ${answer.status}.`;
  }
}

const rest = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
