// The policy in force, and the last edit that was refused, each with what changed.

import { ask } from "./api.js";
import { h, text } from "./dom.js";
import { stamp } from "./format.js";

// Fetches and shows the policy of `pool` in `root`; throws when the history cannot be read.
export async function showPolicy(root, pool) {
  const base = `/v1/pools/${encodeURIComponent(pool)}/policy`;
  const [{ active, rejected }, revisions] = await Promise.all([ask(base), ask(`${base}/revisions?limit=50`)]);
  const diffOf = (r) => revisions.find((row) => row.revision === r.revision)?.diff;
  const parts = [];
  if (rejected) parts.push(block(`Refused: revision ${rejected.revision}`, `${stamp(rejected.time)}, ${rejected.error}`, "warn", [["What was asked for", diffOf(rejected) ?? rejected.text]]));
  if (active) {
    const shown = [["Document", active.text]];
    if (diffOf(active)) shown.unshift(["What it changed", diffOf(active)]);
    parts.push(block(`In force: revision ${active.revision}`, `${stamp(active.time)}, from ${active.source}`, "good", shown));
  }
  root.replaceChildren(...(parts.length ? parts : [h("p", { class: "muted pad" }, "No revision is recorded yet.")]));
}

function block(title, meta, tone, documents) {
  return h("div", { class: "policy", "data-tone": tone }, h("p", {}, h("b", {}, title), " ", h("span", { class: "muted" }, meta)),
    ...documents.map(([name, content]) => h("details", {}, h("summary", {}, name), lines(content))));
}

// A document, with the lines of a diff marked.
function lines(content) {
  const pre = h("pre", { tabindex: "0" });
  const diff = content.startsWith("--- ");
  for (const line of content.split("\n")) {
    const span = h("span", { class: diff && line.startsWith("+") ? "plus" : diff && line.startsWith("-") ? "minus" : null });
    text(span, `${line}\n`);
    pre.append(span);
  }
  return pre;
}
