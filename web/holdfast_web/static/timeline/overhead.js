// Measured overhead, budget, and changes of the interval.

import { alpha, CanvasLane, label, palette, roundStep } from "./canvas.js";
import { capitalized, count, duration, percent } from "./format.js";

const TALL = 68;
const TOP = 8;
const CUT_FACTOR = 3;
const CUT_GAP_PX = 70;
const TEXT_PX = 62;
const OUT_PX = 12;
/** Least distance between two labels of the scale. */
const TICK_PX = 14;

/** Return the interval between checkpoints as text; undefined where there is none. */
function every(row) {
  if (row?.interval_seconds != null) return `every ${duration(row.interval_seconds)}`;
  return row?.interval == null ? undefined : `every ${count(row.interval)}`;
}

const ascending = (values) => values.filter(Number.isFinite).sort((a, b) => a - b);
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];

/** Return the top of the scale; one budget of 100 % must not flatten the rest. */
export function topOf(rows) {
  const measured = ascending(rows.map((row) => row.measured_overhead));
  const budgets = ascending(rows.map((row) => row.budget));
  const highest = Math.max(budgets.at(-1) * 1.35, measured.at(-1) ?? 0);
  // keep the usual budget visible, because overhead is compared with it
  const usual = Math.max(CUT_FACTOR * (quantile(measured, 0.95) ?? 0), quantile(budgets, 0.5) * 1.35);
  return Math.min(highest, usual) * 1.06;
}

export class OverheadLane extends CanvasLane {
  height() {
    return TALL;
  }

  draw(pen) {
    const { view } = this;
    const paced = this.model.paced;
    if (paced.length === 0) {
      label(pen, "Not measured yet; profiling the first iterations", view.gutter + 2, TALL / 2, palette.muted, palette.font);
      return;
    }
    const top = topOf(this.#shown());
    const y = (value) => TALL - 6 - (Math.min(value, top) / top) * (TALL - 6 - TOP);
    this.#scale(pen, top, y);
    this.clipped(pen, () => {
      this.#budget(pen, paced, y);
      this.#measured(pen, paced, y);
      this.#intervals(pen, paced, y);
      this.#cuts(pen, paced, top);
    });
  }

  /** Return the decisions in the window and the one in force at its start. */
  #shown() {
    const { view } = this;
    const paced = this.model.paced;
    const first = paced.findLastIndex((row) => row.x <= view.from);
    const rows = paced.filter((row, index) => index === first || view.shows(row.x));
    return rows.length ? rows : paced.slice(0, 1);
  }

  /** Mark where a line leaves the scale, with its value. */
  #cuts(pen, paced, top) {
    let free = -Infinity;
    paced.forEach((row, index) => {
      const value = Math.max(row.budget, row.measured_overhead ?? 0);
      const end = paced[index + 1]?.x ?? this.model.end;
      if (value <= top || !this.view.shows(row.x, end)) return;
      const x = Math.max(this.view.x(row.x), this.view.gutter + 4);
      if (x < free) return;
      const text = `↑ ${percent(value)}`;
      const color = value === row.budget ? palette.budget : palette.accent;
      pen.fillStyle = palette.surface;
      pen.fillRect(x - 3, TOP - 6, 12, 12);
      pen.strokeStyle = color;
      pen.lineWidth = 1.6;
      for (const shift of [0, 5]) {
        pen.beginPath();
        pen.moveTo(x + shift - 2, TOP + 5);
        pen.lineTo(x + shift + 3, TOP - 5);
        pen.stroke();
      }
      label(pen, text, x + 12, TOP + 5, color, palette.bold);
      free = x + CUT_GAP_PX;
    });
  }

  #scale(pen, top, y) {
    const step = roundStep(top / 2.4);
    const [first, second, ...rest] = [0, step, 2 * step].filter((one) => one < top);
    const apart = y(first) - y(second ?? 0) >= TICK_PX;
    for (const value of apart ? [first, second, ...rest] : [first, ...rest]) {
      pen.fillStyle = palette.grid;
      pen.fillRect(this.view.gutter, y(value), this.view.plotWidth, 1);
      label(pen, percent(value), this.view.gutter - 6, y(value), palette.muted, palette.font, "right");
    }
  }

  /** Return a position in pixels, clamped to the plot, because invisible dashes cost as much as visible ones. */
  #near(place) {
    const { view } = this;
    return Math.min(Math.max(view.x(place), view.gutter - OUT_PX), view.gutter + view.plotWidth + OUT_PX);
  }

  #steps(pen, paced, value) {
    paced.forEach((row, index) => {
      const before = paced[index - 1];
      if (before?.budget === row.budget) return;
      const x = this.#near(row.x);
      if (before) pen.lineTo(x, value(before));
      else pen.moveTo(x, value(row));
      pen.lineTo(x, value(row));
    });
    pen.lineTo(this.#near(this.model.end), value(paced.at(-1)));
  }

  #budget(pen, paced, y) {
    pen.beginPath();
    this.#steps(pen, paced, (row) => y(row.budget));
    pen.strokeStyle = palette.budget;
    pen.lineWidth = 1.4;
    pen.setLineDash([5, 4]);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineTo(this.#near(this.model.end), 0);
    pen.lineTo(this.#near(paced[0].x), 0);
    pen.closePath();
    pen.fillStyle = alpha(palette.bad, 0.06);
    pen.fill();
  }

  #measured(pen, paced, y) {
    pen.beginPath();
    let drawing = false;
    for (const row of paced) {
      if (!Number.isFinite(row.measured_overhead)) continue;
      const point = [this.view.x(row.x), y(row.measured_overhead)];
      if (drawing) pen.lineTo(...point);
      else pen.moveTo(...point);
      drawing = true;
    }
    pen.strokeStyle = palette.accent;
    pen.lineWidth = 1.6;
    pen.stroke();
  }

  /** Draw a ring at each new interval, labeled where there is room. */
  #intervals(pen, paced, y) {
    let free = -Infinity;
    this.decisions = paced.filter((row, index) => every(paced[index - 1]) !== every(row) && Number.isFinite(row.measured_overhead));
    this.decisions.forEach((row, index) => {
      const x = this.view.x(row.x);
      const next = this.decisions[index + 1];
      const text = every(row) ?? "none";
      const at = y(row.measured_overhead);
      const room = next ? this.view.x(next.x) - x : Infinity;
      if (this.view.shows(row.x) && x > free && room > TEXT_PX) {
        const line = at < TALL / 2 ? at + 10 : at - 9;
        pen.font = palette.font;
        pen.fillStyle = palette.surface;
        pen.fillRect(x + 5, line - 6, pen.measureText(text).width + 4, 12);
        label(pen, text, x + 7, line, palette.muted, palette.font);
        free = x + TEXT_PX;
      }
      if (!this.view.shows(row.x)) return;
      pen.beginPath();
      pen.arc(this.view.x(row.x), y(row.measured_overhead), 3, 0, 7);
      pen.fillStyle = palette.surface;
      pen.fill();
      pen.strokeStyle = palette.accent;
      pen.lineWidth = 1.4;
      pen.stroke();
    });
  }

  hit(x) {
    const near = (this.decisions ?? []).filter((row) => Math.abs(this.view.x(row.x) - x) < 6);
    const row = near.at(-1);
    if (!row) return null;
    const unit = row.interval_seconds == null ? " iterations" : "";
    const interval = every(row) ? `${capitalized(every(row))}${unit}` : "No checkpoints";
    return {
      title: `${interval}, from iteration ${count(row.iteration)}`,
      lines: [`Measured overhead ${percent(row.measured_overhead)}, budget ${percent(row.budget)}`],
    };
  }

  readout(place) {
    const row = this.model?.paced.findLast((one) => one.x <= place);
    if (!row) return "";
    return `${percent(row.measured_overhead)} of ${percent(row.budget)} · ${every(row) ?? "no checkpoints"}`;
  }
}
