// The run as it grew: one line for each lineage, its restore points on it, an arc where training was taken back.

import { CanvasLane, label } from "./canvas.js";
import { count, duration, size } from "./format.js";
import { alpha, palette } from "./palette.js";

const ROW = 26;
const MOST_ROWS = 6;
const DENSE_PX = 9;
const TARGET_PX = 13;

export const FAILED = ["failed", "torn", "damaged"];

export class LineageLane extends CanvasLane {
  selected = null;

  constructor(element, view) {
    super(element, view);
    this.list = document.createElement("div");
    Object.assign(this.list, { className: "points", tabIndex: 0 });
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", "Restore points in this window");
    // assistive technology clicks without a pointer
    this.list.addEventListener("click", (event) => {
      const id = event.target.closest("[role=option]")?.dataset.id;
      if (id) document.dispatchEvent(new CustomEvent("holdfast:select", { detail: id }));
    });
    this.body.append(this.list);
  }

  setModel(model) {
    const visible = [...model.lineages].sort((a, b) => b.lineage - a.lineage);
    this.rows = new Map(visible.map((row, index) => [row.lineage, Math.min(index, MOST_ROWS - 1)]));
    super.setModel(model);
  }

  height() {
    return Math.max(1, Math.min(MOST_ROWS, this.model.lineages.length)) * ROW + 8;
  }

  #y(lineage) {
    return 4 + ((this.rows.get(lineage) ?? 0) + 0.5) * ROW;
  }

  draw(pen) {
    const older = this.model.lineages.length > MOST_ROWS;
    for (const [lineage, row] of this.rows) {
      if (row === MOST_ROWS - 1 && older && lineage !== this.model.currentLineage - row) continue;
      const name = row === MOST_ROWS - 1 && older ? "older" : `L${lineage}`;
      const current = lineage === this.model.currentLineage;
      label(pen, name, this.view.gutter - 8, this.#y(lineage), current ? palette.accent : palette.muted, current ? palette.bold : palette.font, "right");
    }
    this.clipped(pen, () => {
      for (const lineage of this.model.lineages) this.#line(pen, lineage);
      for (const lineage of this.model.lineages) this.#branch(pen, lineage);
      this.#points(pen);
    });
    this.#options();
  }

  #line(pen, { lineage, iteration, last_iteration: last }) {
    const y = this.#y(lineage);
    const kept = Math.min(last, this.model.kept.get(lineage) ?? -Infinity);
    const { view } = this;
    if (kept > iteration) {
      pen.fillStyle = alpha(palette.accent, 0.55);
      pen.fillRect(view.x(iteration), y - 1, view.x(kept) - view.x(iteration), 2);
    }
    const lostFrom = Math.max(iteration, kept);
    if (last > lostFrom) {
      pen.strokeStyle = alpha(palette.lost, 0.8);
      pen.lineWidth = 1.5;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(view.x(lostFrom), y);
      pen.lineTo(view.x(last), y);
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  #branch(pen, { lineage, iteration, parent, order }) {
    if (!parent) return;
    const parentLineage = Number(parent.split("-")[1]);
    const made = this.model.orders.find((row) => row.id === order);
    const from = made?.from_lineage ?? parentLineage;
    const left = made?.from_iteration ?? this.model.lineages.find((row) => row.lineage === from)?.last_iteration;
    const [x, y] = [this.view.x(iteration), this.#y(lineage)];
    this.#stem(pen, x, this.#y(parentLineage), y, this.model.kept.has(lineage) ? alpha(palette.accent, 0.55) : alpha(palette.lost, 0.8));
    if (left != null && left > iteration) this.#arc(pen, this.view.x(left), this.#y(from), x, y);
  }

  #stem(pen, x, fromY, toY, colour) {
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(x, fromY);
    pen.lineTo(x, toY);
    pen.stroke();
  }

  /** Up from where training stood, back over the row that goes on, and down to where it was taken. */
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
    const shown = this.model.checkpoints.filter((row) => this.view.shows(row.iteration));
    const dense = shown.length * DENSE_PX > this.view.plotWidth;
    for (const row of shown) {
      const plain = row.state === "durable" && row.kind !== "safety";
      glyph(pen, row, this.view.x(row.iteration), this.#y(row.lineage), dense && plain ? 2.2 : 4.5);
    }
    const chosen = shown.find((row) => row.id === this.selected);
    if (!chosen) return;
    const [x, y] = [this.view.x(chosen.iteration), this.#y(chosen.lineage)];
    glyph(pen, chosen, x, y, 5);
    pen.strokeStyle = palette.text;
    pen.lineWidth = 1.6;
    pen.beginPath();
    pen.arc(x, y, 9, 0, 7);
    pen.stroke();
  }

  /** Real, focusable targets over the canvas; thinned where they would lie on each other. */
  #options() {
    const free = new Map();
    const chosen = [];
    for (const row of [...this.model.checkpoints].reverse()) {
      if (!this.view.shows(row.iteration)) continue;
      const x = this.view.x(row.iteration);
      const line = this.rows.get(row.lineage) ?? 0;
      if (row.id !== this.selected && (free.get(line) ?? Infinity) - x < TARGET_PX) continue;
      free.set(line, x);
      chosen.push([row, x]);
    }
    while (this.list.children.length > chosen.length) this.list.lastChild.remove();
    while (this.list.children.length < chosen.length) {
      const option = document.createElement("div");
      option.setAttribute("role", "option");
      this.list.append(option);
    }
    chosen.forEach(([row, x], index) => this.#place(this.list.children[index], row, x));
    const active = chosen.find(([row]) => row.id === this.selected);
    if (active) this.list.setAttribute("aria-activedescendant", `point-${active[0].id}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #place(option, row, x) {
    option.style.transform = `translate(${(x - 7).toFixed(1)}px, ${this.#y(row.lineage) - 10}px)`;
    const selected = String(row.id === this.selected);
    if (option.dataset.id === row.id && option.dataset.state === row.state && option.getAttribute("aria-selected") === selected) return;
    Object.assign(option.dataset, { id: row.id, state: row.state });
    option.id = `point-${row.id}`;
    option.setAttribute("aria-selected", selected);
    option.setAttribute("aria-label", `Iteration ${count(row.iteration)}, ${row.state}${row.kind === "safety" ? ", safety checkpoint" : ""}, lineage ${row.lineage}`);
  }

  hit(x, y) {
    const near = this.model.checkpoints.filter(
      (row) => Math.abs(this.view.x(row.iteration) - x) < 8 && Math.abs(this.#y(row.lineage) - y) < ROW / 2,
    );
    if (near.length === 0) return null;
    const row = near.reduce((a, b) => (Math.abs(this.view.x(a.iteration) - x) < Math.abs(this.view.x(b.iteration) - x) ? a : b));
    const lines = [`${row.kind} · ${row.state} · lineage ${row.lineage} · ${size(row.payload_bytes)}`];
    if (row.persist_seconds != null) lines.push(`snapshot ${duration(row.snapshot_seconds)}, persist ${duration(row.persist_seconds)}`);
    if (row.reason) lines.push(row.reason);
    if (row.restorable) lines.push("click to select, then restore");
    return { title: `Iteration ${count(row.iteration)}`, lines, checkpoint: row };
  }
}

/** ● durable  ◐ persisting  ✕ failed, torn, damaged  ◆ safety; · retired: a trace, so that what is left stands out. */
export function glyph(pen, row, x, y, radius) {
  pen.save();
  const gone = row.state === "missing";
  if (gone) radius = Math.max(1, radius * 0.3);
  pen.globalAlpha = gone ? 0.55 : row.abandoned ? 0.6 : 1;
  const failed = FAILED.includes(row.state);
  const open = row.state === "persisting" || row.state === "snapshot";
  const colour = failed ? palette.bad : row.kind === "safety" ? palette.info : palette.accent;
  pen.fillStyle = colour;
  pen.strokeStyle = colour;
  pen.lineWidth = failed ? 2 : 1.4;
  pen.beginPath();
  if (failed) {
    pen.moveTo(x - radius, y - radius);
    pen.lineTo(x + radius, y + radius);
    pen.moveTo(x + radius, y - radius);
    pen.lineTo(x - radius, y + radius);
    pen.stroke();
  } else if (row.kind === "safety") {
    const wide = radius * 1.25;
    pen.moveTo(x, y - wide);
    pen.lineTo(x + wide, y);
    pen.lineTo(x, y + wide);
    pen.lineTo(x - wide, y);
    pen.closePath();
    if (!open) pen.fill();
    pen.stroke();
  } else {
    pen.arc(x, y, radius, 0, 7);
    if (open) pen.fillStyle = palette.surface;
    pen.fill();
    pen.stroke();
    if (open) {
      pen.fillStyle = colour;
      pen.beginPath();
      pen.arc(x, y, radius, Math.PI / 2, Math.PI * 1.5);
      pen.fill();
    }
  }
  pen.restore();
}
