// Snapshot and persist of each checkpoint, in iterations: the length of a bar is the training it overlapped.

import { CanvasLane, label } from "./canvas.js";
import { count, duration, size } from "./format.js";
import { alpha, palette } from "./palette.js";

const ROW = 13;
const BAR = 9;

export class PipelineLane extends CanvasLane {
  height() {
    const rows = 1 + Math.max(0, ...this.model.spans.map((span) => span.row));
    return rows * ROW + 8;
  }

  draw(pen) {
    if (this.model.spans.length === 0) {
      label(pen, "no checkpoint in this window", this.view.gutter + 2, ROW / 2 + 3, palette.muted, palette.font);
    }
    this.clipped(pen, () => {
      for (const span of this.model.spans) if (this.view.shows(span.from, span.to)) this.#bar(pen, span);
    });
  }

  #bar(pen, span) {
    const { view } = this;
    const y = 4 + span.row * ROW;
    const faded = span.checkpoint.abandoned ? 0.4 : 1;
    const left = view.x(span.from);
    const copied = Math.max(left + 1.5, view.x(span.copied));
    const right = Math.max(copied + 1.5, view.x(span.to));
    const failed = ["failed", "torn", "damaged"].includes(span.checkpoint.state);
    const persist = failed ? palette.bad : palette.accent;
    pen.globalAlpha = faded;
    pen.fillStyle = alpha(persist, span.open ? 0.28 : 0.5);
    pen.fillRect(copied, y, right - copied, BAR);
    pen.fillStyle = alpha(palette.snapshot, 0.55);
    pen.fillRect(left, y, copied - left, BAR);
    if (span.blocked > 0) {
      const wide = Math.max(1.5, (span.blocked / view.span) * view.plotWidth);
      pen.fillStyle = palette.block;
      pen.fillRect(Math.max(left, copied - wide), y - 1, Math.min(wide, Math.max(copied - left, wide)), BAR + 2);
    }
    if (right - left > 14) {
      pen.fillStyle = persist;
      pen.fillRect(right - 1.5, y, 1.5, BAR);
    }
    if (failed) this.#cross(pen, right + 6, y + BAR / 2);
    pen.globalAlpha = 1;
  }

  #cross(pen, x, y) {
    pen.strokeStyle = palette.bad;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const way of [-1, 1]) {
      pen.moveTo(x - 3, y - 3 * way);
      pen.lineTo(x + 3, y + 3 * way);
    }
    pen.stroke();
  }

  hit(x, y) {
    const iteration = this.view.iteration(x);
    const slack = (5 / this.view.plotWidth) * this.view.span;
    const row = Math.floor((y - 4) / ROW);
    const near = this.model.spans.filter((s) => s.row === row && s.from - slack <= iteration && s.to + slack >= iteration);
    const span = near.at(-1);
    return span ? describe(span) : null;
  }
}

function describe({ checkpoint, from, to, open }) {
  const lines = [`${checkpoint.state} · ${size(checkpoint.payload_bytes)} · lineage ${checkpoint.lineage}`];
  if (checkpoint.snapshot_seconds != null) {
    const stalled = checkpoint.stall_seconds != null ? `, of which ${duration(checkpoint.stall_seconds)} blocking` : "";
    lines.push(`snapshot ${duration(checkpoint.snapshot_seconds)}${stalled}`);
  }
  if (checkpoint.persist_seconds != null) lines.push(`persist ${duration(checkpoint.persist_seconds)}`);
  lines.push(`${open ? "under way for" : "overlapped"} ${count(to - from)} iterations`);
  if (checkpoint.reason) lines.push(checkpoint.reason);
  return { title: `Checkpoint of iteration ${count(checkpoint.iteration)}`, lines, checkpoint };
}
