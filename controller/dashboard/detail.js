// One traffic class in full: state in plain words, speed, budget, knobs, evidence, alerts.

import { NONE, amount, int, one, percent, seconds, small, three, times, two } from "./format.js";
import { data, h, list, text } from "./dom.js";

// What each state means, and how it is coloured; unknown states are shown as they are.
const STATES = {
  measured: ["Measured", "good"],
  certified: ["Certified", "info"],
  "insufficient data": ["Insufficient data", "warn"],
  uncertified: ["Uncertified", "warn"],
  breached: ["Budget breached", "bad"],
  "no traffic": ["No traffic", "idle"],
  disabled: ["Leniency off", "idle"],
};

export const stateLabel = (state) => (STATES[state] ?? [state, "idle"])[0];
export const stateTone = (state) => (STATES[state] ?? [state, "idle"])[1];
export const isLossless = (c) => c.theta === 0 || c.rho === 0;
export const budgetTone = (c) => (c.remaining <= 0.05 ? "bad" : c.remaining <= 0.2 ? "warn" : "good");

const mode = (c) => (isLossless(c) ? (c.g === 0 ? "Plain decoding" : "Lossless") : "Lenient");

// A term with a value that `read` takes from (class, pool); `hint` says what it is.
const row = (term, read, hint) => ({ term, read, hint });

const interval = (e, format) => (e && e.low !== null ? `${format(e.low)} to ${format(e.high)}` : NONE);
const bound = (e, format) => (e && e.high !== null ? `${format(e.value)}, at most ${format(e.high)}` : NONE);

const trial = (t) => (t ? `${t.rule}${t.strategy === "speculative" ? "" : `, ${t.strategy}`}, ${percent(t.share, 0)}` : "none");
const byBatch = (table) => (table.length ? table.map((r) => `${r.batch}: ${r.g}`).join(", ") : NONE);

const KNOBS = [
  row("Block length g", (c) => `${int(c.g)} tokens`, "draft tokens per round"),
  row("Leniency θ", (c) => two(c.theta), "0 is lossless, 1 as lenient as the rule goes"),
  row("Shadow price μ", (c) => (c.mu === null ? "∞" : two(c.mu)), "1/θ; ∞ is lossless"),
  row("Mixing weight ρ", (c) => two(c.rho), "share of the rule that is applied"),
  row("Accept rule", (c) => c.rule),
  row("On trial", (c) => trial(c.lease?.trial), "another rule or strategy, and its share of requests"),
  row("g by batch size", (c) => byBatch(c.lease?.table ?? []), "the longest block up to so many rows that decode together"),
  row("Lease", (c) => `${c.lease_epoch}.${c.lease_seq}, ${seconds(c.lease_ttl_s)}`, "epoch.number, valid for; workers turn lossless when it ends"),
];

const EVIDENCE = [
  row("Touches per request", (c) => `${small(c.touches_per_request_seen)} of ${small(c.touches_per_request_allowed)}`, "seen, of what the budget allows: tokens that only leniency accepted"),
  row("Acceptance", (c) => interval(c.estimates.acceptance, percent), "accepted of examined, with 95% interval"),
  row("Loss per request", (c) => bound(c.estimates.loss, (x) => percent(x, 2)), "of the window: estimate, and upper bound"),
  row("Loss per touch, at most", (c) => three(c.u_kappa), "upper bound; 1 while there is no evidence"),
  row("Forks compared", (c) => int(c.forks_matured), "requests finished both ways and scored"),
  row("Labels still needed", (c) => (c.labels_needed === null ? "none" : `about ${int(c.labels_needed)}`)),
  row("Quality, lenient", (c) => percent(c.quality_lenient), "mean score lately, of what leniency gave"),
  row("Quality, lossless", (c) => percent(c.quality_lossless), "of what lossless verification gave"),
];

const BUDGET = [
  row("Spent, upper bound", (c) => `${amount(c.spent_upper)} of ${amount(c.budget)}`, "loss in requests; this is what is governed"),
  row("Spent, estimate", (c) => amount(c.spent)),
  row("Tolerated loss", (c) => percent(c.max_loss, 2), "mean loss against lossless, by policy"),
  row("Requests in the window", (c) => int(c.requests_in_window)),
];

const FIGURES = [
  row("speed against plain", (c) => times(c.predicted_speedup_plain)),
  row("speed against lossless", (c) => times(c.predicted_speedup_lossless)),
  row("tokens per second", (c) => amount(c.tokens_per_second)),
  row("acceptance", (c) => percent(c.acceptance)),
  row("tokens per target pass", (c) => two(c.block_efficiency)),
];

export class Detail {
  // `controls` are the buttons for orders.
  constructor(root, controls) {
    this.root = root;
    this.updates = [];
    this.pool = h("span");
    this.cls = h("span", { class: "muted" });
    this.meta = h("p", { class: "muted meta" });
    this.override = h("p", { class: "notice warn", id: "override", hidden: true }, h("b"), " ", h("span"));
    this.badge = h("span", { class: "badge", id: "state" });
    this.mode = h("span", { class: "mode", id: "mode" });
    this.explanation = h("p", { class: "explanation", id: "explanation" });
    this.returns = h("dd", { id: "returns" });
    this.advice = h("dd", { id: "advice" });
    this.guide = h("dl", { class: "guide", hidden: true },
      h("div", {}, h("dt", {}, "Comes back"), this.returns), h("div", {}, h("dt", {}, "What to do"), this.advice));
    this.left = h("strong", { class: "big", id: "budget-left" });
    this.bar = h("div", { class: "meter-fill" });
    this.meter = h("div", { class: "meter", role: "progressbar", "aria-label": "Error budget left", "aria-valuemin": "0", "aria-valuemax": "100" }, this.bar);
    this.burn = h("ul", { class: "chips" });
    this.burnNone = h("span", { class: "muted" }, "not measured yet");
    this.alerts = h("ul", { class: "alerts" });
    this.alertsNone = h("p", { class: "muted" });
    root.replaceChildren(
      h("div", { class: "title" }, h("div", {}, h("h1", { id: "detail-title" }, this.pool, this.cls), this.meta), controls),
      this.override,
      h("div", { class: "hero card" },
        h("div", { class: "hero-state" }, h("p", { class: "state-line" }, this.mode, this.badge), this.explanation, this.guide),
        this.figures()),
      h("div", { class: "cards" },
        h("article", { class: "card" }, h("h2", {}, "Error budget"),
          h("p", { class: "budget-line" }, this.left, h("span", { class: "muted" }, " left in the window")), this.meter,
          this.rows(BUDGET),
          h("h3", { class: "sub" }, "Burn rate", h("span", { class: "muted" }, ", 1 spends the plan")), this.burn, this.burnNone),
        h("article", { class: "card" }, h("h2", {}, "Knobs in use"), this.rows(KNOBS)),
        h("article", { class: "card" }, h("h2", {}, "Evidence"), this.rows(EVIDENCE)),
        h("article", { class: "card" }, h("h2", {}, "Alerts"), this.alertsNone, this.alerts)));
  }

  // When leniency comes back and what a person can do; null where there is nothing to say.
  tell({ returns, advice }) {
    for (const [node, words] of [[this.returns, returns], [this.advice, advice]]) {
      text(node, words ?? "");
      node.parentElement.hidden = words === null;
    }
    this.guide.hidden = returns === null && advice === null;
  }

  rows(specs) {
    const items = specs.map(({ term, read, hint }) => {
      const value = h("dd");
      this.updates.push((c, p) => text(value, read(c, p)));
      return h("div", {}, h("dt", { title: hint ?? null }, term), value);
    });
    return h("dl", { class: "rows" }, ...items);
  }

  figures() {
    const items = FIGURES.map(({ term, read }) => {
      const value = h("dd");
      this.updates.push((c) => text(value, read(c)));
      return h("div", {}, value, h("dt", {}, term));
    });
    return h("dl", { class: "figures" }, ...items);
  }

  show(pool, c) {
    text(this.pool, pool.pool);
    text(this.cls, ` / ${c.traffic_class}`);
    const facts = [
      `policy revision ${pool.policy_revision}`,
      pool.policy_source,
      `${pool.leader ? "leader" : "standing by"}, epoch ${pool.epoch}`,
      pool.last_telemetry_age_s === null ? "no telemetry yet" : `telemetry ${seconds(pool.last_telemetry_age_s)} ago`,
      `tick ${seconds(pool.tick_seconds)}`,
      pool.stream_lag ? `${int(pool.stream_lag)} entries behind` : null,
      pool.dead_letters ? `${int(pool.dead_letters)} dead letters` : null,
    ];
    text(this.meta, facts.filter(Boolean).join("  ·  "));
    this.override.hidden = !c.override;
    text(this.override.children[0], c.override === "lossless" ? "Forced lossless." : "Frozen.");
    text(this.override.children[1], `By ${c.override_who ?? NONE}: “${c.override_why ?? NONE}”`);
    text(this.mode, mode(c));
    text(this.badge, stateLabel(c.state));
    data(this.badge, "tone", stateTone(c.state));
    text(this.explanation, c.explanation);
    for (const update of this.updates) update(c, pool);

    text(this.left, percent(c.remaining));
    const share = Math.max(0, Math.min(1, c.remaining ?? 0));
    this.bar.style.width = `${share * 100}%`;
    data(this.meter, "tone", budgetTone(c));
    this.meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    this.meter.setAttribute("aria-valuetext", `${percent(c.remaining)} left`);

    const burn = Object.entries(c.burn);
    this.burnNone.hidden = burn.length > 0;
    list(this.burn, burn, ([window]) => window, () => h("li", {}, h("span", { class: "muted" }), " ", h("b")), (node, [window, rate]) => {
      text(node.children[0], window);
      text(node.children[1], rate === null ? NONE : `${one(rate)}×`);
      data(node, "tone", rate > 1 ? "warn" : "good");
    });
    const firing = c.alerts.filter((a) => a.firing).length;
    text(this.alertsNone, c.alerts.length === 0 ? "The policy defines no alerts." : firing ? `${firing} firing` : "None firing");
    data(this.alertsNone, "tone", firing ? "bad" : "good");
    const order = [...c.alerts].sort((a, b) => Number(b.firing) - Number(a.firing));
    list(this.alerts, order, (a) => a.name, () => h("li", {}, h("span", { class: "dot", "aria-hidden": "true" }), h("div", {}, h("b"), h("p"))), (node, a) => {
      data(node, "firing", a.firing ? "yes" : "no");
      text(node.children[1].children[0], a.firing ? `${a.name}: firing` : a.name);
      text(node.children[1].children[1], a.detail);
    });
  }
}

// The table of all pools and classes; returns how many rows it has.
export function glance(body, pools, selected) {
  const rows = pools.flatMap((pool) => pool.classes.map((c) => ({ pool, c })));
  list(body, rows, ({ pool, c }) => JSON.stringify([pool.pool, c.traffic_class]), ({ pool, c }) => {
    const link = h("a", { href: hashOf(pool.pool, c.traffic_class) }, pool.pool, h("span", { class: "muted" }, ` / ${c.traffic_class}`));
    return h("tr", {}, h("th", { scope: "row" }, link), h("td", {}, h("span", { class: "badge" })),
      ...Array.from({ length: 4 }, () => h("td", { class: "num" })),
      h("td", {}, h("div", { class: "meter small", "aria-hidden": "true" }, h("div", { class: "meter-fill" })), h("span", { class: "num" })),
      h("td", { class: "num" }), h("td", { class: "num" }), h("td"));
  }, (node, { pool, c }) => {
    const cells = node.children;
    const current = pool.pool === selected?.pool && c.traffic_class === selected?.cls;
    if (current) cells[0].firstChild.setAttribute("aria-current", "true");
    else cells[0].firstChild.removeAttribute("aria-current");
    text(cells[1].firstChild, stateLabel(c.state));
    data(cells[1].firstChild, "tone", stateTone(c.state));
    [int(c.g), two(c.theta), times(c.predicted_speedup_plain), times(c.predicted_speedup_lossless)].forEach((v, i) => text(cells[2 + i], v));
    cells[6].firstChild.firstChild.style.width = `${Math.max(0, Math.min(1, c.remaining ?? 0)) * 100}%`;
    data(cells[6].firstChild, "tone", budgetTone(c));
    text(cells[6].children[1], percent(c.remaining, 0));
    const burn = Math.max(0, ...Object.values(c.burn).filter((rate) => rate !== null));
    text(cells[7], Object.keys(c.burn).length ? `${one(burn)}×` : NONE);
    data(cells[7], "tone", burn > 1 ? "bad" : "none");
    text(cells[8], `${int(c.forks_matured)}${c.labels_needed === null ? "" : ` of ${int(c.forks_matured + c.labels_needed)}`}`);
    const firing = c.alerts.filter((a) => a.firing).length;
    text(cells[9], firing ? `${firing} firing` : "none");
    data(cells[9], "tone", firing ? "bad" : "idle");
  });
  return rows.length;
}

export const hashOf = (pool, cls) => `#${encodeURIComponent(pool)}/${encodeURIComponent(cls)}`;
