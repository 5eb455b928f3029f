// Waits, one row for each kind; the taller, the longer.

import { CanvasLane, label } from "./canvas.js";
import { count, duration } from "./format.js";
import { alpha, palette } from "./palette.js";

const ROW = 18;
const KINDS = { snapshot_wait: "copy", persist_backpressure: "persist", data_fetch: "fetch", data_prep: "prep", barrier: "barrier", restore: "restore" };
export const STALL_NAMES = {
  snapshot_wait: "waited for the snapshot copy", persist_backpressure: "waited for earlier persists",
  data_fetch: "waited for data to be read", data_prep: "waited for data to be prepared",
  barrier: "waited for other ranks", restore: "restored",
};

export class StallLane extends CanvasLane {
  setModel(model) {
    const present = new Set(model.stalls.map((stall) => stall.kind));
    this.kinds = Object.keys(KINDS).filter((kind) => present.has(kind));
    super.setModel(model);
  }

  height() {
    return Math.max(1, this.kinds.length) * ROW + 4;
  }

  draw(pen) {
    const { view, model } = this;
    if (this.kinds.length === 0) {
      label(pen, "no wait long enough to be reported in this window", view.gutter + 2, ROW / 2 + 2, palette.muted, palette.font);
      return;
    }
    const shown = model.stalls.filter((stall) => view.shows(stall.iteration));
    const longest = Math.max(1e-9, ...shown.map((stall) => stall.seconds));
    this.kinds.forEach((kind, row) => {
      const base = (row + 1) * ROW;
      label(pen, KINDS[kind], view.gutter - 6, base - ROW / 2 + 1, palette.muted, palette.font, "right");
      pen.fillStyle = palette.grid;
      pen.fillRect(view.gutter, base, view.plotWidth, 1);
    });
    this.clipped(pen, () => {
      for (const stall of shown) {
        const base = (this.kinds.indexOf(stall.kind) + 1) * ROW;
        const high = Math.max(2, Math.sqrt(stall.seconds / longest) * (ROW - 4));
        const wide = Math.max(2.5, view.plotWidth / view.span - 1);
        pen.fillStyle = alpha(stall.kind === "restore" ? palette.info : palette.block, this.#lost(stall) ? 0.35 : 0.9);
        pen.fillRect(view.x(stall.iteration) - Math.min(wide, 6) / 2, base - high, Math.min(wide, 6), high);
      }
    });
  }

  #lost(stall) {
    return stall.iteration > (this.model.kept.get(stall.lineage) ?? -Infinity);
  }

  hit(x, y) {
    const kind = this.kinds[Math.floor((y - 2) / ROW)];
    const near = this.model.stalls.filter((stall) => stall.kind === kind && Math.abs(this.view.x(stall.iteration) - x) < 5);
    if (near.length === 0) return null;
    const worst = near.reduce((a, b) => (a.seconds > b.seconds ? a : b));
    const lines = [`${STALL_NAMES[kind]} at iteration ${count(worst.iteration)}, lineage ${worst.lineage}`];
    if (near.length > 1) lines.push(`longest of ${near.length} here; zoom in to tell them apart`);
    return { title: duration(worst.seconds), lines };
  }
}
