// Converts an answer of the timeline API into the model that the lanes draw. Pure: no DOM, no clock.

const NON_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const LOST_CURVES = 40;
const SILENT_SHARE = 0.12;
const COLUMNS = ["x", "iteration", "at", "mean", "min", "max"];

const number = (value) => (typeof value === "string" ? NON_FINITE[value] ?? NaN : value);
const numbers = (values) => (values ?? []).map(number);

function median(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : NaN;
}

/** First index whose value is >= `target` in an ascending array. */
export function lowerBound(values, target) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function nearest(values, target) {
  const at = lowerBound(values, target);
  if (at === 0) return values.length ? 0 : -1;
  if (at === values.length) return at - 1;
  return target - values[at - 1] <= values[at] - target ? at - 1 : at;
}

/** Join ascending places that are closer than `reach` to the one before: runs of indexes, [first, last]. */
export function runs(places, reach) {
  const found = [];
  places.forEach((place, index) => {
    if (index && place - places[index - 1] < reach) found.at(-1)[1] = index;
    else found.push([index, index]);
  });
  return found;
}

/** Return the ranges without a checkpoint of a density that are wider than `reach`. */
export function emptyRanges({ start, width }, reach) {
  return start.slice(1).map((next, index) => [start[index] + width, next]).filter(([from, to]) => to - from >= reach);
}

/** Return the bars with checkpoints of a state, of which only some are known one by one; null if all are known. */
export function barsOf(state, { checkpoint_density: dense, checkpoints }) {
  if (!dense || state !== "durable") return dense;
  const [all, known] = [dense.durable.reduce((sum, one) => sum + one, 0), checkpoints.filter((row) => row.state === state).length];
  return known >= all ? null : { width: dense.width, start: dense.start.filter((_, index) => dense.durable[index]) };
}

/** Tell in words which lineages are drawn at another resolution than most points; empty if none is. */
export function resolutionText(series) {
  const each = new Map();
  for (const { lineage, iteration } of [...series].sort((a, b) => a.iteration.length - b.iteration.length)) {
    const step = median(iteration.slice(1).map((value, index) => value - iteration[index]));
    if (Number.isFinite(step)) each.set(lineage, step);
  }
  const usual = [...each.values()].at(-1);
  const other = [...each].filter(([, step]) => Math.max(step, usual) >= 2 * Math.min(step, usual)).sort(([a], [b]) => a - b);
  if (!other.length) return "";
  const words = (step) => (step > 1 ? `mean of ${step} iterations` : "every iteration");
  const some = other.slice(-2).map(([lineage, step]) => `lineage ${lineage}: ${words(step)}`);
  return `Each point: ${words(usual)}; ${other.length > 2 ? "other lineages differ, " : ""}${some.join(", ")}`;
}

/** Interpolate `values` at `target` in the ascending `keys`. */
export function interpolate(keys, values, target) {
  const at = lowerBound(keys, target);
  if (at === 0 || at === keys.length) return values[Math.min(at, keys.length - 1)];
  const part = (target - keys[at - 1]) / (keys[at] - keys[at - 1] || 1);
  return values[at - 1] + part * (values[at] - values[at - 1]);
}

const axisOf = (timeline) => (timeline.time_window ? "time" : "iteration");

function column(series, metric) {
  if (metric === null) return { mean: numbers(series.seconds.mean), max: numbers(series.seconds.max) };
  const values = series.metrics[metric];
  if (!values) return null;
  return { mean: numbers(values.mean), min: numbers(values.min), max: numbers(values.max) };
}

/** Return whether the loop reports a metric only sometimes; its NaN values then mean "not measured". */
function isSparse(values) {
  const finite = values.filter(Number.isFinite).length;
  const alone = values.filter((value, index) => Number.isFinite(value) && !Number.isFinite(values[index - 1]) && !Number.isFinite(values[index + 1])).length;
  return finite > 0 && finite < values.length / 2 && alone > finite / 2;
}

const emptyColumns = () => Object.fromEntries(COLUMNS.map((name) => [name, []]));

function selectRows(series, values, axis, keep) {
  const points = emptyColumns();
  const sparse = isSparse(values.mean);
  series.iteration.forEach((iteration, index) => {
    if (!keep(iteration) || (sparse && !Number.isFinite(values.mean[index]))) return;
    points.x.push(axis === "time" ? series.at[index] : iteration);
    points.iteration.push(iteration);
    points.at.push(series.at[index]);
    points.mean.push(values.mean[index]);
    points.min.push(values.min ? values.min[index] : values.mean[index]);
    points.max.push(values.max[index]);
  });
  return points;
}

/** Join parts, with a null row at each gap so that no line is drawn across it. Parts differ in resolution. */
function joinWithGaps(parts, axis) {
  const result = emptyColumns();
  let before = 0;
  for (const points of parts) {
    const own = median(points.x.slice(1).map((value, index) => value - points.x[index])) || before;
    points.x.forEach((x, index) => {
      const last = result.x.at(-1);
      const usual = index ? own : Math.max(own, before);
      if (x - last > usual * 3 + (axis === "time" ? 0 : 1)) {
        for (const name of COLUMNS) result[name].push(name === "x" ? last + usual : null);
      }
      for (const name of COLUMNS) result[name].push(points[name][index]);
    });
    before = own;
  }
  return result;
}

function nonFiniteRanges(curve) {
  const ranges = [];
  curve.x.forEach((x, index) => {
    const value = curve.mean[index];
    if (value === null || Number.isFinite(value)) return;
    const last = ranges.at(-1);
    if (last && last.index === index - 1) Object.assign(last, { to: x, index });
    // a bucket begins after the one before it
    else ranges.push({ from: x, to: x, index, value, iteration: index ? (curve.iteration[index - 1] ?? curve.iteration[index] - 1) + 1 : curve.iteration[index] });
  });
  return ranges;
}

/** Convert a window to the other axis by the current samples and, beyond them, by lost ones; null if unknown. */
export function convertWindow(model, window) {
  const [standing, lost] = [[], []];
  for (const { iteration, at, stands_until: until } of model.series) {
    const cut = iteration.filter((one) => one <= until).length;
    for (const [into, from, to] of [[standing, 0, cut], [lost, cut, at.length]]) {
      const columns = [iteration.slice(from, to), at.slice(from, to)];
      const [keys, values] = model.axis === "time" ? columns.reverse() : columns;
      if (keys.length) into.push({ keys, values });
    }
  }
  const parts = [...standing, ...lost.reverse()];
  if (!parts.length) return null;
  const away = ({ keys }, place) => Math.max(keys[0] - place, place - keys.at(-1), 0);
  const other = (place) => {
    const { keys, values } = parts.reduce((best, one) => (away(one, place) < away(best, place) ? one : best));
    return interpolate(keys, values, place);
  };
  return window.map(other).sort((a, b) => a - b);
}

/** Return the current curve of a metric (null: iteration time) and its lost parts. */
export function curveOf(timeline, metric) {
  const axis = axisOf(timeline);
  const ordered = [...timeline.series].sort((a, b) => a.lineage - b.lineage);
  const standing = [];
  const lost = [];
  for (const series of ordered) {
    const values = column(series, metric);
    if (!values) continue;
    const until = series.stands_until;
    standing.push(selectRows(series, values, axis, (iteration) => iteration <= until));
    const rest = selectRows(series, values, axis, (iteration) => iteration > until);
    if (rest.x.length) lost.push(rest);
  }
  const curve = joinWithGaps(standing, axis);
  return { ...curve, lost: lost.slice(-LOST_CURVES).map((one) => joinWithGaps([one], axis)), nonFinite: nonFiniteRanges(curve) };
}

function assignRows(spans, rows) {
  const ends = new Array(rows).fill(-Infinity);
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.from);
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    ends[row] = span.to;
    span.row = row;
  }
  return spans;
}

/** Return the snapshot and persist spans of a checkpoint; `secondsEach` is the duration of one axis unit. */
function spanOf(checkpoint, secondsEach, axis, end) {
  const wide = (seconds) => (seconds ?? 0) / secondsEach;
  const from = checkpoint.x;
  const copied = from + wide(checkpoint.snapshot_seconds);
  const open = end !== null && (checkpoint.state === "snapshot" || checkpoint.state === "persisting");
  const began = axis === "time" && checkpoint.persist_started_at ? checkpoint.persist_started_at : copied;
  const written = began + wide(checkpoint.persist_seconds);
  const ended = (axis === "iteration" ? checkpoint.durable_iteration : null) ?? (open ? end : written);
  return { checkpoint, from, copied, open, to: Math.max(copied, ended), blocked: wide(checkpoint.stall_seconds) };
}

/** Place lineages on the axis: each part is current up to `until` and lost beyond. */
function placeLineages(lineages, timeline, axis) {
  return lineages.map((lineage) => {
    const row = { ...lineage, leftOut: (lineage.left_out ?? []).filter((one) => one.iteration === lineage.iteration) };
    const own = timeline.series.filter((series) => series.lineage === row.lineage && series.at.length);
    if (axis === "time") return { ...row, from: row.at, parts: own.map(timedPart) };
    const until = row.abandoned ? row.iteration : row.stands_until;
    const [iterations, times] = [own.flatMap((one) => one.iteration), own.flatMap((one) => one.at)];
    const at = (iteration) => interpolate(iterations, times, iteration);
    const seconds = times.length ? at(row.last_iteration) - at(until) : null;
    const part = { from: row.iteration, until, to: row.last_iteration, lost: { iterations: row.last_iteration - until, seconds } };
    return { ...row, from: row.iteration, parts: [part] };
  });
}

function timedPart({ iteration, at, stands_until: stands }) {
  const [from, to] = [at[0], at.at(-1)];
  const until = stands >= iteration.at(-1) ? to : stands < iteration[0] ? from : interpolate(iteration, at, stands);
  return { from, until, to, lost: { iterations: iteration.at(-1) - Math.max(stands, iteration[0] - 1), seconds: to - until } };
}

/** Return the axis ranges with missing samples and the missing share. */
function missingRanges(timeline, axis) {
  return timeline.gaps.flatMap((gap) => {
    const share = gap.dropped / (gap.last_iteration - gap.first_iteration + 1);
    const [first, last] = [gap.first_iteration, gap.last_iteration];
    if (axis === "iteration") return [{ ...gap, share, from: first, to: last }];
    const series = timeline.series.find((one) => one.lineage === gap.lineage && one.iteration[0] <= last && one.iteration.at(-1) >= first);
    return series ? [{ ...gap, share, from: interpolate(series.iteration, series.at, first), to: interpolate(series.iteration, series.at, last) }] : [];
  });
}

/** Return the range without reports; its width on the axis is limited. */
function silentRange({ silent_since: since, times, now }, axis) {
  if (since == null || axis !== "time") return [];
  const from = Math.max(since, times[1]);
  return [{ from, to: from + Math.max(1, Math.min(now - from, (from - times[0]) * SILENT_SHARE)), share: 1, silent: since }];
}

/** Build the model of all lanes from one API answer. */
export function modelOf(timeline) {
  const axis = axisOf(timeline);
  const usual = median(timeline.series.flatMap((series) => numbers(series.seconds.mean)));
  const secondsPerIteration = Number.isFinite(usual) && usual > 0 ? usual : 1;
  const current = timeline.lineage;
  const newest = timeline.lineages.find((row) => row.lineage === current);
  const ended = newest?.last_iteration ?? timeline.extent[1];
  const end = axis === "time" ? timeline.times[1] : ended;
  const quiet = silentRange(timeline, axis);
  // checkpoints that a crashed attempt left unfinished are no longer in progress
  const started = Math.max(0, ...timeline.attempts.map((row) => row.started_at));
  const alive = (row) => row.lineage === current && row.at >= started;
  const checkpoints = timeline.checkpoints
    .map((row) => ({ ...row, x: axis === "time" ? (row.snapshot_started_at ?? row.at) : row.iteration }))
    .sort((a, b) => a.x - b.x || a.lineage - b.lineage);
  const spans = checkpoints
    .filter((row) => row.snapshot_seconds != null || row.state === "snapshot" || row.state === "persisting")
    .map((row) => spanOf(row, axis === "time" ? 1 : secondsPerIteration, axis, alive(row) ? end : null));
  return {
    ...timeline, axis, checkpoints, secondsPerIteration, currentLineage: current, current: [newest?.iteration ?? timeline.extent[0], ended],
    extent: axis === "time" ? [timeline.times[0], quiet[0]?.to ?? end] : timeline.extent,
    end: axis === "time" ? end : timeline.extent[1],
    firstIteration: timeline.extent[0],
    lastIteration: timeline.extent[1],
    spans: assignRows(spans, 3),
    annotations: timeline.annotations.map((row) => ({ ...row, x: axis === "time" ? row.at : row.iteration })),
    troubles: timeline.troubles.map((row) => ({ ...row, x: axis === "time" ? row.at : row.iteration })),
    pauses: timeline.pauses.map((row) => ({ ...row, x: axis === "time" ? row.at : row.iteration })),
    stalls: timeline.stalls.map((row) => ({ ...row, x: axis === "time" ? row.at : row.iteration })),
    lineages: placeLineages(timeline.lineages, timeline, axis),
    // by iteration, only current decisions; by time, all
    paced: timeline.paced
      .filter((row) => axis === "time" || row.stands)
      .map((row) => ({ ...row, x: axis === "time" ? row.at : row.iteration }))
      .sort((a, b) => a.x - b.x),
    missing: [...missingRanges(timeline, axis), ...quiet],
  };
}
