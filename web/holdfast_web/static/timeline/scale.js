// Round numbers for axes.

import { ahead } from "./format.js";

/** The largest of 1, 2, 5 times a power of ten that is no larger than `rough`. */
export function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [5, 2, 1].find((factor) => factor * power <= rough) * power;
}

/** About `most` multiples of a round number. */
export function steps(from, to, most) {
  const step = roundStep(((to - from) / Math.max(1, most)) * 1.999);
  const result = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to + step * 1e-9; index += 1) result.push(index * step);
  return result;
}

/** Powers of ten, and of few of them, 2 and 5 times each; of many, every n-th. */
export function decades(low, high, most) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const factors = last - first < 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(1, most)));
  const result = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.9 && value <= high * 1.1) result.push(value);
    }
  }
  return result;
}

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY];

/** The moment at which the clock on show stands at a multiple of `step`, by `how` near to another one. */
function onTheStep(at, step, how) {
  const shift = ahead(at);
  return how((at + shift) / step) * step - shift;
}

/** Round times of the clock on show, and the step between them: noon stays noon when summer time ends. */
export function times(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const step = TIME_STEPS.find((one) => one >= rough) ?? TIME_STEPS.at(-1);
  const places = [];
  for (let at = onTheStep(from, step, Math.ceil); at <= to; at += step) {
    at = onTheStep(at, step, Math.round);
    if (at >= from && at <= to) places.push(at);
  }
  return { step, places };
}
