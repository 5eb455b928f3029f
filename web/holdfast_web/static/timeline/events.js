// Events: settings, starts and restores, labeled where there is room.

import { alpha, CanvasLane, fitted, label, palette } from "./canvas.js";
import { BEFORE_WORDS } from "./curves.js";
import { capitalized, clock, count, duration, zone } from "./format.js";

const ROW = 17;
const ROWS = 2;

/** Return the position of an event on the axis; pending events are at the end. */
const place = (model, iteration, at) => (model.axis === "time" ? at : iteration) ?? model.extent[1];

const spaced = (text) => text.replace(/(\d)%/g, "$1 %");

function edits(model) {
  // restores have their own marks
  const settings = model.edits.filter((edit) => edit.changes.some((change) => change.field !== "restore"));
  return settings.map((edit) => ({
    x: place(model, edit.applied_iteration, edit.applied_at),
    mark: "edit",
    open: edit.applied_iteration == null,
    text: `v${edit.version} ${spaced(edit.summary)}`,
    title: spaced(edit.summary),
    lines: [
      `Version ${edit.version} by ${edit.who} at ${clock(edit.at)}${zone()}`,
      edit.applied_iteration == null ? "Not applied yet" : `Applied at iteration ${count(edit.applied_iteration)}`,
    ],
  }));
}

function attempts(model) {
  return model.attempts.map((row) => ({
    x: place(model, row.iteration, row.started_at),
    mark: row.previous_exit ? "crash" : "start",
    text: row.previous_exit ? `attempt ${row.attempt} after ${row.previous_exit}` : `attempt ${row.attempt}`,
    title: `Attempt ${row.attempt} started at iteration ${count(row.iteration)}`,
    lines: [
      `Started ${clock(row.started_at)}${zone()}, lineage ${row.lineage}`,
      ...(row.previous_exit ? [`Previous attempt: ${row.previous_exit}`] : []),
      ...(row.finished ? [`Ended: ${row.finished}`] : []),
    ],
  }));
}

function orders(model) {
  return model.orders.map((order) => ({
    x: place(model, order.from_iteration, order.transitions.find((step) => step.state === "restoring")?.at ?? order.created_at),
    mark: "restore",
    open: !["restored", "failed", "cancelled", "expired", "superseded"].includes(order.state),
    text: `restore to ${count(order.iteration)}${order.skip ? " without data" : ""}${order.state === "restored" ? "" : `: ${order.state}`}`,
    title: `Restore to iteration ${count(order.iteration)}: ${order.state}`,
    lines: [
      `Requested by ${order.who} at ${clock(order.created_at)}${zone()}`,
      ...(order.seconds != null ? [`Took ${duration(order.seconds)}, started lineage ${order.new_lineage ?? "–"}`] : []),
      ...(order.skip ? [`Leaves out the data ${order.skip.batches ? `of ${count(order.skip.batches)} batches` : `up to iteration ${count(order.skip.to_iteration)}`}`] : []),
      ...(order.reason ? [order.reason] : []),
    ],
  }));
}

/** Annotations; those of the script on abandoned lineages only in time, because other iterations replaced them. */
function annotations(model) {
  const shown = model.annotations.filter((row) => row.who || !row.abandoned || model.axis === "time");
  return shown.map((row) => ({
    x: row.x,
    mark: row.who ? "note" : "tick",
    open: row.abandoned,
    text: row.text,
    title: row.text,
    lines: [
      `At iteration ${count(row.iteration)}, ${clock(row.at)}${zone()}`,
      `By ${row.who ?? "the script"}${row.abandoned ? `, on abandoned lineage ${row.lineage}` : ""}`,
    ],
  }));
}

function troubles(model) {
  return model.troubles.map((row) => ({
    x: row.x,
    mark: "trouble",
    open: row.abandoned,
    text: row.message,
    title: row.message,
    lines: [`Alert ${row.rule} at ${clock(row.at)}${zone()}, iteration ${count(row.iteration)}`, row.abandoned ? `On abandoned lineage ${row.lineage}` : BEFORE_WORDS],
    before: row.abandoned ? null : row.iteration,
  }));
}

function pauses(model) {
  return model.pauses.map((row) => ({
    x: row.x,
    mark: "pause",
    open: row.abandoned,
    text: row.ended_at == null ? "paused" : `paused ${duration(row.ended_at - row.at)}`,
    title: `Training paused after iteration ${count(row.iteration)}`,
    lines: [
      `By ${row.who} at ${clock(row.at)}${zone()}`,
      ...(row.ended_at == null ? [] : [`For ${duration(row.ended_at - row.at)}, until ${clock(row.ended_at)}${zone()}`]),
      ...(row.abandoned ? [`On abandoned lineage ${row.lineage}`] : []),
    ],
  }));
}

function flag(pen, x, y) {
  pen.moveTo(x - 3, y + 6);
  pen.lineTo(x - 3, y - 5);
  pen.lineTo(x + 5, y - 2);
  pen.lineTo(x - 3, y + 1);
}

function cross(pen, x, y) {
  pen.moveTo(x, y - 5);
  pen.lineTo(x + 5, y);
  pen.lineTo(x, y + 5);
  pen.lineTo(x - 5, y);
}

export class EventLane extends CanvasLane {
  setModel(model) {
    this.events = [annotations, troubles, pauses, edits, attempts, orders].flatMap((eventsOf) => eventsOf(model))
      .map((event) => ({ ...event, x: Math.max(event.x, model.extent[0]) }))
      .sort((a, b) => a.x - b.x);
    super.setModel(model);
  }

  height() {
    return ROWS * ROW + 6;
  }

  draw(pen) {
    const { view } = this;
    const shown = this.events.filter((event) => view.shows(event.x));
    const free = new Array(ROWS).fill(-Infinity);
    this.clipped(pen, () => {
      shown.forEach((event, index) => {
        const x = Math.min(Math.max(view.x(event.x), view.gutter + 5), view.gutter + view.plotWidth - 5);
        let row = free.findIndex((end) => end <= x - 8);
        if (row < 0) row = free.indexOf(Math.min(...free));
        const y = 3 + (row + 0.5) * ROW;
        event.at = { x, y };
        this.#mark(pen, event, x, y);
        free[row] = x + 6 + this.#words(pen, event, x, y, row, shown.slice(index + 1));
      });
    });
  }

  #words(pen, event, x, y, row, later) {
    const rowsBusy = later.slice(row === 0 ? ROWS - 1 : ROWS - 1 - row);
    const next = rowsBusy.length ? this.view.x(rowsBusy[0].x) - 12 : this.view.gutter + this.view.plotWidth;
    const room = next - x - 10;
    pen.font = palette.font;
    if (room < 34) return 0;
    const text = fitted(pen, event.text, room);
    label(pen, text, x + 9, y, palette.muted, palette.font);
    return pen.measureText(text).width + 6;
  }

  #mark(pen, event, x, y) {
    const color = { edit: palette.budget, start: palette.accent, crash: palette.bad, restore: palette.info, tick: palette.muted, note: palette.text, pause: palette.text, trouble: palette.bad }[event.mark];
    pen.fillStyle = event.open ? palette.surface : color;
    pen.strokeStyle = color;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (event.mark === "edit") pen.rect(x - 3.5, y - 3.5, 7, 7);
    else if (event.mark === "tick") pen.rect(x - 0.5, y - 5, 1, 10);
    else if (event.mark === "note") flag(pen, x, y);
    else if (event.mark === "trouble") cross(pen, x, y);
    else if (event.mark === "pause") {
      pen.rect(x - 4, y - 4.5, 2.5, 9);
      pen.rect(x + 1.5, y - 4.5, 2.5, 9);
    }
    else if (event.mark === "restore") {
      pen.arc(x, y, 4, Math.PI * 0.9, Math.PI * 2.5);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x - 7, y - 1);
      pen.lineTo(x - 1.5, y - 1.5);
      pen.lineTo(x - 4.5, y + 3);
    } else {
      pen.moveTo(x - 3.5, y - 4.5);
      pen.lineTo(x + 4.5, y);
      pen.lineTo(x - 3.5, y + 4.5);
    }
    pen.closePath();
    pen.fill();
    if (event.mark !== "restore") pen.stroke();
  }

  hit(x, y) {
    const near = this.events.filter((event) => event.at && Math.hypot(event.at.x - x, event.at.y - y) < 10);
    return near.at(-1) ?? null;
  }
}

// ---- stalls: one row per kind; height shows duration

const KIND_ROW = 18;
const KINDS = { snapshot_wait: "copy", data_fetch: "fetch", restore: "restore" };
const STALL_NAMES = { snapshot_wait: "wait for the snapshot copy", data_fetch: "wait for the next batch", restore: "restore" };

const colorOf = (kind) => (kind === "restore" ? palette.info : palette.block);

export class StallLane extends CanvasLane {
  setModel(model) {
    this.dense = new Map(model.stall_density.map((one) => [one.kind, one]));
    const present = new Set([...model.stalls.map((stall) => stall.kind), ...this.dense.keys()]);
    this.kinds = Object.keys(KINDS).filter((kind) => present.has(kind));
    super.setModel(model);
  }

  height() {
    return Math.max(1, this.kinds.length) * KIND_ROW + 4;
  }

  draw(pen) {
    const { view } = this;
    if (this.kinds.length === 0) {
      label(pen, "No stalls reported in this window", view.gutter + 2, KIND_ROW / 2 + 2, palette.muted, palette.font);
      return;
    }
    this.kinds.forEach((kind, row) => {
      const base = (row + 1) * KIND_ROW;
      label(pen, KINDS[kind], view.gutter - 6, base - KIND_ROW / 2 + 1, palette.muted, palette.font, "right");
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
      const base = (this.kinds.indexOf(stall.kind) + 1) * KIND_ROW;
      const high = Math.max(2, Math.sqrt(stall.seconds / longest) * (KIND_ROW - 4));
      pen.fillStyle = alpha(colorOf(stall.kind), stall.abandoned ? 0.35 : 0.9);
      pen.fillRect(view.x(stall.x) - wide / 2, base - high, wide, high);
    }
  }

  /** Draw the longest stall of each step. */
  #bars(pen) {
    const { view } = this;
    const longest = Math.max(1e-9, ...[...this.dense.values()].flatMap((one) => one.longest_seconds));
    for (const [kind, one] of this.dense) {
      const base = (this.kinds.indexOf(kind) + 1) * KIND_ROW;
      const wide = Math.max(1.5, (one.width / view.span) * view.plotWidth - 0.5);
      pen.fillStyle = alpha(colorOf(kind), 0.8);
      one.start.forEach((start, index) => {
        if (!view.shows(start, start + one.width)) return;
        const high = Math.max(2, Math.sqrt(one.longest_seconds[index] / longest) * (KIND_ROW - 4));
        pen.fillRect(view.x(start), base - high, wide, high);
      });
    }
  }

  note() {
    if (!this.dense.size) return "";
    return `${count(this.model.stalls_total)} stalls, the longest per step shown; zoom in for each one`;
  }

  hit(x, y) {
    const kind = this.kinds[Math.floor((y - 2) / KIND_ROW)];
    return this.dense.size ? this.#denseHit(kind, this.view.place(x)) : this.#eachHit(kind, x);
  }

  #denseHit(kind, place) {
    const one = this.dense.get(kind);
    const index = one ? one.start.findIndex((start) => start <= place && place < start + one.width) : -1;
    if (index < 0) return null;
    const lines = [`${count(one.count[index])} × ${STALL_NAMES[kind]}, ${duration(one.seconds[index])} in total`, "Zoom in to see each one"];
    return { title: `Up to ${duration(one.longest_seconds[index])}`, lines };
  }

  #eachHit(kind, x) {
    const near = this.model.stalls.filter((stall) => stall.kind === kind && Math.abs(this.view.x(stall.x) - x) < 5);
    if (near.length === 0) return null;
    const worst = near.reduce((a, b) => (a.seconds > b.seconds ? a : b));
    const lines = [`${capitalized(STALL_NAMES[kind])} at iteration ${count(worst.iteration)}, lineage ${worst.lineage}`];
    if (near.length > 1) lines.push(`Longest of ${near.length} here; zoom in to see each one`);
    return { title: duration(worst.seconds), lines };
  }
}
