// The status page: what the controller says, kept current. See link.js for how it hears, detail.js for what it shows.

import { ask, token } from "./api.js";
import { Charts } from "./charts.js";
import { Controls } from "./controls.js";
import { Detail, glance, hashOf, isLossless, stateLabel } from "./detail.js";
import { data, h, list, text } from "./dom.js";
import { clock, percent } from "./format.js";
import { Link } from "./link.js";
import { Now } from "./now.js";
import { showPolicy } from "./policy.js";
import { Series } from "./series.js";
import { showTimeline } from "./timeline.js";

const WHY_AGAIN_S = 10;
const $ = (id) => document.getElementById(id);
const pools = new Map();
const series = new Series();
const controls = new Controls($("order"), ordered);
const detail = new Detail($("detail"), controls.bar);
let charts = null;
let present = null;
let selected = null;
let serverTime = 0;
let heardAt = Date.now();
let announced = "";
let eventsOf = "";
let policyOf = "";
let toldAt = 0;
let whyOf = "";
let whyAt = 0;
let status = { mode: "connecting", since: null, stoppedAt: null };

const link = new Link({
  onPool(view, time) {
    pools.set(view.pool, view);
    arrived(time);
  },
  onPools(views, time) {
    pools.clear();
    for (const view of views) pools.set(view.pool, view);
    arrived(time);
  },
  onLink(next) {
    status = next;
    if (next.mode === "locked") placeholder("This controller asks who reads", "Enter a token; it stays in this tab.", false);
    else if (next.mode !== "down" && serverTime === 0) placeholder("No pools yet", "The controller answers, but its loop has not ticked yet. Where it stands by, another one leads: /readyz says so.", true);
    render();
  },
});

function arrived(time) {
  serverTime = Math.max(serverTime, time);
  heardAt = Date.now();
  if (!current()) select();
  render();
  refreshSeries();
  refreshEvents();
  refreshWhy();
}

// The events are read again when the views show that there is a new one.
async function refreshEvents() {
  const shown = current();
  if (!shown) return;
  const { pool, policy_revision, policy_rejected, classes } = shown.pool;
  const kinds = classes.map((c) => [c.traffic_class, c.state, c.reason, c.override, c.alerts.filter((a) => a.firing).map((a) => a.name)]);
  const mark = JSON.stringify([pool, policy_revision, policy_rejected, kinds, toldAt]);
  const policyMark = JSON.stringify([pool, policy_revision, policy_rejected]);
  const [before, policyBefore] = [eventsOf, policyOf];
  if (mark !== before) {
    eventsOf = mark;
    await showTimeline($("events"), $("events-note"), pool).catch(() => {
      if (eventsOf === mark) eventsOf = before; // asked again at the next view
    });
  }
  if (policyMark !== policyBefore) {
    policyOf = policyMark;
    await showPolicy($("policy"), pool).catch(() => {
      if (policyOf === policyMark) policyOf = policyBefore;
    });
  }
}

// Why it is so, asked again when a view shows another reason, and now and then while there is a time to wait for.
async function refreshWhy() {
  const shown = current();
  if (!shown) return;
  const { pool, cls } = shown;
  const mark = JSON.stringify([pool.pool, cls.traffic_class, cls.state, cls.reason, cls.override]);
  if (mark === whyOf && (cls.held_until === null || pool.time - whyAt < WHY_AGAIN_S)) return;
  [whyOf, whyAt] = [mark, pool.time];
  try {
    const [why] = await ask(`/v1/pools/${encodeURIComponent(pool.pool)}/why?class=${encodeURIComponent(cls.traffic_class)}`);
    if (mark === whyOf) detail.tell(why);
  } catch {
    if (mark === whyOf) whyOf = ""; // asked again at the next view
  }
}

// After an order: the timeline is read again, and a screen reader hears it.
function ordered(words) {
  toldAt = Date.now();
  text($("announce"), words);
  refreshEvents();
}

const now = () => (serverTime || Date.now() / 1000);
const span = () => Number(document.querySelector("input[name=range]:checked").value);

function current() {
  const pool = selected && pools.get(selected.pool);
  const cls = pool?.classes.find((c) => c.traffic_class === selected.cls);
  return cls ? { pool, cls } : null;
}

// Chooses the class that the address names, or the first one there is.
function select() {
  const all = sorted().flatMap((pool) => pool.classes.map((c) => ({ pool: pool.pool, cls: c.traffic_class })));
  const wanted = all.find(({ pool, cls }) => hashOf(pool, cls) === location.hash);
  const next = wanted ?? all[0] ?? null;
  if (next?.pool === selected?.pool && next?.cls === selected?.cls) return;
  selected = next;
  announced = "";
  detail.tell({ returns: null, advice: null });
  whyOf = "";
  restartSeries();
}

const sorted = () => [...pools.values()].sort((a, b) => a.pool.localeCompare(b.pool));

function restartSeries() {
  series.clear(selected && { ...selected, span: span() });
  drawSeries();
  refreshSeries();
}

async function refreshSeries() {
  const shown = current();
  if (!shown) return;
  try {
    if (await series.update(now(), shown.pool.interval_s)) drawSeries();
    note("");
  } catch {
    if (status.mode !== "down") note("The history cannot be read at the moment; the curves are not up to date.");
  }
  if (series.missed && !series.busy) refreshSeries();
}

function drawSeries() {
  if ($("content").hidden) return;
  charts ??= new Charts($("charts"));
  charts.show(series.times, series.columns, now(), span());
}

function drawNow() {
  const shown = current();
  if (!shown || $("content").hidden) return;
  present ??= new Now($("now"));
  present.show(shown.cls);
}

function note(message) {
  text($("series-note"), message);
  $("series-note").hidden = message === "";
}

function placeholder(title, message, busy) {
  text($("placeholder-title"), title);
  text($("placeholder-text"), message);
  $("placeholder").setAttribute("aria-busy", String(busy));
}

function render() {
  const shown = current();
  $("placeholder").hidden = shown !== null;
  const first = shown !== null && $("content").hidden;
  $("content").hidden = shown === null;
  $("unlock").hidden = status.mode !== "locked";
  if (shown === null) {
    if (status.mode === "down") placeholder("The controller does not answer", "Nothing has been heard from it yet. This page keeps trying.", true);
    else if (pools.size) placeholder("No traffic yet", "The controller runs. Its classes appear with the first tick.", false);
  } else {
    $("glance").hidden = glance($("glance-rows"), sorted(), selected) < 2;
    detail.show(shown.pool, shown.cls);
    controls.show(shown.pool.pool, shown.cls.traffic_class, shown.cls.override);
    document.title = `${isLossless(shown.cls) ? "Lossless" : "Lenient"}, ${percent(shown.cls.remaining, 0)} left · ${shown.pool.pool} · Lenity`;
    announce(shown.cls);
  }
  if (first) drawSeries();
  drawNow();
  data(document.body, "stale", status.mode === "down" || status.stoppedAt !== null ? "yes" : "no");
  notices();
  renderLink();
}

// A screen reader hears what changed in kind, not every tick.
function announce(c) {
  const firing = c.alerts.filter((a) => a.firing).map((a) => a.name);
  const message = `${stateLabel(c.state)}, ${isLossless(c) ? "lossless" : "lenient"}.${firing.length ? ` Firing: ${firing.join(", ")}.` : ""}`;
  if (message === announced) return;
  if (announced !== "") text($("announce"), message);
  announced = message;
}

function notices() {
  const items = [];
  const ttl = current()?.cls.lease_ttl_s;
  if (status.mode === "down") {
    const safe = ttl ? ` Workers go on, and turn lossless when their lease of ${Math.round(ttl)} s ends.` : "";
    items.push({ key: "down", tone: "bad", title: `Controller not answering since ${clock(status.since / 1000)}.`, text: `What is shown is from then.${safe}` });
  } else if (status.stoppedAt !== null) {
    items.push({ key: "stopped", tone: "bad", title: `The control loop has stopped: last tick at ${clock(status.stoppedAt)}.`, text: "The controller answers, but it does not renew leases; workers turn lossless by themselves." });
  }
  for (const pool of sorted()) {
    if (pool.policy_rejected !== null) {
      items.push({ key: `policy ${pool.pool}`, tone: "warn", title: `Policy edit refused (pool ${pool.pool}), revision ${pool.policy_revision} stays active.`, text: pool.policy_rejected });
    }
    pool.degraded.forEach((reason, i) => items.push({ key: `degraded ${pool.pool} ${i}`, tone: "warn", title: `Degraded (pool ${pool.pool}).`, text: reason }));
  }
  list($("notices"), items, (item) => item.key, (item) => h("div", { class: `notice ${item.tone}`, role: "alert" }, h("b"), " ", h("span")), (node, item) => {
    text(node.children[0], item.title);
    text(node.children[1], item.text);
  });
}

function renderLink() {
  const age = Math.max(0, Math.round((Date.now() - heardAt) / 1000));
  const words = {
    connecting: "Connecting",
    live: status.stoppedAt !== null ? "Loop stopped" : "Live",
    polling: `Polling, ${age} s ago`,
    locked: "Token needed",
    down: "Not answering",
  };
  data($("link"), "link", status.stoppedAt !== null ? "stopped" : status.mode);
  text($("link-text"), words[status.mode]);
}

addEventListener("hashchange", () => {
  select();
  render();
  refreshEvents();
  refreshWhy();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("unlock-token").value.trim(), true);
  $("unlock-token").value = "";
  placeholder("Loading", "Asking the controller for its pools.", true);
  link.restart();
});
for (const input of document.querySelectorAll("input[name=range]")) input.addEventListener("change", restartSeries);
setInterval(renderLink, 1000);
link.start();
