// What the timeline API answers, made ready to draw. Pure: no DOM, no clock.

const ODD = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const LOST_CURVES = 8;

const number = (value) => (typeof value === "string" ? ODD[value] ?? NaN : value);
const numbers = (values) => (values ?? []).map(number);

export function median(values) {
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

/** For each lineage, the last of its iterations that the current state descends from. */
function keptUntil(lineages) {
  const kept = new Map();
  const byNumber = new Map(lineages.map((row) => [row.lineage, row]));
  let row = lineages.length ? lineages.reduce((a, b) => (a.lineage > b.lineage ? a : b)) : undefined;
  let until = Infinity;
  while (row && !kept.has(row.lineage)) {
    kept.set(row.lineage, until);
    until = row.iteration;
    row = row.parent ? byNumber.get(Number(row.parent.split("-")[1])) : undefined;
  }
  return kept;
}

function column(series, metric) {
  if (metric === null) return { mean: numbers(series.seconds.mean), max: numbers(series.seconds.max) };
  const values = series.metrics[metric];
  if (!values) return null;
  return { mean: numbers(values.mean), min: numbers(values.min), max: numbers(values.max) };
}

/** A metric that the loop gives only now and then: its NaN mean "not measured", and are left out. */
function isSparse(values) {
  const finite = values.filter(Number.isFinite).length;
  const alone = values.filter((value, index) => Number.isFinite(value) && !Number.isFinite(values[index - 1]) && !Number.isFinite(values[index + 1])).length;
  return finite > 0 && finite < values.length / 2 && alone > finite / 2;
}

function take(series, values, keep) {
  const points = { iteration: [], mean: [], min: [], max: [], lineage: [] };
  const sparse = isSparse(values.mean);
  series.iteration.forEach((iteration, index) => {
    if (!keep(iteration) || (sparse && !Number.isFinite(values.mean[index]))) return;
    points.iteration.push(iteration);
    points.mean.push(values.mean[index]);
    points.min.push(values.min ? values.min[index] : values.mean[index]);
    points.max.push(values.max[index]);
    points.lineage.push(series.lineage);
  });
  return points;
}

function withGaps(points) {
  // a hole in what was received stays a hole: nothing is drawn across it
  const steps = points.iteration.slice(1).map((value, index) => value - points.iteration[index]);
  const usual = median(steps);
  const result = { iteration: [], mean: [], min: [], max: [], lineage: [] };
  points.iteration.forEach((iteration, index) => {
    if (index > 0 && usual >= 1 && iteration - points.iteration[index - 1] > usual * 3 + 1) {
      result.iteration.push(points.iteration[index - 1] + usual);
      for (const key of ["mean", "min", "max"]) result[key].push(null);
      result.lineage.push(points.lineage[index - 1]);
    }
    for (const key of Object.keys(result)) result[key].push(points[key][index]);
  });
  return result;
}

function concatenated(parts) {
  const whole = { iteration: [], mean: [], min: [], max: [], lineage: [] };
  for (const part of parts) for (const key of Object.keys(whole)) whole[key].push(...part[key]);
  return whole;
}

function oddRanges(curve) {
  const ranges = [];
  curve.iteration.forEach((iteration, index) => {
    const value = curve.mean[index];
    if (value === null || Number.isFinite(value)) return;
    const last = ranges.at(-1);
    if (last && last.index === index - 1) Object.assign(last, { to: iteration, index });
    else ranges.push({ from: iteration, to: iteration, index, value });
  });
  return ranges;
}

/** One metric (null: iteration time) as the curve that stands and the stretches that were given up. */
export function curveOf(timeline, metric) {
  const kept = keptUntil(timeline.lineages);
  const ordered = [...timeline.series].sort((a, b) => a.lineage - b.lineage);
  const standing = [];
  const lost = [];
  for (const series of ordered) {
    const values = column(series, metric);
    if (!values) continue;
    // lost: trained by an attempt that died, and not repeated yet
    const until = series.lost ? -Infinity : (kept.get(series.lineage) ?? -Infinity);
    standing.push(take(series, values, (iteration) => iteration <= until));
    const rest = take(series, values, (iteration) => iteration > until);
    if (rest.iteration.length) lost.push(rest);
  }
  const curve = withGaps(concatenated(standing));
  return { ...curve, lost: lost.slice(-LOST_CURVES).map(withGaps), odd: oddRanges(curve) };
}

function packed(spans, rows) {
  const ends = new Array(rows).fill(-Infinity);
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.from);
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    ends[row] = span.to;
    span.row = row;
  }
  return spans;
}

/** Decisions on the way that stands; where iterations were repeated, the newer ones. */
function standingPaced(paced, kept) {
  let earliest = Infinity;
  return paced
    .filter((row) => row.iteration <= (kept.get(row.lineage) ?? -Infinity))
    .sort((a, b) => b.at - a.at)
    .filter((row) => {
      if (row.iteration >= earliest) return false;
      earliest = row.iteration;
      return true;
    })
    .reverse();
}

function spanOf(checkpoint, secondsPerIteration, lastIteration) {
  const inIterations = (seconds) => (seconds ?? 0) / secondsPerIteration;
  const from = checkpoint.iteration;
  const copied = from + inIterations(checkpoint.snapshot_seconds);
  const open = lastIteration !== null && (checkpoint.state === "snapshot" || checkpoint.state === "persisting");
  const ended = checkpoint.durable_iteration ?? (open ? lastIteration : copied + inIterations(checkpoint.persist_seconds));
  return {
    checkpoint, from, copied, open, to: Math.max(copied, ended),
    blocked: inIterations(checkpoint.stall_seconds),
  };
}

/** Everything the lanes draw, from one answer of the API. */
export function modelOf(timeline) {
  const kept = keptUntil(timeline.lineages);
  const usual = median(timeline.series.flatMap((series) => numbers(series.seconds.mean)));
  const secondsPerIteration = Number.isFinite(usual) && usual > 0 ? usual : 1;
  const current = Math.max(0, ...timeline.lineages.map((row) => row.lineage));
  const end = timeline.lineages.find((row) => row.lineage === current)?.last_iteration ?? timeline.extent[1];
  // what an attempt that died left half done is under way no more
  const started = Math.max(0, ...timeline.attempts.map((row) => row.started_at));
  const alive = (row) => row.lineage === current && row.at >= started;
  const checkpoints = [...timeline.checkpoints].sort((a, b) => a.iteration - b.iteration || a.lineage - b.lineage);
  const spans = checkpoints
    .filter((row) => row.snapshot_seconds != null || row.state === "snapshot" || row.state === "persisting")
    .map((row) => spanOf(row, secondsPerIteration, alive(row) ? end : null));
  return {
    ...timeline, checkpoints, secondsPerIteration, kept, currentLineage: current,
    spans: packed(spans, 3),
    paced: standingPaced(timeline.paced, kept),
    metrics: [...new Set(timeline.series.flatMap((series) => Object.keys(series.metrics)))],
  };
}
