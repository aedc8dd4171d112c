// The connection to the controller: an event stream while it works, polling while it does not.
//
// Calls `onPool(view, serverTime)` for every view, and `onLink(status)` whenever one of these changes:
//   mode        "connecting" | "live" | "polling" | "down"
//   since       Date of the last answer, while down
//   stoppedAt   Unix seconds of the last tick, where the controller answers but its loop has stopped

const POLL_MS = 2000;
const ASK_MS = 4000;
const LATE_TICKS = 3;

export class Link {
  constructor({ onPool, onPools, onLink }) {
    Object.assign(this, { onPool, onPools, onLink });
    this.status = { mode: "connecting", since: null, stoppedAt: null };
    this.answeredAt = new Date();
    this.heardAt = 0;
    this.interval = 1;
  }

  start() {
    this.open();
    this.ask();
    setInterval(() => this.watch(), POLL_MS);
    addEventListener("online", () => this.ask());
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  open() {
    this.source?.close();
    this.source = new EventSource("/v1/events");
    this.source.addEventListener("pool", (event) => this.hear(JSON.parse(event.data)));
    this.source.addEventListener("error", () => this.ask());
  }

  hear(view) {
    this.interval = view.interval_s;
    this.heardAt = Date.now();
    this.answeredAt = new Date();
    this.set({ mode: "live", since: null, stoppedAt: null });
    this.onPool(view, view.time);
  }

  // Asks when the stream is broken or silent; opens it again when the browser has given up on it.
  watch() {
    const late = Date.now() - this.heardAt > LATE_TICKS * this.interval * 1000;
    if (late || this.source.readyState !== EventSource.OPEN) this.ask();
    if (this.source.readyState === EventSource.CLOSED) this.open();
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    try {
      const answer = await fetch("/v1/pools", { signal: AbortSignal.timeout(ASK_MS), cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const body = await answer.json();
      this.answeredAt = new Date();
      const late = body.pools.filter((p) => body.time - p.time > LATE_TICKS * p.interval_s);
      const stoppedAt = late.length ? Math.min(...late.map((p) => p.time)) : null;
      const streaming = this.source.readyState === EventSource.OPEN;
      this.set({ mode: streaming ? "live" : "polling", since: null, stoppedAt });
      this.onPools(body.pools, body.time);
    } catch {
      this.set({ mode: "down", since: this.answeredAt, stoppedAt: null });
    } finally {
      this.asking = false;
    }
  }

  set(status) {
    const { mode, since, stoppedAt } = this.status;
    if (mode === status.mode && since === status.since && stoppedAt === status.stoppedAt) return;
    this.status = status;
    this.onLink(status);
  }
}
