// The curves (a metric, iteration time): uPlot on the timeline's own scale.

import { curveOf, nearest } from "./model.js";
import { alpha, palette, stripes } from "./palette.js";

const FEW_POINTS = 60;

function aligned(curve, maxOnly) {
  const columns = maxOnly ? [curve.mean, curve.max] : [curve.mean, curve.min, curve.max];
  const tables = [[curve.iteration, ...columns.map(finite)]];
  for (const lost of curve.lost) tables.push([lost.iteration, finite(lost.mean)]);
  const modes = tables.map((table) => table.slice(1).map(() => 2));
  // nulls inside a table are gaps; what joining adds for the other tables is not
  return tables.length > 1 ? uPlot.join(tables, modes.map((row) => [0, ...row])) : tables[0];
}

const finite = (values) => values.map((value) => (Number.isFinite(value) ? value : null));

export class CurveLane {
  /** @param format turns a value into text with its unit. */
  constructor(element, view, { metric, format, zeroBased = false, height }) {
    Object.assign(this, { element, view, metric, format, zeroBased, height });
    this.body = element.querySelector(".lane-body");
    this.logarithmic = false;
    this.curve = null;
    this.plot = null;
    this.shape = "";
  }

  setModel(model) {
    this.curve = curveOf(model, this.metric);
    const data = aligned(this.curve, this.zeroBased);
    const shape = `${data.length}:${this.logarithmic}`;
    if (!this.plot || shape !== this.shape) this.#build(data, shape);
    else this.plot.setData(data, false);
    this.move();
  }

  /** Rebuild with new colours, another metric or another scale. */
  restyle(model) {
    this.shape = "";
    if (model) this.setModel(model);
  }

  move() {
    if (!this.plot || this.curve.iteration.length === 0) return;
    this.plot.setScale("x", { min: this.view.from, max: this.view.to });
  }

  resize() {
    this.plot?.setSize({ width: this.view.width, height: this.height });
    this.plot?.redraw(true, true);
  }

  #build(data, shape) {
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.#options(data), data, this.body);
  }

  #options(data) {
    const { view } = this;
    return {
      width: view.width,
      height: this.height,
      padding: [6, view.margin, 4, 0],
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: {
        x: { time: false, auto: false, range: () => [view.from, view.to] },
        y: this.logarithmic ? { distr: 3 } : { range: (_, low, high) => this.#range(low, high) },
      },
      axes: [{ show: false }, this.#valueAxis()],
      series: this.#series(data.length),
      bands: this.zeroBased
        ? [{ series: [2, 1], fill: alpha(palette.accent, 0.14) }]
        : [{ series: [3, 2], fill: alpha(palette.accent, 0.18) }],
      hooks: { draw: [(plot) => this.#drawOdd(plot)] },
    };
  }

  #valueAxis() {
    return {
      size: () => this.view.gutter,
      stroke: palette.muted,
      font: palette.font,
      gap: 6,
      space: 26,
      ticks: { show: false },
      grid: { stroke: palette.grid, width: 1 },
      values: (_, splits) => splits.map((value) => (value == null ? "" : this.format(value))),
    };
  }

  #series(columns) {
    const few = (plot, _, from, to) => to - from <= FEW_POINTS;
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const mean = { stroke: palette.accent, width: 1.6, points: { show: few, size: 4, fill: palette.accent } };
    const fixed = this.zeroBased
      ? [{}, mean, { stroke: alpha(palette.accent, 0.35), width: 1, points: { show: false } }]
      : [{}, mean, edge, edge];
    const lost = { stroke: alpha(palette.lost, 0.75), width: 1.2, dash: [4, 3], points: { show: false } };
    return [...fixed, ...Array.from({ length: columns - fixed.length }, () => ({ ...lost }))];
  }

  #range(low, high) {
    if (low == null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return this.zeroBased ? [0, high + room] : [low - room, high + room];
  }

  #drawOdd(plot) {
    const pen = plot.ctx;
    const ratio = devicePixelRatio;
    const { top, height } = plot.bbox;
    for (const range of this.curve.odd) {
      if (!this.view.shows(range.from, range.to)) continue;
      const left = Math.max(plot.bbox.left, this.view.x(range.from) * ratio);
      const right = Math.min(plot.bbox.left + plot.bbox.width, this.view.x(range.to) * ratio);
      const width = Math.max(3 * ratio, right - left);
      pen.save();
      pen.fillStyle = alpha(palette.bad, 0.14);
      pen.fillRect(left, top, width, height);
      pen.fillStyle = stripes(pen, palette.bad);
      pen.fillRect(left, top, width, height);
      pen.font = palette.bold.replace("11px", `${11 * ratio}px`);
      const label = this.format(range.value);
      const box = pen.measureText(label).width + 8 * ratio;
      const labelLeft = Math.min(left + width + 3 * ratio, plot.bbox.left + plot.bbox.width - box);
      pen.fillStyle = palette.bad;
      pen.beginPath();
      pen.roundRect(labelLeft, top + 2 * ratio, box, 16 * ratio, 3 * ratio);
      pen.fill();
      pen.fillStyle = palette.surface;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(label, labelLeft + 4 * ratio, top + 10.5 * ratio);
      pen.restore();
    }
  }

  /** What the lane shows at an iteration, in words. */
  readout(iteration) {
    const { curve } = this;
    if (!curve) return "";
    const index = nearest(curve.iteration, iteration);
    if (index < 0 || curve.mean[index] === null) return "no data";
    const mean = this.format(curve.mean[index]);
    const [low, high] = [curve.min[index], curve.max[index]];
    if (!Number.isFinite(low) || low === high) return mean;
    return this.zeroBased ? `${mean} · max ${this.format(high)}` : `${mean} · ${this.format(low)} to ${this.format(high)}`;
  }
}
