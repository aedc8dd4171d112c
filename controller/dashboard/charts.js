// The series of one class over time, one small chart per question. Needs uPlot as a global.

import { amount, clock, day, int, one, percent, seconds, stamp, times as speed, two } from "./format.js";
import { h, text } from "./dom.js";

const share = { format: (x) => percent(x), axis: (x) => percent(x, 0) };

// `low`/`high` bound the vertical axis, `span` is its least extent, `reference` a line to compare with, `band` fills
// between two series by their place.
const CHARTS = [
  { title: "Error budget left", ...share, low: -1, high: 1, include: [0, 1], reference: 0,
    series: [{ name: "remaining", label: "left", ink: "a", fill: true }] },
  { title: "Loss per request", format: (x) => percent(x, 2), axis: (x) => `${two(x * 100)}%`, low: 0, include: [0], span: 0.005, band: [1, 2],
    series: [{ name: "loss_upper", label: "at most", ink: "a" }, { name: "loss", label: "estimate", ink: "b" },
      { name: "max_loss", label: "tolerated", ink: "c", dash: true }] },
  { title: "Loss in the window (requests)", format: amount, axis: amount, low: 0, include: [0], span: 1,
    series: [{ name: "spent_upper", label: "at most", ink: "a" }, { name: "spent", label: "estimate", ink: "b" },
      { name: "budget", label: "budget", ink: "c", dash: true }] },
  { title: "Leniency θ", format: two, axis: two, low: 0, high: 1, include: [0], span: 0.2,
    series: [{ name: "theta", label: "θ", ink: "a", step: true, fill: true }] },
  { title: "Touches per request", format: two, axis: two, low: 0, include: [0], span: 0.1,
    series: [{ name: "touches_per_request", label: "seen", ink: "a" }, { name: "tau_allowed", label: "allowed", ink: "c", dash: true, step: true }] },
  { title: "Block length g", format: int, axis: int, low: 0, include: [0], span: 4, whole: true,
    series: [{ name: "g", label: "draft tokens", ink: "a", step: true }] },
  { title: "Acceptance", ...share, low: 0, high: 1, span: 0.1,
    series: [{ name: "acceptance", label: "accepted / examined", ink: "a" }] },
  { title: "Acceptance by position", ...share, low: 0, high: 1, span: 0.1,
    series: [{ name: "accepted_1", label: "1st", ink: "a" }, { name: "accepted_2", label: "2nd", ink: "b" },
      { name: "accepted_4", label: "4th", ink: "d" }, { name: "accepted_8", label: "8th", ink: "c" }] },
  { title: "Latency", format: seconds, axis: seconds, low: 0, include: [0], span: 0.01,
    series: [{ name: "seconds_per_request", label: "request", ink: "a" }, { name: "seconds_to_first_token", label: "first token", ink: "b" }] },
  { title: "Tokens per second", format: amount, axis: int, low: 0, include: [0], span: 10,
    series: [{ name: "tokens_per_second", label: "measured", ink: "a" }] },
  { title: "Predicted speed", format: speed, axis: (x) => `${one(x)}×`, low: 0, include: [1], span: 0.4, reference: 1,
    series: [{ name: "speedup_plain", label: "against plain", ink: "a" }, { name: "speedup_lossless", label: "against lossless", ink: "b" }] },
  { title: "Quality", ...share, low: 0, high: 1, span: 0.1,
    series: [{ name: "quality_lenient", label: "lenient", ink: "a" }, { name: "quality_lossless", label: "lossless", ink: "b" }] },
];

const HEIGHT = 148;

export class Charts {
  constructor(container) {
    this.charts = CHARTS.map((spec) => new Chart(spec, container));
    const redraw = () => this.charts.forEach((chart) => chart.build());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  // `times` in Unix seconds, `columns` by name, of equal length; the axis ends at `until` and is `span` seconds long.
  show(times, columns, until, span) {
    for (const chart of this.charts) chart.show(times, columns, until, span);
  }
}

class Chart {
  constructor(spec, container) {
    this.spec = spec;
    this.window = [0, 1];
    this.data = [[], ...spec.series.map(() => [])];
    this.values = spec.series.map(() => h("span", { class: "value" }, "–"));
    this.plotted = h("div", { class: "plot", role: "img" });
    this.note = h("p", { class: "plot-empty" }, "No data in this range");
    const keys = spec.series.map((s, i) =>
      h("li", { "data-ink": s.ink, "data-dash": s.dash ? "yes" : null }, h("span", { class: "swatch", "aria-hidden": "true" }), `${s.label} `, this.values[i]));
    this.at = h("span", { class: "at" });
    container.append(h("figure", { class: "chart card" },
      h("figcaption", {}, h("h3", {}, spec.title, " ", this.at), h("ul", { class: "keys" }, ...keys)),
      h("div", { class: "plot-box" }, this.plotted, this.note)));
    new ResizeObserver(() => this.resize()).observe(this.plotted);
    this.build();
  }

  build() {
    this.plot?.destroy();
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(`--${name}`).trim();
    const { spec } = this;
    const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: color("grid"), width: 1 };
    this.plot = new uPlot({
      width: this.plotted.clientWidth || 320,
      height: HEIGHT,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "lenity" }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true, range: () => this.window }, y: { range: (_, low, high) => extent(spec, low, high) } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, size: 26, values: (_, at) => at.map((t) => this.tick(t)) },
        { ...axis, grid, size: 50, space: 30, gap: 6, values: (_, at) => at.map(spec.axis), incrs: spec.whole ? [1, 2, 5, 10] : undefined },
      ],
      series: [{}, ...spec.series.map((s) => ({
        label: s.label,
        stroke: color(`ink-${s.ink}`),
        width: s.dash ? 1.25 : 1.75,
        dash: s.dash ? [5, 4] : undefined,
        fill: s.fill ? color(`wash-${s.ink}`) : undefined,
        fillTo: 0,
        paths: s.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: false },
      }))],
      bands: spec.band ? [{ series: spec.band, fill: color("wash-a") }] : undefined,
      hooks: { setCursor: [(u) => this.label(u.cursor.idx)], drawAxes: [(u) => this.reference(u, color("axis"))] },
    }, this.data, this.plotted);
  }

  show(times, columns, until, span) {
    this.window = [until - span, until];
    this.data = [times, ...this.spec.series.map((s) => columns[s.name] ?? times.map(() => null))];
    const empty = this.data.slice(1).every((column) => column.every((v) => v === null));
    this.note.hidden = !empty;
    this.plot.setData(this.data);
    this.label(this.plot.cursor.idx);
  }

  // The values under the cursor, or the newest ones.
  label(index) {
    const [times] = this.data;
    const hovering = index !== null && index !== undefined && index < times.length;
    text(this.at, hovering ? stamp(times[index]) : "");
    const parts = this.spec.series.map((s, i) => {
      const value = this.spec.format(hovering ? this.data[i + 1][index] : newest(this.data[i + 1]));
      text(this.values[i], value);
      return `${s.label} ${value}`;
    });
    if (!hovering) this.plotted.setAttribute("aria-label", `${this.spec.title}, newest: ${parts.join(", ")}`);
  }

  tick(t) {
    const span = this.window[1] - this.window[0];
    if (span > 172_800) return day(t);
    return span > 300 ? clock(t).slice(0, 5) : clock(t);
  }

  reference(u, color) {
    if (this.spec.reference === undefined) return;
    const y = Math.round(u.valToPos(this.spec.reference, "y", true)) + 0.5;
    const { left, top, width, height } = u.bbox;
    if (y < top || y > top + height) return;
    u.ctx.save();
    u.ctx.strokeStyle = color;
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(left, y);
    u.ctx.lineTo(left + width, y);
    u.ctx.stroke();
    u.ctx.restore();
  }

  resize() {
    const width = this.plotted.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

function newest(column) {
  for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
  return null;
}

// The vertical axis: the data and what must be visible, at least `span` long, with air, within the bounds.
function extent({ low = -Infinity, high = Infinity, include = [], span = 0 }, dataLow, dataHigh) {
  const all = [dataLow, dataHigh, ...include].filter((v) => v !== null && Number.isFinite(v));
  if (!all.length) return [Math.max(low, 0), Math.min(high, span || 1)];
  let bottom = Math.min(...all);
  let top = Math.max(...all);
  if (top - bottom < span) {
    const middle = (top + bottom) / 2;
    if (include.includes(bottom)) top = bottom + span;
    else [bottom, top] = [middle - span / 2, middle + span / 2];
  }
  const air = (top - bottom) * 0.06;
  return [Math.max(low, include.includes(bottom) ? bottom : bottom - air), Math.min(high, top + air)];
}
