// The selected restore point, the readout at the pointer, the tables and the exports.

import { marks, placeText } from "./canvas.js";
import { capitalized, clock, count, day, duration, metric as asMetric, sizes, stateName, zone } from "./format.js";
import { curveOf, convertWindow } from "./model.js";
import { exportChart } from "./picture.js";

export class PointSelection extends EventTarget {
  id = null;
  /** A second point, to compare with. */
  other = null;

  constructor(panel) {
    super();
    this.panel = panel;
  }

  /** Choose a point; `beside` the selected one, to compare the two. */
  choose(id, beside = false) {
    if (beside && this.id !== null) {
      this.other = id === this.id || id === this.other ? null : id;
      this.dispatchEvent(new Event("change"));
      return;
    }
    [this.id, this.other] = [id, null];
    this.dispatchEvent(new Event("change"));
    document.dispatchEvent(new CustomEvent("holdfast:selected", { detail: id }));
  }

  /** The iteration of the selected point, from its id. */
  get iteration() {
    return this.id === null ? null : Number(this.id.split("-")[0]);
  }

  step(checkpoints, direction, beside = false) {
    const rows = checkpoints.filter((row) => row.restorable);
    const from = beside ? (this.other ?? this.id) : this.id;
    const at = rows.findIndex((row) => row.id === from);
    const start = direction > 0 ? -1 : rows.length;
    const next = rows[Math.min(Math.max((at < 0 ? start : at) + direction, 0), rows.length - 1)];
    if (next && next.id !== from) this.choose(next.id, beside);
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
    const [fork, compare] = ["fork", "compare"].map((part) => this.panel.querySelector(`[data-part=${part}]`));
    fork.hidden = row.state !== "durable";
    fork.href = `${title.href}#fork`;
    const other = checkpoints.find((one) => one.id === this.other);
    compare.hidden = !other;
    if (!other) return;
    compare.href = `${title.href}?with=${other.id}#compare`;
    compare.textContent = `Compare with ${count(other.iteration)}`;
  }
}

function facts(row) {
  const known = [...marks(row), stateName(row), row.kind, `lineage ${row.lineage}${row.abandoned ? ", abandoned" : ""}`, sizes(row)];
  if (row.snapshot_seconds != null) known.push(`snapshot ${duration(row.snapshot_seconds)}`);
  if (row.stall_seconds != null) known.push(`blocking ${duration(row.stall_seconds)}`);
  if (row.persist_seconds != null) known.push(`persist ${duration(row.persist_seconds)}`);
  if (row.reason) known.push(row.reason);
  return known;
}

// ---- readout: a crosshair through all lanes, their values, and the object under the pointer

const SIDE_PX = 90;

export class Readout {
  #x = null;

  constructor(root, view, lanes) {
    Object.assign(this, { root, view, lanes });
    this.box = root.querySelector(".lanes");
    this.crosshair = this.#part("cross");
    this.tip = this.#part("tip");
    this.band = this.#part("zone");
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  hover(x, y, event) {
    const { view } = this;
    if (x < view.gutter || x > view.gutter + view.plotWidth) return this.leave();
    this.#x = x;
    this.refresh();
    this.#describe(this.hit(event), x, y);
  }

  /** Update the values after the lanes moved under a resting pointer. */
  refresh() {
    if (this.#x === null) return this.#notes();
    const { view } = this;
    const place = view.axis === "time" ? view.place(this.#x) : Math.round(view.place(this.#x));
    this.crosshair.hidden = false;
    this.crosshair.style.transform = `translateX(${this.#x}px)`;
    this.crosshair.firstElementChild.textContent = this.#where(place);
    const room = Math.min(this.#x, view.width - this.#x);
    this.crosshair.dataset.side = room > SIDE_PX ? "" : this.#x > view.width / 2 ? "left" : "right";
    this.#writeValues((lane) => lane.readout(place));
  }

  /** Format a position on both axes. */
  #where(place) {
    const row = this.lanes.reduce((found, lane) => found ?? lane.at?.(place), null);
    const text = placeText(this.view.axis, place);
    if (!row) return text;
    return this.view.axis === "time" ? `${text} · iteration ${count(row.iteration)}` : `${text} · ${day(row.at)} ${clock(row.at)}${zone()}`;
  }

  /** Show the values at a position, as if the pointer were there. */
  pointAt(place) {
    this.#x = this.view.x(place);
    this.refresh();
  }

  leave() {
    this.#x = null;
    this.crosshair.hidden = true;
    this.tip.hidden = true;
    this.#notes();
  }

  #notes() {
    this.#writeValues((lane) => (lane.model ? lane.note() : ""));
  }

  #writeValues(textOf) {
    for (const lane of this.lanes) {
      if (!lane.value) continue;
      const text = textOf(lane);
      if (lane.value.textContent !== text) lane.value.textContent = text;
    }
  }

  /** Return the object under an event as {title, lines, checkpoint?}, or null. */
  hit(event) {
    // a captured pointer reports the capturing element, so look up the element at the point
    const body = document.elementFromPoint(event.clientX, event.clientY)?.closest(".lane-body");
    const lane = body && this.lanes.find((one) => one.body === body);
    if (!lane?.hit || !lane.model) return null;
    const box = body.getBoundingClientRect();
    return lane.hit(event.clientX - box.left, event.clientY - box.top);
  }

  #describe(thing, x, y) {
    const { tip } = this;
    this.box.dataset.hand = thing?.checkpoint || thing?.before ? "point" : "";
    tip.hidden = !thing;
    if (!thing) return;
    const title = document.createElement("strong");
    title.textContent = thing.title;
    const lines = thing.lines.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
    tip.replaceChildren(title, ...lines);
    const left = Math.min(Math.max(4, x + 14), this.view.width - tip.offsetWidth - 4);
    const below = y + 18 + tip.offsetHeight < this.box.clientHeight;
    tip.style.transform = `translate(${left}px, ${below ? y + 18 : y - tip.offsetHeight - 12}px)`;
  }

  /** Show the range of a zoom drag; null hides it. */
  zone(from, to) {
    this.band.hidden = from === null;
    if (from === null) return;
    const left = Math.max(from, this.view.gutter);
    const right = Math.min(to, this.view.gutter + this.view.plotWidth);
    this.band.style.transform = `translateX(${left}px)`;
    this.band.style.width = `${Math.max(0, right - left)}px`;
  }
}

// ---- tables: the data of the canvas for screen readers

const MOST_ROWS = 100;

export function table(caption, heads, rows) {
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
  // the box lets the browser skip the layout until it is visible
  const box = document.createElement("div");
  box.append(element);
  return box;
}

export const windowText = (view, last = Infinity) => `${placeText(view.axis, view.from)} to ${placeText(view.axis, Math.min(view.end, last))}`;

export const thinned = (rows) => rows.filter((_, index) => index % Math.ceil(rows.length / MOST_ROWS) === 0);

function iterations(model, view, metrics) {
  const seconds = curveOf(model, null);
  const known = metrics.map((metric) => {
    const values = curveOf(model, metric);
    return new Map(values.x.map((place, index) => [place, values.mean[index]]));
  });
  const inside = seconds.x.map((place, index) => [place, index]).filter(([place, index]) => view.shows(place) && seconds.mean[index] !== null);
  const rows = thinned(inside).map(([place, index]) => [count(seconds.iteration[index]), ...known.map((values) => asMetric(values.get(place))), duration(seconds.mean[index]), duration(seconds.max[index])]);
  const caption = `Iterations ${windowText(view)}, ${rows.length} rows${model.bucketed ? ", means over buckets" : ""}`;
  return table(caption, ["Iteration", ...metrics.map(capitalized), "Seconds, mean", "Seconds, max"], rows);
}

/** `metrics`: names of the metrics shown; `more`: further tables. */
export function fillTables(target, model, view, metrics, more) {
  const shown = model.checkpoints.filter((row) => view.shows(row.x));
  const stalls = model.stalls.filter((row) => view.shows(row.x));
  const notes = model.annotations.filter((row) => view.shows(row.x));
  const { checkpoints: all, stalls: allStalls } = counted(model, view);
  target.replaceChildren(
    table(
      `Checkpoints in this window: ${outOf(Math.min(shown.length, MOST_ROWS), all)}`,
      ["Iteration", "Lineage", "Kind", "State", "Size", "Snapshot", "Blocking", "Persist", "Durable at"],
      thinned(shown).map((row) => [count(row.iteration), row.lineage, row.kind, stateName(row), sizes(row), duration(row.snapshot_seconds), duration(row.stall_seconds), duration(row.persist_seconds), count(row.durable_iteration)]),
    ),
    table(
      `Stalls in this window: ${outOf(Math.min(stalls.length, MOST_ROWS), allStalls)}`,
      ["Iteration", "Lineage", "Kind", "Length"],
      thinned(stalls).map((row) => [count(row.iteration), row.lineage, row.kind, duration(row.seconds)]),
    ),
    ...(notes.length
      ? [table(`Annotations in this window: ${outOf(Math.min(notes.length, MOST_ROWS), notes.length)}`, ["Iteration", "Lineage", "By", "Annotation"], thinned(notes).map((row) => [count(row.iteration), row.lineage, row.who ?? "script", row.text]))]
      : []),
    iterations(model, view, metrics),
    ...more,
  );
}

const outOf = (some, all) => (all > some ? `${count(some)} of ${count(all)}` : count(all));

const summed = (dense, column, view) =>
  dense.start.reduce((sum, start, index) => (view.shows(start, start + dense.width) ? sum + dense[column][index] : sum), 0);

/** Count checkpoints and stalls in the window, from densities where the server sent those. */
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

/** Return a one-sentence summary of the window. */
export function sentence(model, view, { metric, mean }) {
  const { durable, failed, stalls } = counted(model, view);
  const last = mean.findLast((value) => value !== null);
  const timed = view.axis === "time";
  return [
    `${timed ? "From" : "Iterations"} ${windowText(view, timed ? Infinity : model.lastIteration)}${timed ? "" : ` of ${count(model.lastIteration)}`}:`,
    `${count(durable)} durable checkpoints${failed ? `, ${count(failed)} failed` : ""},`,
    `${count(stalls)} stalls,`,
    `${model.lineages.length} ${model.lineages.length === 1 ? "lineage" : "lineages"}.`,
    last != null ? `Newest ${metric} ${asMetric(last)}.` : "",
    model.silent_since ? `No report since ${clock(model.silent_since)}${zone()}.` : "",
  ].join(" ").trim();
}

/** Name the restore to the last good checkpoint, with the reason. */
export function lastGoodText({ checkpoint, reason }) {
  return `Restore to ${count(Number(checkpoint.split("-")[0]))}, ${reason}…`;
}

// ---- exports: links to files of the window, and images of the canvas

export function linkExports(root, view, model) {
  const places = [view.from, view.end];
  const window = view.axis === "iteration" ? places : (convertWindow(model, places) ?? [1, model.lastIteration]);
  const from = Math.max(1, Math.floor(window[0]));
  const to = Math.min(model.lastIteration, Math.ceil(window[1]));
  const here = root.dataset.source.replace(/timeline$/, "");
  for (const link of root.querySelectorAll("[data-export]")) {
    const name = link.dataset.export;
    link.href = `${here}${name === "timeline" ? name : `export/${name}`}?from=${from}&to=${to}`;
  }
}

/** `kind`: png or svg. */
export async function saveChart(kind, root, lanes, view, window) {
  await exportChart(kind, root.dataset.job, lanes, view, window);
  root.querySelector("[data-part=export]").open = false;
}
