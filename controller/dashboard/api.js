// Questions and orders to the controller. A token, where one is needed, is kept in this tab's session storage at most.

const KEY = "lenity-token";
let session = null; // a token that is not to be kept beyond this page

export const token = {
  get: () => session ?? sessionStorage.getItem(KEY),
  set(value, keep) {
    session = keep ? null : value;
    if (keep) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  clear() {
    session = null;
    sessionStorage.removeItem(KEY);
  },
};

// An answer that is not the one asked for; `message` is the controller's reason in words.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = (more = {}) => (token.get() ? { ...more, Authorization: `Bearer ${token.get()}` } : more);

async function answer(response) {
  if (response.ok) return response.json();
  let detail = `status ${response.status}`;
  try {
    const body = await response.json();
    detail = Array.isArray(body.detail) ? body.detail.map((f) => `${f.loc.at(-1)}: ${f.msg}`).join("; ") : body.detail;
  } catch {
    // not the controller's own words
  }
  throw new Refused(response.status, detail);
}

export const ask = async (path, signal) => answer(await fetch(path, { headers: headers(), signal, cache: "no-store" }));

export const order = async (path, body) =>
  answer(await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) }));

// The event stream, read by fetch, since an EventSource cannot carry a token. Calls `onEvent(name, data)`, and `onEnd`
// once when it is over; `open` says whether it is.
export class Stream {
  constructor(path, { onEvent, onEnd }) {
    this.open = false;
    this.over = false;
    this.abort = new AbortController();
    this.run(path, onEvent).catch(() => null).finally(() => {
      this.open = false;
      this.over = true;
      onEnd();
    });
  }

  async run(path, onEvent) {
    const response = await fetch(path, { headers: headers({ Accept: "text/event-stream" }), signal: this.abort.signal, cache: "no-store" });
    if (!response.ok) return;
    this.open = true;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/);
        const read = (name) => lines.filter((l) => l.startsWith(`${name}:`)).map((l) => l.slice(name.length + 1).trimStart()).join("\n");
        if (read("data")) onEvent(read("event") || "message", read("data"));
      }
    }
  }

  close() {
    this.abort.abort();
  }
}
