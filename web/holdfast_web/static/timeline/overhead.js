// Measured overhead against the budget in force, and where the interval changed.

import { CanvasLane, label } from "./canvas.js";
import { count, percent } from "./format.js";
import { alpha, palette } from "./palette.js";

const TALL = 68;

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [5, 2, 1].find((factor) => factor * power <= rough) * power;
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
    const top = Math.max(...paced.map((row) => Math.max(row.budget * 1.35, row.measured_overhead ?? 0))) * 1.06;
    const y = (value) => TALL - 6 - (value / top) * (TALL - 14);
    this.#scale(pen, top, y);
    this.clipped(pen, () => {
      this.#budget(pen, paced, y);
      this.#measured(pen, paced, y);
      this.#intervals(pen, paced, y);
    });
  }

  #scale(pen, top, y) {
    const step = niceStep(top / 2.4);
    for (const value of [0, step, 2 * step].filter((one) => one < top)) {
      pen.fillStyle = palette.grid;
      pen.fillRect(this.view.gutter, y(value), this.view.plotWidth, 1);
      label(pen, percent(value), this.view.gutter - 6, y(value), palette.muted, palette.font, "right");
    }
  }

  #steps(pen, paced, value) {
    paced.forEach((row, index) => {
      const x = this.view.x(row.iteration);
      if (index === 0) pen.moveTo(x, value(row));
      else pen.lineTo(x, value(paced[index - 1]));
      pen.lineTo(x, value(row));
    });
    pen.lineTo(this.view.x(this.model.extent[1]), value(paced.at(-1)));
  }

  #budget(pen, paced, y) {
    pen.beginPath();
    this.#steps(pen, paced, (row) => y(row.budget));
    pen.strokeStyle = palette.budget;
    pen.lineWidth = 1.4;
    pen.setLineDash([5, 4]);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineTo(this.view.x(this.model.extent[1]), 0);
    pen.lineTo(this.view.x(paced[0].iteration), 0);
    pen.closePath();
    pen.fillStyle = alpha(palette.bad, 0.06);
    pen.fill();
  }

  #measured(pen, paced, y) {
    pen.beginPath();
    let drawing = false;
    for (const row of paced) {
      if (!Number.isFinite(row.measured_overhead)) continue;
      const point = [this.view.x(row.iteration), y(row.measured_overhead)];
      if (drawing) pen.lineTo(...point);
      else pen.moveTo(...point);
      drawing = true;
    }
    pen.strokeStyle = palette.accent;
    pen.lineWidth = 1.6;
    pen.stroke();
  }

  #intervals(pen, paced, y) {
    paced.forEach((row, index) => {
      if (index > 0 && paced[index - 1].interval === row.interval) return;
      if (!Number.isFinite(row.measured_overhead)) return;
      pen.beginPath();
      pen.arc(this.view.x(row.iteration), y(row.measured_overhead), 3, 0, 7);
      pen.fillStyle = palette.surface;
      pen.fill();
      pen.strokeStyle = palette.accent;
      pen.lineWidth = 1.4;
      pen.stroke();
    });
  }

  #at(iteration) {
    return this.model?.paced.findLast((row) => row.iteration <= iteration);
  }

  readout(iteration) {
    const row = this.#at(iteration);
    if (!row) return "";
    const every = row.interval == null ? "no checkpoints" : `every ${count(row.interval)}`;
    return `${percent(row.measured_overhead)} of ${percent(row.budget)} · ${every}`;
  }
}
