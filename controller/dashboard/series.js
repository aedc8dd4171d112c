// The series of one class: fetched once for the range, then continued tick by tick.

import { ask } from "./api.js";

const LIMIT = 5000;
const GAP_TICKS = 5;
const TICKS_UP_TO_S = 3600; // longer ranges are asked for as means, and all anew
const STEPS = 720;

export class Series {
  constructor() {
    this.clear(null);
  }

  // Forget everything and show `target` ({pool, cls, span}) from the next `update` on.
  clear(target) {
    this.target = target;
    this.times = [];
    this.columns = {};
    this.fetchedAt = -Infinity;
    this.missed = false;
    this.controller?.abort();
    this.controller = null;
  }

  // Fetch what is new up to `now`; returns true when something changed, throws when it cannot be read. Asked while it
  // still fetches it does nothing; `missed` says so to the caller that waits.
  async update(now, interval) {
    if (this.controller) this.missed = true;
    if (!this.target || this.controller) return false;
    this.missed = false;
    const { pool, cls, span } = this.target;
    const step = span > TICKS_UP_TO_S ? span / STEPS : null;
    if (step && now - this.fetchedAt < step / 2) return false;
    const since = step ? now - span : (this.times.at(-1) ?? now - span);
    const query = new URLSearchParams({ class: cls, since: String(Math.max(0, since)), limit: String(LIMIT) });
    if (step) query.set("step", String(step));
    const controller = (this.controller = new AbortController());
    try {
      const body = await ask(`/v1/pools/${encodeURIComponent(pool)}/series?${query}`, controller.signal);
      if (this.controller !== controller) return false;
      if (step) [this.times, this.columns, this.fetchedAt] = [[], {}, now];
      this.append(body.time, body.values, Math.max(10, GAP_TICKS * (step ?? interval)));
      this.trim(now - span);
      return true;
    } catch (error) {
      if (error.name === "AbortError") return false;
      throw error;
    } finally {
      if (this.controller === controller) this.controller = null;
    }
  }

  get busy() {
    return this.controller !== null;
  }

  append(times, values, gap) {
    for (const name of Object.keys(values)) this.columns[name] ??= this.times.map(() => null);
    times.forEach((t, i) => {
      const last = this.times.at(-1);
      if (last !== undefined && t - last > gap) this.push(last + gap / 2, () => null); // a hole in the record is a hole in the line
      this.push(t, (name) => values[name]?.[i] ?? null);
    });
  }

  push(time, read) {
    this.times.push(time);
    for (const [name, column] of Object.entries(this.columns)) column.push(read(name));
  }

  trim(oldest) {
    const drop = this.times.findIndex((t) => t >= oldest);
    const count = drop === -1 ? this.times.length : drop;
    this.times = this.times.slice(count);
    for (const name of Object.keys(this.columns)) this.columns[name] = this.columns[name].slice(count);
  }
}
