// Snapshot and persist of each checkpoint: in iterations, the length of a bar is the training it overlapped.

import { CanvasLane, label } from "./canvas.js";
import { duration } from "./duration.js";
import { count, size } from "./format.js";
import { FAILED } from "./glyphs.js";
import { alpha, palette } from "./palette.js";

const ROW = 13;
const BAR = 9;
const DENSE_TALL = 44;

export class PipelineLane extends CanvasLane {
  height() {
    if (this.model.checkpoint_density) return DENSE_TALL;
    const rows = 1 + Math.max(0, ...this.model.spans.map((span) => span.row));
    return rows * ROW + 8;
  }

  draw(pen) {
    const { model, view } = this;
    this.clipped(pen, () => {
      if (model.checkpoint_density) return this.#density(pen, model.checkpoint_density);
      for (const span of model.spans) if (view.shows(span.from, span.to)) this.#bar(pen, span);
    });
  }

  #none() {
    const { checkpoints_total: total, paced, lastIteration } = this.model;
    if (total > 0 || this.view.from > this.model.extent[0]) return "no checkpoint in this window";
    const interval = paced.at(-1)?.interval;
    if (paced.length === 0) return "no checkpoint yet: the first is due when the first iterations are profiled";
    if (interval == null) return "no checkpoint yet: they are paused";
    return `no checkpoint yet: one is due every ${count(interval)} iterations, ${count(lastIteration)} are done`;
  }

  /** Too many for a bar each: how long the slowest of every stretch took. */
  #density(pen, dense) {
    const { view } = this;
    const total = (index) => dense.snapshot_seconds[index] + dense.persist_seconds[index];
    const longest = Math.max(1e-9, ...dense.start.map((_, index) => total(index)));
    const high = (seconds) => (seconds / longest) * (DENSE_TALL - 12);
    const wide = Math.max(1, (dense.width / view.span) * view.plotWidth - 0.5);
    dense.start.forEach((start, index) => {
      if (!view.shows(start, start + dense.width)) return;
      const x = view.x(start);
      const copied = high(dense.snapshot_seconds[index]);
      pen.fillStyle = alpha(palette.accent, 0.55);
      pen.fillRect(x, DENSE_TALL - 4 - high(total(index)), wide, high(dense.persist_seconds[index]));
      pen.fillStyle = alpha(palette.snapshot, 0.7);
      pen.fillRect(x, DENSE_TALL - 4 - copied, wide, copied);
      if (!dense.failed[index]) return;
      pen.fillStyle = palette.bad;
      pen.fillRect(x, DENSE_TALL - 3, Math.max(2, wide), 3);
    });
    label(pen, duration(longest), view.gutter + 4, 7, palette.muted, palette.font);
  }

  #bar(pen, span) {
    const { view } = this;
    const y = 4 + span.row * ROW;
    const left = view.x(span.from);
    const copied = Math.max(left + 1.5, view.x(span.copied));
    const right = Math.max(copied + 1.5, view.x(span.to));
    const failed = FAILED.includes(span.checkpoint.state);
    const persist = failed ? palette.bad : palette.accent;
    pen.globalAlpha = span.checkpoint.abandoned ? 0.4 : 1;
    const { ranks } = span.checkpoint;
    const strip = (copied, right, y, high) => {
      pen.fillStyle = alpha(persist, span.open ? 0.28 : 0.5);
      pen.fillRect(copied, y, right - copied, high);
      pen.fillStyle = alpha(palette.snapshot, 0.55);
      pen.fillRect(left, y, copied - left, high);
    };
    // of several ranks a strip each, as long as its own part took
    const high = BAR / ranks.length;
    const wide = (right - left) / Math.max(...ranks.map(took));
    if (ranks[1]) ranks.forEach((one, index) => strip(left + one.snapshot_seconds * wide, left + took(one) * wide, y + index * high, high - 0.3));
    else strip(copied, right, y, BAR);
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

  note() {
    const { checkpoint_density: dense, checkpoints_total: total } = this.model;
    if (dense) return `${count(total)} checkpoints, the slowest of each stretch: zoom in for bars`;
    return this.model.checkpoints.length ? "" : this.#none();
  }

  hit(x, y) {
    const place = this.view.place(x);
    if (this.model.checkpoint_density) return denseHit(this.model.checkpoint_density, place);
    const slack = (5 / this.view.plotWidth) * this.view.span;
    const row = Math.floor((y - 4) / ROW);
    const near = this.model.spans.filter((s) => s.row === row && s.from - slack <= place && s.to + slack >= place);
    const span = near.at(-1);
    return span ? describe(span, this.view.axis) : null;
  }
}

const took = (rank) => rank.snapshot_seconds + rank.persist_seconds;

function denseHit(dense, place) {
  const index = dense.start.findIndex((start) => start <= place && place < start + dense.width);
  if (index < 0) return null;
  const states = [`${count(dense.durable[index])} durable`];
  if (dense.failed[index]) states.push(`${count(dense.failed[index])} failed`);
  return {
    title: `${count(dense.count[index])} checkpoints`,
    lines: [states.join(", "), `snapshot up to ${duration(dense.snapshot_seconds[index])}, persist up to ${duration(dense.persist_seconds[index])}`, "zoom in for bars"],
  };
}

function describe({ checkpoint, from, to, open }, axis) {
  const lines = [`${checkpoint.state} · ${size(checkpoint.payload_bytes)} · lineage ${checkpoint.lineage}`];
  if (checkpoint.snapshot_seconds != null) {
    const stalled = checkpoint.stall_seconds != null ? `, of which ${duration(checkpoint.stall_seconds)} blocking` : "";
    lines.push(`snapshot ${duration(checkpoint.snapshot_seconds)}${stalled}`);
  }
  if (checkpoint.persist_seconds != null) lines.push(`persist ${duration(checkpoint.persist_seconds)}`);
  const [slow] = checkpoint.ranks;
  if (slow) lines.push(`slowest rank ${slow.rank}: ${duration(slow.snapshot_seconds)} and ${duration(slow.persist_seconds)}`);
  const long = axis === "time" ? duration(to - from) : `${count(to - from)} iterations`;
  lines.push(open ? `under way for ${long}` : axis === "time" ? `${long} in all` : `overlapped ${long}`);
  if (checkpoint.reason) lines.push(checkpoint.reason);
  return { title: `Checkpoint of iteration ${count(checkpoint.iteration)}`, lines, checkpoint };
}
