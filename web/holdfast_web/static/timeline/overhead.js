// Measured overhead against the budget in force, and where the interval changed.

import { CanvasLane, label } from "./canvas.js";
import { count, percent } from "./format.js";
import { alpha, palette } from "./palette.js";
import { roundStep } from "./scale.js";

const TALL = 68;
const TOP = 8;
const CUT_FACTOR = 3;
const CUT_GAP_PX = 70;
const TEXT_PX = 62;
const OUT_PX = 12;

const ascending = (values) => values.filter(Number.isFinite).sort((a, b) => a - b);
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];

/** The highest value that the lane shows: one budget of 100 % must not flatten everything else. */
export function topOf(rows) {
  const measured = ascending(rows.map((row) => row.measured_overhead));
  const budgets = ascending(rows.map((row) => row.budget));
  const highest = Math.max(budgets.at(-1) * 1.35, measured.at(-1) ?? 0);
  // the usual budget is what overhead is read against: it stays in sight however little is spent
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
      label(pen, "not measured yet: the first iterations are being profiled", view.gutter + 2, TALL / 2, palette.muted, palette.font);
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

  /** The decisions in the window, and the one that was in force when it begins. */
  #shown() {
    const { view } = this;
    const paced = this.model.paced;
    const first = paced.findLastIndex((row) => row.x <= view.from);
    const rows = paced.filter((row, index) => index === first || view.shows(row.x));
    return rows.length ? rows : paced.slice(0, 1);
  }

  /** Where a line leaves the scale: a break in it, and how high it goes. */
  #cuts(pen, paced, top) {
    let free = -Infinity;
    paced.forEach((row, index) => {
      const value = Math.max(row.budget, row.measured_overhead ?? 0);
      const end = paced[index + 1]?.x ?? this.model.end;
      if (value <= top || !this.view.shows(row.x, end)) return;
      const x = Math.max(this.view.x(row.x), this.view.gutter + 4);
      if (x < free) return;
      const text = `↑ ${percent(value)}`;
      const colour = value === row.budget ? palette.budget : palette.accent;
      pen.fillStyle = palette.surface;
      pen.fillRect(x - 3, TOP - 6, 12, 12);
      pen.strokeStyle = colour;
      pen.lineWidth = 1.6;
      for (const shift of [0, 5]) {
        pen.beginPath();
        pen.moveTo(x + shift - 2, TOP + 5);
        pen.lineTo(x + shift + 3, TOP - 5);
        pen.stroke();
      }
      label(pen, text, x + 12, TOP + 5, colour, palette.bold);
      free = x + CUT_GAP_PX;
    });
  }

  #scale(pen, top, y) {
    const step = roundStep(top / 2.4);
    for (const value of [0, step, 2 * step].filter((one) => one < top)) {
      pen.fillStyle = palette.grid;
      pen.fillRect(this.view.gutter, y(value), this.view.plotWidth, 1);
      label(pen, percent(value), this.view.gutter - 6, y(value), palette.muted, palette.font, "right");
    }
  }

  /** A place in pixels, no further out than just beyond the plot: dashes out of sight take as long as those in sight. */
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

  /** Each new interval: a ring and, where there is room, what it is. */
  #intervals(pen, paced, y) {
    let free = -Infinity;
    this.decisions = paced.filter((row, index) => paced[index - 1]?.interval !== row.interval && Number.isFinite(row.measured_overhead));
    this.decisions.forEach((row, index) => {
      const x = this.view.x(row.x);
      const next = this.decisions[index + 1];
      const text = row.interval == null ? "none" : `every ${count(row.interval)}`;
      const at = y(row.measured_overhead);
      const room = next ? this.view.x(next.x) - x : Infinity;
      if (this.view.shows(row.x) && x > free && room > TEXT_PX) {
        label(pen, text, x + 7, at < TALL / 2 ? at + 10 : at - 9, palette.muted, palette.font);
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
    const every = row.interval == null ? "No checkpoints" : `Every ${count(row.interval)} iterations`;
    return {
      title: `${every}, from iteration ${count(row.iteration)}`,
      lines: [`decided at a measured overhead of ${percent(row.measured_overhead)}, with a budget of ${percent(row.budget)}`],
    };
  }

  readout(place) {
    const row = this.model?.paced.findLast((one) => one.x <= place);
    if (!row) return "";
    const every = row.interval == null ? "no checkpoints" : `every ${count(row.interval)}`;
    return `${percent(row.measured_overhead)} of ${percent(row.budget)} · ${every}`;
  }
}
