// What happened to a pool, newest first, each in one sentence: decisions, orders, alerts, and edits of the policy.

import { ask } from "./api.js";
import { data, h, list, text } from "./dom.js";
import { stamp, two } from "./format.js";

const SHOWN = 40;

// What a decision's reason means, and how it is coloured.
const REASONS = {
  steady: ["Steady", "good"],
  certified: ["Certified without labels", "info"],
  few_labels: ["Few labels yet", "info"],
  step_up: ["One step wider", "good"],
  waiting_for_labels: ["Waiting for labels", "info"],
  unproven: ["Waiting for the last step's labels", "info"],
  pull_back: ["Pulled back", "warn"],
  labels_missing: ["Labels are missing", "warn"],
  quality_alarm: ["Quality fell: cut", "warn"],
  floor: ["Below the floor: lossless", "bad"],
  fast_burn: ["Fast burn: lossless", "bad"],
  exhausted: ["Budget exhausted: lossless", "bad"],
  learning: ["Learning: lossless", "idle"],
  no_traffic: ["No traffic", "idle"],
  disabled: ["Leniency off", "idle"],
  frozen: ["Frozen", "warn"],
  forced_lossless: ["Forced lossless", "warn"],
};

const ORDERS = {
  freeze: "ordered a freeze",
  lossless: "ordered lossless decoding",
  resume: "ordered to resume",
  reset_budget: "reset the budget",
  adjust_budget: "adjusted the budget",
};

export const reasonTitle = (reason) => (REASONS[reason] ?? [reason.replaceAll("_", " "), "idle"])[0];

const fromDecision = (d) => ({
  key: `decision ${d.traffic_class} ${d.time}`,
  kind: "decision",
  time: d.time,
  tone: (REASONS[d.reason] ?? ["", "idle"])[1],
  title: `${reasonTitle(d.reason)} (${d.traffic_class}).`,
  text: `${d.explanation} g ${d.lease.table[0].g}, θ ${two(d.lease.table[0].theta)}.`,
});

// Decisions of everyday, of which a row of one class is told as one event.
const ROUTINE = new Set(["steady", "certified", "few_labels", "step_up", "waiting_for_labels", "unproven", "learning"]);

// `rows` newest first; each run of routine decisions of a class becomes its newest, which says how many there were.
function told(rows) {
  const events = [];
  const open = new Map(); // class -> the event that its next routine decision joins
  for (const row of rows) {
    const routine = ROUTINE.has(row.reason);
    const run = open.get(row.traffic_class);
    if (routine && run) {
      run.count += 1;
      run.since = row.time;
      continue;
    }
    const event = { ...fromDecision(row), count: 1 };
    events.push(event);
    if (routine) open.set(row.traffic_class, event);
    else open.delete(row.traffic_class);
  }
  for (const e of events) if (e.count > 1) e.text += ` One of ${e.count} changes since ${stamp(e.since)}.`;
  return events;
}

const fromOrder = (o) => ({
  key: `order ${o.id}`,
  kind: "order",
  time: o.time,
  tone: o.action === "resume" ? "good" : "warn",
  title: `${o.who} ${ORDERS[o.action] ?? o.action}${o.amount === null ? "" : ` by ${two(o.amount)}`} (${o.traffic_class === "*" ? "all classes" : o.traffic_class}).`,
  text: `“${o.why}”`,
});

const fromAlert = (a) => ({
  key: `alert ${a.time} ${a.traffic_class} ${a.name}`,
  kind: "alert",
  time: a.time,
  tone: a.firing ? "bad" : "good",
  title: `${a.firing ? "Alert" : "Alert over"}: ${a.name} (${a.traffic_class}).`,
  text: a.detail,
});

const fromRevision = (r) => ({
  key: `revision ${r.revision}`,
  kind: "policy",
  time: r.time,
  tone: r.accepted ? "good" : "warn",
  title: r.accepted ? `Policy revision ${r.revision} took effect.` : `Policy edit refused (revision ${r.revision}).`,
  text: r.accepted ? `From ${r.source}.` : r.error,
});

const SOURCES = [
  ["decisions?changes=true&brief=true&limit=300", told],
  [`actions?limit=${SHOWN}`, (rows) => rows.map(fromOrder)],
  [`alerts?limit=${SHOWN}`, (rows) => rows.map(fromAlert)],
  [`policy/revisions?limit=${SHOWN}`, (rows) => rows.map(fromRevision)],
];

// Fetches and shows what happened to `pool`; throws when the history cannot be read.
export async function showTimeline(container, none, pool) {
  const base = `/v1/pools/${encodeURIComponent(pool)}`;
  const read = async ([path, tell]) => tell(await ask(`${base}/${path}`));
  const events = (await Promise.all(SOURCES.map(read))).flat().sort((a, b) => b.time - a.time).slice(0, SHOWN);
  none.hidden = events.length > 0;
  list(container, events, (e) => e.key, () => h("li", {}, h("time"), h("span", { class: "kind" }), h("p", {}, h("b"), " ", h("span"))), (node, e) => {
    const [time, kind, words] = node.children;
    text(time, stamp(e.time));
    time.setAttribute("datetime", new Date(e.time * 1000).toISOString());
    text(kind, e.kind);
    data(node, "tone", e.tone);
    text(words.children[0], e.title);
    text(words.children[1], e.text ?? "");
  });
}
