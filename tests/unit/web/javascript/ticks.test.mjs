import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.document = { documentElement: { hasAttribute: () => true } }; // display UTC

const { decades, roundStep, steps, times } = await import("../../../../web/holdfast_web/static/timeline/canvas.js");

test("steps are 1, 2 or 5 times a power of ten", () => {
  assert.deepEqual([0.7, 3, 19, 99].map(roundStep), [0.5, 2, 10, 50]);
  assert.deepEqual(steps(3, 27, 5), [5, 10, 15, 20, 25]);
});

test("a logarithmic axis is marked at powers of ten, and finer if there are few", () => {
  assert.deepEqual(decades(1, 12, 10), [1, 2, 5, 10]);
  assert.deepEqual(decades(1, 1e6, 10), [1, 10, 100, 1000, 10000, 100000, 1000000]);
});

test("a time axis is marked at round times of the clock", () => {
  const { step, places } = times(1_790_000_003, 1_790_000_063, 6);
  assert.equal(step, 10);
  assert.deepEqual(places, [10, 20, 30, 40, 50, 60].map((second) => 1_790_000_000 + second));
});
