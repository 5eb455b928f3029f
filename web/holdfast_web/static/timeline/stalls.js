// Waits, one row for each kind; the taller, the longer.

import { CanvasLane, label } from "./canvas.js";
import { duration } from "./duration.js";
import { count } from "./format.js";
import { alpha, palette } from "./palette.js";

const ROW = 18;
const KINDS = { snapshot_wait: "copy", persist_backpressure: "persist", data_fetch: "fetch", data_prep: "prep", barrier: "barrier", restore: "restore" };
const STALL_NAMES = {
  snapshot_wait: "waited for the snapshot copy", persist_backpressure: "waited for earlier persists",
  data_fetch: "waited for data to be read", data_prep: "waited for data to be prepared",
  barrier: "waited for other ranks", restore: "restored",
};

const colourOf = (kind) => (kind === "restore" ? palette.info : palette.block);

export class StallLane extends CanvasLane {
  setModel(model) {
    this.dense = new Map(model.stall_density.map((one) => [one.kind, one]));
    const present = new Set([...model.stalls.map((stall) => stall.kind), ...this.dense.keys()]);
    this.kinds = Object.keys(KINDS).filter((kind) => present.has(kind));
    super.setModel(model);
  }

  height() {
    return Math.max(1, this.kinds.length) * ROW + 4;
  }

  draw(pen) {
    const { view } = this;
    if (this.kinds.length === 0) {
      label(pen, "no wait long enough to be reported in this window", view.gutter + 2, ROW / 2 + 2, palette.muted, palette.font);
      return;
    }
    this.kinds.forEach((kind, row) => {
      const base = (row + 1) * ROW;
      label(pen, KINDS[kind], view.gutter - 6, base - ROW / 2 + 1, palette.muted, palette.font, "right");
      pen.fillStyle = palette.grid;
      pen.fillRect(view.gutter, base, view.plotWidth, 1);
    });
    this.clipped(pen, () => (this.dense.size ? this.#bars(pen) : this.#each(pen)));
  }

  #each(pen) {
    const { view } = this;
    const shown = this.model.stalls.filter((stall) => view.shows(stall.x));
    const longest = Math.max(1e-9, ...shown.map((stall) => stall.seconds));
    const wide = view.axis === "time" ? 3 : Math.min(6, Math.max(2.5, view.plotWidth / view.span - 1));
    for (const stall of shown) {
      const base = (this.kinds.indexOf(stall.kind) + 1) * ROW;
      const high = Math.max(2, Math.sqrt(stall.seconds / longest) * (ROW - 4));
      pen.fillStyle = alpha(colourOf(stall.kind), this.#lost(stall) ? 0.35 : 0.9);
      pen.fillRect(view.x(stall.x) - wide / 2, base - high, wide, high);
    }
  }

  /** Too many for one each: the longest of every stretch. */
  #bars(pen) {
    const { view } = this;
    const longest = Math.max(1e-9, ...[...this.dense.values()].flatMap((one) => one.longest_seconds));
    for (const [kind, one] of this.dense) {
      const base = (this.kinds.indexOf(kind) + 1) * ROW;
      const wide = Math.max(1.5, (one.width / view.span) * view.plotWidth - 0.5);
      pen.fillStyle = alpha(colourOf(kind), 0.8);
      one.start.forEach((start, index) => {
        if (!view.shows(start, start + one.width)) return;
        const high = Math.max(2, Math.sqrt(one.longest_seconds[index] / longest) * (ROW - 4));
        pen.fillRect(view.x(start), base - high, wide, high);
      });
    }
  }

  #lost(stall) {
    return stall.iteration > (this.model.kept.get(stall.lineage) ?? -Infinity);
  }

  note() {
    if (!this.dense.size) return "";
    return `${count(this.model.stalls_total)} waits, the longest of each stretch: zoom in for each`;
  }

  hit(x, y) {
    const kind = this.kinds[Math.floor((y - 2) / ROW)];
    return this.dense.size ? this.#denseHit(kind, this.view.place(x)) : this.#eachHit(kind, x);
  }

  #denseHit(kind, place) {
    const one = this.dense.get(kind);
    const index = one ? one.start.findIndex((start) => start <= place && place < start + one.width) : -1;
    if (index < 0) return null;
    const lines = [`${count(one.count[index])} times ${STALL_NAMES[kind]}, ${duration(one.seconds[index])} in all`, "zoom in to tell them apart"];
    return { title: `up to ${duration(one.longest_seconds[index])}`, lines };
  }

  #eachHit(kind, x) {
    const near = this.model.stalls.filter((stall) => stall.kind === kind && Math.abs(this.view.x(stall.x) - x) < 5);
    if (near.length === 0) return null;
    const worst = near.reduce((a, b) => (a.seconds > b.seconds ? a : b));
    const lines = [`${STALL_NAMES[kind]} at iteration ${count(worst.iteration)}, lineage ${worst.lineage}`];
    if (near.length > 1) lines.push(`longest of ${near.length} here; zoom in to tell them apart`);
    return { title: duration(worst.seconds), lines };
  }
}
