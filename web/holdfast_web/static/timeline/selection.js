// The one restore point that is selected, told in full under the lanes.

import { duration } from "./duration.js";
import { count, size } from "./format.js";
import { marks } from "./glyphs.js";

export class Selection extends EventTarget {
  id = null;

  constructor(panel) {
    super();
    this.panel = panel;
  }

  choose(id) {
    this.id = id;
    this.dispatchEvent(new Event("change"));
    document.dispatchEvent(new CustomEvent("holdfast:selected", { detail: id }));
  }

  /** Of the selected point, as its id says it. */
  get iteration() {
    return this.id === null ? null : Number(this.id.split("-")[0]);
  }

  step(checkpoints, direction) {
    const rows = checkpoints.filter((row) => row.restorable);
    const at = rows.findIndex((row) => row.id === this.id);
    const start = direction > 0 ? -1 : rows.length;
    const next = rows[Math.min(Math.max((at < 0 ? start : at) + direction, 0), rows.length - 1)];
    if (next) this.choose(next.id);
  }

  describe(checkpoints) {
    const row = checkpoints.find((one) => one.id === this.id);
    this.panel.hidden = !row;
    if (!row) return;
    const title = this.panel.querySelector("[data-part=selected-title]");
    title.textContent = `Iteration ${count(row.iteration)}`;
    title.href = `${location.pathname}/checkpoints/${row.id}`;
    this.panel.querySelector("[data-part=selected-facts]").textContent = facts(row).join(" · ");
    const restore = this.panel.querySelector("[data-act=restore]");
    restore.hidden = !row.restorable;
    restore.textContent = `Restore to ${count(row.iteration)}…`;
  }
}

function facts(row) {
  const known = [...marks(row), row.state, row.kind, `lineage ${row.lineage}${row.abandoned ? ", abandoned" : ""}`, size(row.payload_bytes)];
  if (row.snapshot_seconds != null) known.push(`snapshot ${duration(row.snapshot_seconds)}`);
  if (row.stall_seconds != null) known.push(`blocking ${duration(row.stall_seconds)}`);
  if (row.persist_seconds != null) known.push(`persist ${duration(row.persist_seconds)}`);
  if (row.reason) known.push(row.reason);
  return known;
}
