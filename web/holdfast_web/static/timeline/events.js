// Events: settings, starts and restores, labeled where there is room.

import { alpha, CanvasLane, fitted, label, palette, roundStep } from "./canvas.js";
import { capitalized, clock, count, duration, percent, zone } from "./format.js";

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
    text: `restore to ${count(order.iteration)}${order.state === "restored" ? "" : `: ${order.state}`}`,
    title: `Restore to iteration ${count(order.iteration)}: ${order.state}`,
    lines: [
      `Requested by ${order.who} at ${clock(order.created_at)}${zone()}`,
      ...(order.seconds != null ? [`Took ${duration(order.seconds)}, started lineage ${order.new_lineage ?? "–"}`] : []),
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

function flag(pen, x, y) {
  pen.moveTo(x - 3, y + 6);
  pen.lineTo(x - 3, y - 5);
  pen.lineTo(x + 5, y - 2);
  pen.lineTo(x - 3, y + 1);
}

export class EventLane extends CanvasLane {
  setModel(model) {
    this.events = [...annotations(model), ...edits(model), ...attempts(model), ...orders(model)]
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
    const color = { edit: palette.budget, start: palette.accent, crash: palette.bad, restore: palette.info, tick: palette.muted, note: palette.text }[event.mark];
    pen.fillStyle = event.open ? palette.surface : color;
    pen.strokeStyle = color;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (event.mark === "edit") pen.rect(x - 3.5, y - 3.5, 7, 7);
    else if (event.mark === "tick") pen.rect(x - 0.5, y - 5, 1, 10);
    else if (event.mark === "note") flag(pen, x, y);
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

// ---- measured overhead, budget, and changes of the interval

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

// ---- stalls: one row per kind; height shows duration

const KIND_ROW = 18;
const KINDS = { snapshot_wait: "copy", persist_backpressure: "persist", data_fetch: "fetch", data_prep: "prep", barrier: "barrier", restore: "restore" };
const STALL_NAMES = {
  snapshot_wait: "wait for the snapshot copy", persist_backpressure: "wait for earlier persists",
  data_fetch: "wait for data to be read", data_prep: "wait for data to be prepared",
  barrier: "wait for other ranks", restore: "restore",
};

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
