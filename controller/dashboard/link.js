// The connection to the controller: an event stream while it works, polling while it does not.
//
// Calls `onPool(view, serverTime)` for every view, and `onLink(status)` whenever one of these changes:
//   mode        "connecting" | "live" | "polling" | "locked" (reading needs a token) | "down"
//   since       Date of the last answer, while down
//   stoppedAt   Unix seconds of the last tick, where the controller answers but its loop has stopped

import { Stream, ask } from "./api.js";

const POLL_MS = 2000;
const ASK_MS = 4000;
const LATE_TICKS = 3;

export class Link {
  constructor({ onPool, onPools, onLink }) {
    Object.assign(this, { onPool, onPools, onLink });
    this.status = { mode: "connecting", since: null, stoppedAt: null };
    this.answeredAt = new Date();
    this.ticks = new Map(); // pool -> {time, at, interval}: its last tick, and when this page heard of it
    this.stopped = new Map(); // pool -> time of its last tick, while that is too long ago
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
    const source = (this.source = new Stream("/v1/events", {
      onEvent: (name, data) => name === "pool" && this.source === source && this.hear(JSON.parse(data)),
      onEnd: () => this.source === source && this.ask(),
    }));
  }

  // Begin again, as when a token has been entered.
  restart() {
    this.open();
    this.ask();
  }

  hear(view) {
    this.answeredAt = new Date();
    if (this.note(view)) this.stopped.delete(view.pool);
    this.set("live");
    this.onPool(view, view.time);
  }

  // Remembers a view; true when it proves a tick since the one before. The first one may be old.
  note({ pool, time, interval_s: interval }) {
    const before = this.ticks.get(pool);
    if (before && time <= before.time) return false;
    this.ticks.set(pool, { time, at: Date.now(), interval });
    return before !== undefined;
  }

  // Asks when the stream is broken or a pool is silent, and opens the stream again.
  watch() {
    const silent = [...this.ticks.values()].some(({ at, interval }) => Date.now() - at > LATE_TICKS * interval * 1000);
    if (silent || !this.source.open) this.ask();
    if (this.source.over && this.status.mode !== "locked") this.open();
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    try {
      const body = await ask("/v1/pools", AbortSignal.timeout(ASK_MS));
      this.answeredAt = new Date();
      const late = body.pools.filter((p) => body.time - p.time > LATE_TICKS * p.interval_s);
      this.stopped = new Map(late.map((p) => [p.pool, p.time]));
      this.ticks = new Map([...this.ticks].filter(([pool]) => body.pools.some((p) => p.pool === pool)));
      body.pools.forEach((p) => this.note(p));
      this.set(this.source.open ? "live" : "polling");
      this.onPools(body.pools, body.time);
    } catch (error) {
      this.set(error.status === 401 ? "locked" : "down");
    } finally {
      this.asking = false;
    }
  }

  set(mode) {
    const before = this.status;
    const since = mode === "down" ? this.answeredAt : null;
    const stoppedAt = mode !== "down" && this.stopped.size ? Math.min(...this.stopped.values()) : null;
    if (mode === before.mode && since === before.since && stoppedAt === before.stoppedAt) return;
    this.status = { mode, since, stoppedAt };
    this.onLink(this.status);
  }
}
