// What happened to a pool, newest first: alerts that began and ended, policies that were accepted and refused.

import { h, data, list, text } from "./dom.js";
import { clock } from "./format.js";

const SHOWN = 30;

async function rows(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

const fromAlert = (a) => ({
  key: `alert ${a.time} ${a.traffic_class} ${a.name}`,
  time: a.time,
  tone: a.firing ? "bad" : "good",
  title: `${a.firing ? "Alert" : "Alert over"}: ${a.name} (${a.traffic_class}).`,
  text: a.detail,
});

const fromRevision = (r) => ({
  key: `revision ${r.revision}`,
  time: r.time,
  tone: r.accepted ? "good" : "warn",
  title: r.accepted ? `Policy revision ${r.revision} took effect.` : `Policy edit refused (revision ${r.revision}).`,
  text: r.accepted ? `From ${r.source}.` : r.error,
});

// Fetches and shows the events of `pool`; throws when the history cannot be read.
export async function showEvents(container, none, pool) {
  const base = `/v1/pools/${encodeURIComponent(pool)}`;
  const [alerts, revisions] = await Promise.all([rows(`${base}/alerts?limit=${SHOWN}`), rows(`${base}/policy/revisions?limit=${SHOWN}`)]);
  const events = [...alerts.map(fromAlert), ...revisions.map(fromRevision)].sort((a, b) => b.time - a.time).slice(0, SHOWN);
  none.hidden = events.length > 0;
  list(container, events, (e) => e.key, () => h("li", {}, h("time"), h("p", {}, h("b"), " ", h("span"))), (node, e) => {
    const [time, words] = node.children;
    text(time, clock(e.time));
    time.setAttribute("datetime", new Date(e.time * 1000).toISOString());
    data(words, "tone", e.tone);
    text(words.children[0], e.title);
    text(words.children[1], e.text ?? "");
  });
}
