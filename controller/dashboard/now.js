// Two pictures of the present: the frontier with the point in use, and acceptance by position. Needs uPlot as a global.

import { h, text } from "./dom.js";
import { percent, three, times } from "./format.js";

const HEIGHT = 200;

export class Now {
  constructor(container) {
    this.frontier = new Plot(container, "Frontier", "fastest knobs by touches per token; the dot is in use, the line what the budget allows");
    this.positions = new Plot(container, "Acceptance by position", "of a draft, where it is examined");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.last && this.show(this.last));
  }

  show(c) {
    this.last = c;
    this.showFrontier(c);
    this.showPositions(c);
  }

  showFrontier({ frontier, frontier_at: at, frontier_allowed: allowed }) {
    if (!frontier.length) return this.frontier.empty("Not measured yet");
    const [x, y] = at ?? [null, null];
    const xs = [...new Set([...frontier.map(([d]) => d), ...(at ? [x] : [])])].sort((a, b) => a - b);
    const curve = new Map(frontier);
    const data = [xs, xs.map((d) => curve.get(d) ?? null), xs.map((d) => (d === x ? y : null))];
    const words = at ? `at ${three(x)} touches per token and ${times(y)} plain; ${three(allowed)} are allowed` : "no point in use";
    this.frontier.draw(data, words, {
      x: { values: (_, v) => v.map((d) => (d === 0 ? "0" : d < 0.095 ? three(d) : String(Math.round(d * 100) / 100))) },
      y: { values: (_, v) => v.map((s) => `${Math.round(s * 100) / 100}×`) },
      series: [{ ink: "a", paths: "linear", spanGaps: true }, { ink: "b", point: 9 }],
      scaleX: [0, Math.max(...xs, allowed ?? 0) * 1.04 || 1],
      line: allowed,
    });
  }

  showPositions({ positions }) {
    if (!positions.length) return this.positions.empty("Nothing is drafted now");
    const xs = positions.map((_, i) => i + 1);
    const words = positions.map((p, i) => `${i + 1}: ${percent(p, 0)}`).join(", ");
    this.positions.draw([xs, positions], words, {
      x: { values: (_, v) => v.map((j) => (Number.isInteger(j) ? String(j) : "")), incrs: [1, 2, 5, 10] },
      y: { values: (_, v) => v.map((p) => percent(p, 0)) },
      series: [{ ink: "a", bars: true }],
      scaleX: [0.4, Math.max(4, positions.length) + 0.6],
      scaleY: [0, 1],
    });
  }
}

class Plot {
  constructor(container, title, hint) {
    this.title = title;
    this.plotted = h("div", { class: "plot", role: "img" });
    this.note = h("p", { class: "plot-empty" }, "");
    container.append(h("figure", { class: "chart card" }, h("figcaption", {}, h("h3", {}, title), h("p", { class: "hint" }, hint)),
      h("div", { class: "plot-box tall" }, this.plotted, this.note)));
    new ResizeObserver(() => this.plot && this.resize()).observe(this.plotted);
  }

  empty(words) {
    this.plot?.destroy();
    this.plot = null;
    text(this.note, words);
    this.note.hidden = false;
    this.plotted.setAttribute("aria-label", `${this.title}: ${words}`);
  }

  draw(data, words, { x, y, series, scaleX, scaleY, line }) {
    const key = JSON.stringify([data, scaleX, line, matchMedia("(prefers-color-scheme: dark)").matches]);
    if (this.plot && key === this.key) return;
    this.key = key;
    this.note.hidden = true;
    this.plotted.setAttribute("aria-label", `${this.title}, ${words}`);
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: color("grid"), width: 1 };
    this.plot?.destroy();
    this.plot = new uPlot({
      width: this.plotted.clientWidth || 320,
      height: HEIGHT,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => scaleX }, y: { range: (_, low, high) => scaleY ?? padded(low, high) } },
      axes: [{ ...axis, ...x, grid: { show: false }, size: 26, space: 48 }, { ...axis, ...y, grid, size: 50, space: 34, gap: 6 }],
      series: [{}, ...series.map((s) => ({
        stroke: color(`ink-${s.ink}`),
        width: 1.75,
        fill: s.bars ? color(`wash-${s.ink}`) : undefined,
        paths: s.bars ? uPlot.paths.bars({ size: [0.6, 48] }) : s.point ? () => null : undefined,
        spanGaps: s.spanGaps,
        points: s.point ? { show: true, size: s.point, fill: color(`ink-${s.ink}`), stroke: color("surface") } : { show: false },
      }))],
      hooks: { drawAxes: [(u) => line !== undefined && line !== null && vertical(u, line, color("axis"))] },
    }, data, this.plotted);
  }

  resize() {
    const width = this.plotted.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

function padded(low, high) {
  const air = Math.max(0.1, (high - low) * 0.12);
  return [Math.max(0, low - air), high + air];
}

function vertical(u, at, color) {
  const { left, top, width, height } = u.bbox;
  const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
  if (x < left || x > left + width) return;
  u.ctx.save();
  u.ctx.strokeStyle = color;
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  u.ctx.beginPath();
  u.ctx.moveTo(x, top);
  u.ctx.lineTo(x, top + height);
  u.ctx.stroke();
  u.ctx.restore();
}
