// Lineages: one line per lineage with its restore points, and an arc per restore.

import { alpha, CanvasLane, FAILED, glyph, label, marks, palette, stripes } from "./canvas.js";
import { count, duration, sizes, stateName } from "./format.js";
import { barsOf, emptyRanges, runs } from "./model.js";

const ROW = 26;
const MOST_ROWS = 12;
const UNFOLDED_ROWS = 4;
const LOST_PX = 8;
const LEFT_OUT_PX = 6;
const DENSE_PX = 9;
const TARGET_PX = 13;
const SETTLE_MS = 80;

export class LineageLane extends CanvasLane {
  selected = null;
  /** The point to compare the selected one with. */
  other = null;
  everything = null;

  /** @param choose called with the id of a point, and whether to compare it with the selected one */
  constructor(element, view, choose) {
    super(element, view);
    this.list = document.createElement("div");
    Object.assign(this.list, { className: "points", tabIndex: 0 });
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", "Restore points in this window");
    // screen readers click without a pointer
    this.list.addEventListener("click", (event) => {
      const id = event.target.closest("[role=option]")?.dataset.id;
      if (id) choose(id, event.shiftKey);
    });
    this.body.append(this.list);
  }

  setModel(model) {
    this.rows = this.#rows(model);
    super.setModel(model);
  }

  /** Assign rows: one per lineage, or one for the current work and one for abandoned work. */
  #rows(model) {
    const newest = [...model.lineages].sort((a, b) => b.lineage - a.lineage);
    this.folds = newest.length > 1;
    this.folded = this.folds && !(this.everything ?? newest.length <= UNFOLDED_ROWS);
    if (this.folded) return new Map(newest.map((row) => [row.lineage, row.abandoned ? 1 : 0]));
    return new Map(newest.map((row, index) => [row.lineage, Math.min(index, MOST_ROWS - 1)]));
  }

  /** Show all lineages or fold them; null decides by their number. */
  unfold(everything) {
    this.everything = everything;
    if (this.model) this.setModel(this.model);
  }

  height() {
    const rows = this.folded ? 2 : Math.max(1, Math.min(MOST_ROWS, this.model.lineages.length));
    return rows * ROW + 8;
  }

  /** Return the height of a lineage, or of its abandoned part when folded. */
  #y(lineage, abandoned = false) {
    const row = this.folded && abandoned ? 1 : (this.rows.get(lineage) ?? 0);
    return 4 + (row + 0.5) * ROW;
  }

  draw(pen) {
    if (this.folded) this.#foldedNames(pen);
    else this.#names(pen);
    this.clipped(pen, () => {
      for (const { lineage, parts } of this.model.lineages) for (const part of parts) this.#line(pen, lineage, part);
      for (const lineage of this.model.lineages) this.#branch(pen, lineage);
      for (const lineage of this.model.lineages) this.#leftOut(pen, lineage);
      this.#points(pen);
      for (const { lineage, parts } of this.model.lineages) for (const part of parts) this.#lostWords(pen, lineage, part);
    });
    // update the focusable targets once the window is at rest; with every frame they cost too much
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.#options(), SETTLE_MS);
  }

  #foldedNames(pen) {
    label(pen, `L${this.model.currentLineage}`, this.view.gutter - 8, 4 + ROW / 2, palette.accent, palette.bold, "right");
    label(pen, "old", this.view.gutter - 8, 4 + ROW * 1.5, palette.muted, palette.font, "right");
  }

  #names(pen) {
    const older = this.model.lineages.length > MOST_ROWS;
    for (const [lineage, row] of this.rows) {
      if (row === MOST_ROWS - 1 && older && lineage !== this.model.currentLineage - row) continue;
      const name = row === MOST_ROWS - 1 && older ? "older" : `L${lineage}`;
      const current = lineage === this.model.currentLineage;
      label(pen, name, this.view.gutter - 8, this.#y(lineage), current ? palette.accent : palette.muted, current ? palette.bold : palette.font, "right");
    }
  }

  #line(pen, lineage, part) {
    const { view } = this;
    if (part.until > part.from) {
      pen.fillStyle = alpha(palette.accent, 0.55);
      pen.fillRect(view.x(part.from), this.#y(lineage) - 1, view.x(part.until) - view.x(part.from), 2);
    }
    if (part.to > part.until) this.#lost(pen, part, this.#y(lineage, true));
  }

  /** Hatch the place of the data that a lineage left out at its start; it has no width in iterations. */
  #leftOut(pen, row) {
    if (!row.leftOut.length) return;
    const [left, y] = [this.view.x(row.from) - 1, this.#y(row.lineage, row.abandoned)];
    pen.fillStyle = palette.surface;
    pen.fillRect(left, y - LEFT_OUT_PX, LEFT_OUT_PX * 2, LEFT_OUT_PX * 2);
    pen.fillStyle = stripes(pen, palette.warn);
    pen.fillRect(left, y - LEFT_OUT_PX, LEFT_OUT_PX * 2, LEFT_OUT_PX * 2);
    pen.strokeStyle = palette.warn;
    pen.lineWidth = 1;
    pen.strokeRect(left, y - LEFT_OUT_PX, LEFT_OUT_PX * 2, LEFT_OUT_PX * 2);
  }

  #leftOutHit(x, y) {
    const row = this.model.lineages.find(
      (one) => one.leftOut.length && Math.abs(this.view.x(one.from) + LEFT_OUT_PX - x) <= LEFT_OUT_PX + 2 && Math.abs(this.#y(one.lineage, one.abandoned) - y) <= LEFT_OUT_PX + 2,
    );
    if (!row) return null;
    const batches = row.leftOut.map(({ batches, loader }) => `${count(batches)} ${batches === 1 ? "batch" : "batches"}${loader ? ` of loader ${loader}` : ""}`);
    return { title: `Data left out: ${batches.join(", ")}`, lines: [`Lineage ${row.lineage} continues after iteration ${count(row.iteration)} without this data`] };
  }

  #lostPixels({ until, to }) {
    const { view } = this;
    return [Math.max(view.gutter - 2, view.x(until)), Math.min(view.gutter + view.plotWidth + 2, view.x(to))];
  }

  /** Hatch lost work. */
  #lost(pen, part, y) {
    const [left, right] = this.#lostPixels(part);
    if (right <= left) return;
    pen.fillStyle = alpha(palette.lost, 0.1);
    pen.fillRect(left, y - LOST_PX, right - left, 2 * LOST_PX);
    pen.fillStyle = stripes(pen, alpha(palette.lost, 0.5));
    pen.fillRect(left, y - LOST_PX, right - left, 2 * LOST_PX);
    pen.fillStyle = palette.lost;
    pen.fillRect(left, y - 0.5, right - left, 1);
  }

  /** Label lost work where there is room between its points. */
  #lostWords(pen, lineage, part) {
    const [left, right] = this.#lostPixels(part);
    const text = `lost: ${lostText(part.lost)}`;
    pen.font = palette.font;
    const wide = pen.measureText(text).width + 10;
    if (part.to <= part.until || wide > right - left - 8) return;
    const y = this.#y(lineage, true);
    const taken = this.model.checkpoints.filter((row) => this.#y(row.lineage, row.abandoned) === y).map((row) => this.view.x(row.x));
    const edges = [left, ...taken.filter((x) => x > left && x < right), right];
    const room = edges.findIndex((x, index) => index > 0 && x - edges[index - 1] > wide + 14);
    if (room < 0) return;
    const middle = (edges[room - 1] + edges[room]) / 2;
    pen.fillStyle = palette.surface;
    pen.fillRect(middle - wide / 2, y - 7, wide, 14);
    label(pen, text, middle, y, palette.muted, palette.font, "center");
  }

  #branch(pen, row) {
    const { lineage, parent, order } = row;
    if (!parent) return;
    const { model, view } = this;
    const parentLineage = Number(parent.split("-")[1]);
    const stands = !row.abandoned;
    const [x, y] = [view.x(row.from), this.#y(lineage)];
    this.#stem(pen, x, this.#y(parentLineage), y, stands ? alpha(palette.accent, 0.55) : alpha(palette.lost, 0.8));
    if (view.axis === "time") return;
    const made = model.orders.find((one) => one.id === order);
    const from = made?.from_lineage ?? parentLineage;
    const left = made?.from_iteration ?? model.lineages.find((one) => one.lineage === from)?.last_iteration;
    if (left != null && left > row.from) this.#arc(pen, view.x(left), this.#y(from, true), x, y);
  }

  #stem(pen, x, fromY, toY, color) {
    pen.strokeStyle = color;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(x, fromY);
    pen.lineTo(x, toY);
    pen.stroke();
  }

  /** Draw an arrow from the iteration before the restore to the restored one. */
  #arc(pen, fromX, fromY, toX, toY) {
    const top = toY - ROW / 2 + 3;
    const round = Math.min(6, (fromX - toX) / 2);
    pen.strokeStyle = palette.info;
    pen.fillStyle = palette.info;
    pen.lineWidth = 1.3;
    pen.beginPath();
    pen.moveTo(fromX, fromY);
    pen.arcTo(fromX, top, toX, top, round);
    pen.arcTo(toX, top, toX, toY, round);
    pen.lineTo(toX, toY - 5);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(toX, toY - 1);
    pen.lineTo(toX - 3.5, toY - 7);
    pen.lineTo(toX + 3.5, toY - 7);
    pen.fill();
    pen.fillRect(fromX - 1, fromY - 5, 2, 10);
  }

  #points(pen) {
    const shown = this.model.checkpoints.filter((row) => this.view.shows(row.x));
    const lines = Map.groupBy(shown.filter(isPlain), (row) => `${row.state} ${this.#y(row.lineage, row.abandoned)}`);
    for (const rows of lines.values()) this.#ribbons(pen, rows);
    for (const row of shown) if (!isPlain(row)) glyph(pen, row, this.view.x(row.x), this.#y(row.lineage, row.abandoned), 4.5);
    for (const [id, dash] of [[this.selected, []], [this.other, [3, 3]]]) {
      const chosen = shown.find((row) => row.id === id);
      if (!chosen) continue;
      const [x, y] = [this.view.x(chosen.x), this.#y(chosen.lineage, chosen.abandoned)];
      glyph(pen, chosen, x, y, 5);
      pen.strokeStyle = palette.text;
      pen.lineWidth = 1.6;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.arc(x, y, 9, 0, 7);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  /** Draw the points of one line; those that are closer than a glyph as one ribbon, so that a constant interval looks constant. */
  #ribbons(pen, rows) {
    const { view } = this;
    const dense = barsOf(rows[0].state, this.model);
    const reach = (DENSE_PX / view.plotWidth) * view.span;
    // of very many, only some are known one by one; the density shows where there is none between two of them
    const empty = dense ? emptyRanges(dense, reach) : [];
    const apart = (a, b) => (dense ? empty.some(([from, to]) => from >= a.x && to <= b.x) : b.x - a.x >= reach);
    const places = [0];
    for (let index = 1; index < rows.length; index += 1) places.push(places[index - 1] + (apart(rows[index - 1], rows[index]) ? 1 : 0));
    for (const [first, last] of runs(places, 1)) {
      const [row, end] = [rows[first], rows[last]];
      const [left, y] = [view.x(row.x), this.#y(row.lineage, row.abandoned)];
      if (first === last) glyph(pen, row, left, y, 4.5);
      else ribbon(pen, row, left, view.x(end.x), y);
    }
  }

  /** Place focusable targets over the canvas, without overlaps. */
  #options() {
    const chosen = [];
    // newest first, and those that can be restored before the others
    const shown = this.model.checkpoints.filter((row) => this.view.shows(row.x)).reverse();
    for (const row of shown.sort((a, b) => b.restorable - a.restorable)) {
      const [x, line] = [this.view.x(row.x), this.#y(row.lineage, row.abandoned)];
      const isCovered = () => chosen.some((one) => one.line === line && Math.abs(one.x - x) < TARGET_PX);
      if (row.id === this.selected || row.id === this.other || !isCovered()) chosen.push({ row, x, line });
    }
    chosen.sort((a, b) => b.x - a.x);
    while (this.list.children.length > chosen.length) this.list.lastChild.remove();
    while (this.list.children.length < chosen.length) {
      const option = document.createElement("div");
      option.setAttribute("role", "option");
      this.list.append(option);
    }
    chosen.forEach(({ row, x }, index) => this.#place(this.list.children[index], row, x));
    if (chosen.some(({ row }) => row.id === this.selected)) this.list.setAttribute("aria-activedescendant", `point-${this.selected}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #place(option, row, x) {
    option.style.transform = `translate(${(x - 7).toFixed(1)}px, ${this.#y(row.lineage, row.abandoned) - 10}px)`;
    const selected = String(row.id === this.selected || row.id === this.other);
    const name = [`Iteration ${count(row.iteration)}`, ...marks(row), stateName(row) + (row.kind === "safety" ? ", safety checkpoint" : ""), `lineage ${row.lineage}`].join(", ");
    if (option.dataset.id === row.id && option.ariaLabel === name && option.getAttribute("aria-selected") === selected) return;
    Object.assign(option.dataset, { id: row.id, state: row.state });
    option.id = `point-${row.id}`;
    option.setAttribute("aria-selected", selected);
    option.ariaLabel = name;
  }

  hit(x, y) {
    const within = this.model.checkpoints.filter(
      (row) => Math.abs(this.view.x(row.x) - x) < 8 && Math.abs(this.#y(row.lineage, row.abandoned) - y) < ROW / 2,
    );
    if (within.length === 0) return this.#leftOutHit(x, y) ?? this.#lostHit(x, y);
    // retired points are small: one may lie below the glyph of another one
    const kept = within.filter((row) => row.state !== "missing");
    const near = kept.length ? kept : within;
    const row = near.reduce((a, b) => (Math.abs(this.view.x(a.x) - x) < Math.abs(this.view.x(b.x) - x) ? a : b));
    const lines = [...marks(row), `${row.kind} · ${stateName(row)} · lineage ${row.lineage} · ${sizes(row)}`];
    if (row.persist_seconds != null) lines.push(`Snapshot ${duration(row.snapshot_seconds)}, persist ${duration(row.persist_seconds)}`);
    if (row.reason) lines.push(row.reason);
    if (row.restorable) lines.push("Click to select, then restore");
    return { title: `Iteration ${count(row.iteration)}`, lines, checkpoint: row };
  }

  #lostHit(x, y) {
    const place = this.view.place(x);
    for (const { lineage, parts } of this.model.lineages) {
      if (Math.abs(this.#y(lineage, true) - y) >= LOST_PX) continue;
      const part = parts.find((one) => one.to > one.until && one.until <= place && place <= one.to);
      if (part) return { title: `Lost: ${lostText(part.lost)}`, lines: [`Lineage ${lineage}; its checkpoints can still be restored`] };
    }
    return null;
  }

  note() {
    if (!this.model?.checkpoint_density) return "";
    return `${count(this.model.checkpoints.length)} of ${count(this.model.checkpoints_total)} shown; zoom in for all`;
  }
}

/** Durable and retired points without a mark, which can be drawn as a density. */
const isPlain = (row) => (row.state === "durable" && row.kind !== "safety" && !row.pinned) || row.state === "missing";

function ribbon(pen, row, left, right, y) {
  const half = row.state === "missing" ? 1.3 : 4;
  pen.globalAlpha = row.state === "missing" ? 0.55 : row.abandoned ? 0.4 : 0.75;
  pen.fillStyle = palette.accent;
  pen.fillRect(left - half, y - half, right - left + 2 * half, 2 * half);
  pen.globalAlpha = 1;
}

function lostText({ iterations, seconds }) {
  return `${count(iterations)} ${iterations === 1 ? "iteration" : "iterations"}${seconds ? `, ${duration(seconds)}` : ""}`;
}

// ---- snapshot and persist of each checkpoint; by iteration, the length is the overlapped training

const BAR_ROW = 13;
const BAR = 9;
const ROWS = 3;
const TALL = ROWS * BAR_ROW + 8;
/** Least distance between checkpoints at which each has a bar of its own. */
const BAR_PX = 12;

const denseBars = (dense) =>
  dense.start.map((from, index) => ({ from, to: from + dense.width, snapshot: dense.snapshot_seconds[index], persist: dense.persist_seconds[index], failed: dense.failed[index] }));

const spanBar = ({ checkpoint, from }) => ({
  from, to: from, snapshot: checkpoint.snapshot_seconds ?? 0, persist: checkpoint.persist_seconds ?? 0, failed: FAILED.includes(checkpoint.state),
});

export class PipelineLane extends CanvasLane {
  // the same whether bars or a density are drawn, so that a zoom moves no lane
  height() {
    return TALL;
  }

  draw(pen) {
    const { view } = this;
    const spans = this.model.spans.filter((span) => view.shows(span.from, span.to));
    this.dense = this.model.checkpoint_density ? denseBars(this.model.checkpoint_density) : spans.length * BAR_PX > view.plotWidth ? spans.map(spanBar) : null;
    const longest = this.dense && Math.max(1e-9, ...this.dense.map((bar) => bar.snapshot + bar.persist));
    this.clipped(pen, () => {
      if (this.dense) this.#density(pen, this.dense, longest);
      else for (const span of spans) this.#bar(pen, span);
    });
    if (this.dense) label(pen, duration(longest), view.gutter - 6, 10, palette.muted, palette.font, "right");
  }

  #none() {
    const { checkpoints_total: total, paced, firstIteration, lastIteration } = this.model;
    if (total > 0 || this.view.from > this.model.extent[0]) return "No checkpoints in this window";
    const { interval, interval_seconds: seconds } = paced.at(-1) ?? {};
    if (paced.length === 0) return "No checkpoint yet; the first is due once the first iterations are profiled";
    if (seconds != null) return `No checkpoint yet; the first is due after ${duration(seconds)}`;
    if (interval == null) return "No checkpoint yet; checkpoints are paused";
    const start = Math.max(0, firstIteration - 1); // an attempt that resumed counts the interval from there
    return `No checkpoint yet; the first is due at iteration ${count(start + interval)}, ${count(lastIteration)} done`;
  }

  /** Draw the duration of each checkpoint, or of the slowest of a step, up to the next one if that is closer than a glyph. */
  #density(pen, bars, longest) {
    const { view } = this;
    const high = (seconds) => (seconds / longest) * (TALL - 12);
    bars.forEach((bar, index) => {
      if (!view.shows(bar.from, bar.to)) return;
      const x = Math.round(view.x(bar.from));
      const own = Math.max(2, Math.round(view.x(bar.to)) - x);
      const next = bars[index + 1] ? Math.round(view.x(bars[index + 1].from)) - x : Infinity;
      const wide = next < own + BAR_PX ? next : own;
      const copied = high(bar.snapshot);
      pen.fillStyle = alpha(palette.accent, 0.55);
      pen.fillRect(x, TALL - 4 - high(bar.snapshot + bar.persist), wide, high(bar.persist));
      pen.fillStyle = alpha(palette.snapshot, 0.7);
      pen.fillRect(x, TALL - 4 - copied, wide, copied);
      if (!bar.failed) return;
      pen.fillStyle = palette.bad;
      pen.fillRect(x, TALL - 3, Math.max(2, own), 3);
    });
  }

  #bar(pen, span) {
    const { view } = this;
    const y = 4 + span.row * BAR_ROW;
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
    // one strip per rank, with the duration of its part
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
    if (dense) return `${count(total)} checkpoints, the slowest per step shown; zoom in for bars`;
    if (this.dense) return `${count(this.dense.length)} checkpoints; zoom in for bars`;
    return this.model.checkpoints.length ? "" : this.#none();
  }

  hit(x, y) {
    const place = this.view.place(x);
    if (this.model.checkpoint_density) return denseHit(this.model.checkpoint_density, place);
    const slack = (5 / this.view.plotWidth) * this.view.span;
    const row = Math.floor((y - 4) / BAR_ROW);
    const near = this.model.spans.filter((s) => (this.dense || s.row === row) && s.from - slack <= place && s.to + slack >= place);
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
    lines: [states.join(", "), `Snapshot up to ${duration(dense.snapshot_seconds[index])}, persist up to ${duration(dense.persist_seconds[index])}`, "Zoom in for bars"],
  };
}

function describe({ checkpoint, from, to, open }, axis) {
  const lines = [`${stateName(checkpoint)} · ${sizes(checkpoint)} · lineage ${checkpoint.lineage}`];
  if (checkpoint.snapshot_seconds != null) {
    const stalled = checkpoint.stall_seconds != null ? `, of which ${duration(checkpoint.stall_seconds)} blocking` : "";
    lines.push(`Snapshot ${duration(checkpoint.snapshot_seconds)}${stalled}`);
  }
  if (checkpoint.persist_seconds != null) lines.push(`Persist ${duration(checkpoint.persist_seconds)}`);
  const [slow] = checkpoint.ranks;
  if (slow) lines.push(`Slowest rank ${slow.rank}: ${duration(slow.snapshot_seconds)} and ${duration(slow.persist_seconds)}`);
  const long = axis === "time" ? duration(to - from) : `${count(to - from)} iterations`;
  lines.push(open ? `In progress for ${long}` : axis === "time" ? `${long} in total` : `Overlapped ${long}`);
  if (checkpoint.reason) lines.push(checkpoint.reason);
  return { title: `Checkpoint of iteration ${count(checkpoint.iteration)}`, lines, checkpoint };
}
