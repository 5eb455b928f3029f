// The same data as a table: what a canvas cannot say to those who do not see it.

import { curveOf } from "./model.js";
import { capitalised, count, duration, metric as asMetric, size } from "./format.js";

const MOST_ROWS = 200;

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
  return element;
}

const thinned = (rows) => rows.filter((_, index) => index % Math.ceil(rows.length / MOST_ROWS) === 0);

function iterations(model, view, metric) {
  const seconds = curveOf(model, null);
  const values = metric ? curveOf(model, metric) : null;
  const known = values ? new Map(values.iteration.map((iteration, index) => [iteration, values.mean[index]])) : new Map();
  const inside = seconds.iteration.map((iteration, index) => [iteration, index]).filter(([iteration]) => view.shows(iteration));
  const rows = thinned(inside).map(([iteration, index]) => [count(iteration), asMetric(known.get(iteration)), duration(seconds.mean[index]), duration(seconds.max[index])]);
  const caption = `Iterations ${count(view.from)} to ${count(view.end)}, ${rows.length} rows${model.bucketed ? ", means over buckets" : ""}`;
  return table(caption, ["Iteration", metric ? capitalised(metric) : "Metric", "Seconds, mean", "Seconds, max"], rows);
}

export function fillTables(target, model, view, metric) {
  const shown = model.checkpoints.filter((row) => view.shows(row.iteration));
  const stalls = model.stalls.filter((row) => view.shows(row.iteration));
  target.replaceChildren(
    table(
      `Checkpoints in this window: ${shown.length}`,
      ["Iteration", "Lineage", "Kind", "State", "Size", "Snapshot", "Blocking", "Persist", "Durable at"],
      thinned(shown).map((row) => [count(row.iteration), row.lineage, row.kind, row.state, size(row.payload_bytes), duration(row.snapshot_seconds), duration(row.stall_seconds), duration(row.persist_seconds), count(row.durable_iteration)]),
    ),
    table(
      `Stalls in this window: ${stalls.length}`,
      ["Iteration", "Lineage", "Kind", "Length"],
      thinned(stalls).map((row) => [count(row.iteration), row.lineage, row.kind, duration(row.seconds)]),
    ),
    iterations(model, view, metric),
  );
}

/** One sentence that says what there is to see. */
export function sentence(model, view) {
  const shown = model.checkpoints.filter((row) => view.shows(row.iteration));
  const durable = shown.filter((row) => row.state === "durable").length;
  const failed = shown.filter((row) => ["failed", "torn", "damaged"].includes(row.state)).length;
  const loss = model.metrics[0] ? curveOf(model, model.metrics[0]) : null;
  const last = loss?.mean.findLast((value) => value !== null);
  return [
    `Iterations ${count(view.from)} to ${count(view.end)} of ${count(model.extent[1])}:`,
    `${durable} durable checkpoints${failed ? `, ${failed} that failed` : ""},`,
    `${model.stalls.filter((row) => view.shows(row.iteration)).length} stalls,`,
    `${model.lineages.length} ${model.lineages.length === 1 ? "lineage" : "lineages"}.`,
    last != null ? `Newest ${model.metrics[0]} ${asMetric(last)}.` : "",
  ].join(" ").trim();
}
