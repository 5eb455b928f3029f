// The same data as a table: what a canvas cannot say to those who do not see it.

import { placeText } from "./axis.js";
import { curveOf } from "./model.js";
import { duration } from "./duration.js";
import { capitalised, clock, count, metric as asMetric, size, zone } from "./format.js";

const MOST_ROWS = 100;

function table(caption, heads, rows) {
  const element = document.createElement("table");
  element.className = "plain";
  element.createCaption().textContent = caption;
  const head = element.createTHead().insertRow();
  for (const name of heads) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = element.createTBody();
  for (const values of rows) {
    const row = body.insertRow();
    for (const value of values) row.insertCell().textContent = value;
  }
  // a box of its own, which is laid out when it is scrolled to
  const box = document.createElement("div");
  box.append(element);
  return box;
}

const windowText = (view, last = Infinity) => `${placeText(view.axis, view.from)} to ${placeText(view.axis, Math.min(view.end, last))}`;

const thinned = (rows) => rows.filter((_, index) => index % Math.ceil(rows.length / MOST_ROWS) === 0);

function iterations(model, view, metric) {
  const seconds = curveOf(model, null);
  const values = metric ? curveOf(model, metric) : null;
  const known = new Map(values?.x.map((place, index) => [place, values.mean[index]]));
  const inside = seconds.x.map((place, index) => [place, index]).filter(([place, index]) => view.shows(place) && seconds.mean[index] !== null);
  const rows = thinned(inside).map(([place, index]) => [count(seconds.iteration[index]), asMetric(known.get(place)), duration(seconds.mean[index]), duration(seconds.max[index])]);
  const caption = `Iterations ${windowText(view)}, ${rows.length} rows${model.bucketed ? ", means over buckets" : ""}`;
  return table(caption, ["Iteration", metric ? capitalised(metric) : "Metric", "Seconds, mean", "Seconds, max"], rows);
}

export function fillTables(target, model, view, metric) {
  const shown = model.checkpoints.filter((row) => view.shows(row.x));
  const stalls = model.stalls.filter((row) => view.shows(row.x));
  const { checkpoints: all, stalls: allStalls } = counted(model, view);
  target.replaceChildren(
    table(
      `Checkpoints in this window: ${outOf(Math.min(shown.length, MOST_ROWS), all)}`,
      ["Iteration", "Lineage", "Kind", "State", "Size", "Snapshot", "Blocking", "Persist", "Durable at"],
      thinned(shown).map((row) => [count(row.iteration), row.lineage, row.kind, row.state, size(row.payload_bytes), duration(row.snapshot_seconds), duration(row.stall_seconds), duration(row.persist_seconds), count(row.durable_iteration)]),
    ),
    table(
      `Stalls in this window: ${outOf(Math.min(stalls.length, MOST_ROWS), allStalls)}`,
      ["Iteration", "Lineage", "Kind", "Length"],
      thinned(stalls).map((row) => [count(row.iteration), row.lineage, row.kind, duration(row.seconds)]),
    ),
    iterations(model, view, metric),
  );
}

const outOf = (some, all) => (all > some ? `${count(some)} of ${count(all)}` : count(all));

const summed = (dense, column, view) =>
  dense.start.reduce((sum, start, index) => (view.shows(start, start + dense.width) ? sum + dense[column][index] : sum), 0);

/** How much of each there is in the window; where the server tells how dense they lie, by that. */
function counted(model, view) {
  const dense = model.checkpoint_density;
  const shown = model.checkpoints.filter((row) => view.shows(row.x));
  const of = (states) => shown.filter((row) => states.includes(row.state)).length;
  const waits = model.stall_density.length
    ? model.stall_density.reduce((sum, one) => sum + summed(one, "count", view), 0)
    : model.stalls.filter((row) => view.shows(row.x)).length;
  if (dense) return { checkpoints: summed(dense, "count", view), durable: summed(dense, "durable", view), failed: summed(dense, "failed", view), stalls: waits };
  return { checkpoints: shown.length, durable: of(["durable"]), failed: of(["failed", "torn", "damaged"]), stalls: waits };
}

/** One sentence that says what there is to see. */
export function sentence(model, view, { metric, mean }) {
  const { durable, failed, stalls } = counted(model, view);
  const last = mean.findLast((value) => value !== null);
  const timed = view.axis === "time";
  return [
    `${timed ? "From" : "Iterations"} ${windowText(view, timed ? Infinity : model.lastIteration)}${timed ? "" : ` of ${count(model.lastIteration)}`}:`,
    `${count(durable)} durable checkpoints${failed ? `, ${count(failed)} that failed` : ""},`,
    `${count(stalls)} stalls,`,
    `${model.lineages.length} ${model.lineages.length === 1 ? "lineage" : "lineages"}.`,
    last != null ? `Newest ${metric} ${asMetric(last)}.` : "",
    model.silent_since ? `No word since ${clock(model.silent_since)}${zone()}.` : "",
  ].join(" ").trim();
}
