import assert from "node:assert/strict";
import { test } from "node:test";

import { barsOf, convertWindow, curveOf, emptyRanges, interpolate, lowerBound, modelOf, nearest, resolutionText, runs } from "../../../../web/holdfast_web/static/timeline/model.js";

const range = (first, last) => Array.from({ length: last - first + 1 }, (_, index) => first + index);

function series(lineage, first, last, { until = last, loss = () => 1 } = {}) {
  const iteration = range(first, last);
  const column = iteration.map(loss);
  return {
    lineage, iteration, stands_until: until, at: iteration.map((one) => 1000 + 2 * one),
    seconds: { mean: iteration.map(() => 2), max: iteration.map(() => 3) },
    metrics: { loss: { mean: column, min: column, max: column } },
  };
}

function timeline(changes = {}) {
  return {
    extent: [1, 20], window: [1, 20], times: [1002, 1040], now: 1041, lineage: 1, series: [series(1, 1, 20)], gaps: [],
    lineages: [{ lineage: 1, iteration: 0, last_iteration: 20, stands_until: 20, parent: null, abandoned: false }],
    attempts: [{ attempt: 1, started_at: 1000, iteration: 0 }], checkpoints: [], stalls: [], annotations: [], troubles: [], pauses: [], paced: [], edits: [], orders: [],
    ...changes,
  };
}

test("a search in an ascending array finds the first value that is not smaller", () => {
  assert.deepEqual([1, 3, 4, 9].map((target) => lowerBound([2, 4, 6], target)), [0, 1, 1, 3]);
  assert.deepEqual([nearest([2, 4, 8], 5), nearest([2, 4, 8], 7), nearest([], 1)], [1, 2, -1]);
});

test("values between two rows are interpolated, and clamped outside", () => {
  assert.deepEqual([0, 15, 30].map((key) => interpolate([10, 20], [1, 2], key)), [1, 1.5, 2]);
});

test("a lineage knows the data that was left out at its start, not what an earlier one left out", () => {
  const first = timeline().lineages[0];
  const [early, late] = [{ iteration: 5, batches: 3, loader: 0 }, { iteration: 9, batches: 200, loader: 0 }];
  const second = { ...first, lineage: 2, iteration: 9, parent: "000000000009-1", left_out: [early, late] };
  const model = modelOf(timeline({ lineages: [first, second] }));
  assert.deepEqual(model.lineages.map((row) => row.leftOut), [[], [late]]);
});

test("a window converts between iterations and time", () => {
  const byIteration = modelOf(timeline());
  assert.deepEqual(convertWindow(byIteration, [5, 10]), [1010, 1020]);
  const byTime = modelOf(timeline({ time_window: [1002, 1040] }));
  assert.deepEqual(convertWindow(byTime, [1010, 1020]), [5, 10]);
});

test("work after a restore is lost, and the curve continues on the new lineage", () => {
  const curve = curveOf(timeline({ series: [series(1, 1, 20, { until: 10 }), series(2, 11, 15)] }), "loss");
  assert.deepEqual(curve.x, range(1, 15));
  assert.deepEqual(curve.lost.map((part) => part.x), [range(11, 20)]);
});

test("no line is drawn across missing samples", () => {
  const [early, late] = [series(1, 1, 5), series(1, 15, 20)];
  const curve = curveOf(timeline({ series: [early, late] }), "loss");
  assert.equal(curve.mean[curve.x.indexOf(6)], null);
});

test("non-finite losses are marked as ranges", () => {
  const diverged = series(1, 1, 20, { loss: (iteration) => (iteration > 17 ? "nan" : iteration) });
  const [found] = curveOf(timeline({ series: [diverged] }), "loss").nonFinite;
  assert.deepEqual([found.from, found.to, Number.isNaN(found.value)], [18, 20, true]);
});

test("bars that overlap get rows of their own, and an unfinished checkpoint of a crashed attempt ends", () => {
  const checkpoint = (iteration, more) => ({ iteration, lineage: 1, at: 1000 + 2 * iteration, snapshot_seconds: 2, persist_seconds: 8, stall_seconds: 0, durable_iteration: iteration + 5, state: "durable", ...more });
  const model = modelOf(timeline({
    checkpoints: [checkpoint(4), checkpoint(6), checkpoint(12), checkpoint(2, { state: "persisting", durable_iteration: null, persist_seconds: null })],
    attempts: [{ started_at: 1000 }, { started_at: 1006 }],
  }));
  assert.deepEqual(model.spans.map((span) => [span.from, span.to, span.row, span.open]), [[2, 3, 0, false], [4, 9, 0, false], [6, 11, 1, false], [12, 17, 0, false]]);
});

test("silence takes a limited part of the time axis", () => {
  const model = modelOf(timeline({ time_window: [1002, 1040], silent_since: 1040, now: 9000 }));
  assert.equal(model.missing[0].silent, 1040);
  assert.ok(model.extent[1] < 1050);
});

test("places at a constant distance are one run, or each alone, at every zoom", () => {
  for (const zoom of [0.001, 0.01, 0.1, 0.225, 0.4, 1, 7]) {
    const found = runs(range(1, 200).map((one) => 40 * one * zoom), 9);
    assert.ok(found.length === 1 || found.length === 200, `${found.length} runs at ${zoom}`);
  }
  assert.deepEqual(runs([], 9), []);
  assert.deepEqual(runs([1, 2, 50, 51, 99], 9), [[0, 1], [2, 3], [4, 4]]);
});

test("a density has an empty range only where no checkpoint is for the width of a glyph", () => {
  const width = 16;
  const start = [...new Set(range(1, 300).map((one) => Math.floor((40 * one) / width) * width))];
  assert.deepEqual(emptyRanges({ start, width }, 48), []);
  assert.deepEqual(emptyRanges({ start: [0, 16, 160], width }, 48), [[32, 160]]);
});

test("durable checkpoints that are all known have no density, whatever lies between them", () => {
  const dense = { width: 8, start: [0, 8, 16], count: [8, 8, 8], durable: [1, 0, 1] };
  const checkpoints = [{ state: "durable" }, { state: "missing" }, { state: "durable" }];
  assert.equal(barsOf("durable", { checkpoint_density: dense, checkpoints }), null);
  assert.equal(barsOf("missing", { checkpoint_density: dense, checkpoints }), dense);
  assert.deepEqual(barsOf("durable", { checkpoint_density: dense, checkpoints: [] }), { width: 8, start: [0, 16] });
});

test("a lineage that is drawn at another resolution is named", () => {
  const coarse = { lineage: 1, iteration: range(1, 500).map((one) => 8 * one) };
  assert.equal(resolutionText([coarse, { lineage: 2, iteration: range(3000, 3100) }]), "Each point: mean of 8 iterations; lineage 2: every iteration");
  assert.equal(resolutionText([coarse, { lineage: 2, iteration: range(1, 20).map((one) => 8 * one) }]), "");
  assert.equal(resolutionText([]), "");
});
