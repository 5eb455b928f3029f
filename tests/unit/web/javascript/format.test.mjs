import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { age, count, duration, metric, metricLabels, percent, size, sizes } from "../../../../web/holdfast_web/static/timeline/format.js";

test("figures read as in the log of the agent", () => {
  const cases = JSON.parse(readFileSync(new URL("../../../support/formats.json", import.meta.url)));
  const formats = { duration, percent, size };
  assert.deepEqual(Object.keys(cases).sort(), Object.keys(formats));
  for (const [name, format] of Object.entries(formats)) for (const [value, text] of cases[name]) assert.equal(format(value), text);
});

test("missing and non-finite values are named", () => {
  assert.deepEqual([duration(null), percent(undefined), size(null), count(null), metric(null)], Array(5).fill("–"));
  assert.deepEqual([metric(NaN), metric(Infinity), percent(-Infinity)], ["NaN", "∞", "−∞"]);
});

test("all labels of an axis have one format, with an exponent where they would be long", () => {
  const labels = (...values) => values.map(metricLabels(values));
  assert.deepEqual(labels(0, 0.5, 20_000), ["0", "0.5", "20000"]);
  assert.deepEqual(labels(8_000_000, 10_000_000, -2_500_000), ["8e6", "1e7", "-2.5e6"]);
  assert.deepEqual(labels(0, 0.0002), ["0", "2e-4"]);
});

test("a checkpoint of unknown size, as the copy that a fork begins with, has a dash", () => {
  assert.equal(sizes({ payload_bytes: 0, reused_bytes: 0 }), "–");
});

test("sizes name what was written, and metrics have five digits", () => {
  assert.equal(sizes({ payload_bytes: 54e9, reused_bytes: 0 }), "54 GB");
  assert.equal(sizes({ payload_bytes: 54e9, reused_bytes: 53_850_000_000 }), "54 GB (150 MB written)");
  assert.deepEqual([metric(2.345678), metric(0.00001), count(1234567)], ["2.3457", "1.000e-5", "1,234,567"]);
});

test("ages count in seconds for a minute", () => {
  assert.deepEqual([age(1), age(59.4), age(60), age(3600)], ["just now", "59 s ago", "1 min ago", "1 h ago"]);
});
