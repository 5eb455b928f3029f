// What people and processes did: settings, starts, restores; with the words where there is room for them.

import { CanvasLane, fitted, label } from "./canvas.js";
import { duration } from "./duration.js";
import { clock, count, zone } from "./format.js";
import { palette } from "./palette.js";

const ROW = 17;
const ROWS = 2;

/** Where something lies: by its time where time is the axis; what has not happened yet, at the end. */
const place = (model, iteration, at) => (model.axis === "time" ? at : iteration) ?? model.extent[1];

function edits(model) {
  // a restore is marked as one, with what became of it
  const settings = model.edits.filter((edit) => edit.changes.some((change) => change.field !== "restore"));
  return settings.map((edit) => ({
    x: place(model, edit.applied_iteration, edit.applied_at),
    mark: "edit",
    open: edit.applied_iteration == null,
    text: `v${edit.version} ${edit.summary}`,
    title: edit.summary,
    lines: [
      `version ${edit.version} by ${edit.who} at ${clock(edit.at)}${zone()}`,
      edit.applied_iteration == null ? "not applied yet" : `applied at iteration ${count(edit.applied_iteration)}`,
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
      `at ${clock(row.started_at)}${zone()}, lineage ${row.lineage}`,
      ...(row.previous_exit ? [`the attempt before was ${row.previous_exit}`] : []),
      ...(row.finished ? [`ended: ${row.finished}`] : []),
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
      `ordered by ${order.who} at ${clock(order.created_at)}${zone()}`,
      ...(order.seconds != null ? [`took ${duration(order.seconds)}, lineage ${order.new_lineage ?? "–"} starts there`] : []),
      ...(order.reason ? [order.reason] : []),
    ],
  }));
}

export class EventLane extends CanvasLane {
  setModel(model) {
    this.events = [...edits(model), ...attempts(model), ...orders(model)]
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
    const colour = { edit: palette.budget, start: palette.accent, crash: palette.bad, restore: palette.info }[event.mark];
    pen.fillStyle = event.open ? palette.surface : colour;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (event.mark === "edit") pen.rect(x - 3.5, y - 3.5, 7, 7);
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
