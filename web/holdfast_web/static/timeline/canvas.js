// A lane drawn on its own canvas, sharp on every screen.

import { ahead, clock, count, day, zone } from "./format.js";

export class CanvasLane {
  constructor(element, view) {
    this.element = element;
    this.view = view;
    this.body = element.querySelector(".lane-body");
    this.value = element.querySelector(".lane-value");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.body.append(this.canvas);
    this.model = null;
    this.tall = 0;
  }

  /** Return the height in CSS pixels for the current model. */
  height() {
    return 40;
  }

  draw() {}

  /** Return the object at a point of the lane as {title, lines, checkpoint?}, or null. */
  hit() {
    return null;
  }

  /** Return a note about the whole lane, such as that it shows a part of the data. */
  note() {
    return "";
  }

  /** Return the value at a position as text. */
  readout() {
    return this.model ? this.note() : "";
  }

  setModel(model) {
    this.model = model;
    this.resize();
  }

  resize() {
    const ratio = devicePixelRatio;
    this.tall = this.model ? this.height() : 40;
    const [width, height] = [Math.round(this.view.width * ratio), Math.round(this.tall * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      Object.assign(this.canvas, { width, height });
      this.canvas.style.height = `${this.tall}px`;
    }
    this.move();
  }

  move() {
    if (!this.model) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, this.view.width, this.tall);
    this.draw(pen);
  }

  /** Draw clipped to the plot, so that nothing covers the labels. */
  clipped(pen, paint) {
    pen.save();
    pen.beginPath();
    pen.rect(this.view.gutter, 0, this.view.plotWidth, this.tall);
    pen.clip();
    paint();
    pen.restore();
  }
}

export function label(pen, text, x, y, color, font, align = "left") {
  pen.font = font;
  pen.fillStyle = color;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(text, x, y);
}

export function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 1 && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}

// ---- palette: colors come from the style sheet, so that canvas and page share the theme

const NAMES = ["text", "muted", "line", "grid", "surface", "accent", "accent-soft", "snapshot", "block", "bad", "warn", "info", "lost", "budget"];

export const palette = {};

export function readPalette() {
  hatches.clear();
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) palette[name.replaceAll("-", "_")] = style.getPropertyValue(`--${name}`).trim();
  palette.font = `11px ${style.getPropertyValue("--font").trim()}`;
  palette.bold = `600 ${palette.font}`;
  palette.star = palette.font.replace("11", "15");
}

/** Add an opacity to a `#rrggbb` color. */
export function alpha(color, opacity) {
  return color + Math.round(opacity * 255).toString(16).padStart(2, "0");
}

const hatches = new Map();

/** Return diagonal stripes, so that color is not the only mark. */
export function stripes(context, color) {
  if (!context.createPattern) return alpha(color.slice(0, 7), 0.35);
  if (hatches.has(color)) return hatches.get(color);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  hatches.set(color, context.createPattern(tile, "repeat"));
  return hatches.get(color);
}

// ---- checkpoint glyphs: one shape per state, in addition to its color

export const FAILED = ["failed", "torn", "damaged"];

/** Return the label and the pin of a checkpoint as text. */
export const marks = (row) => [row.label, row.pinned && "pinned"].filter(Boolean);

/** ● durable  ★ pinned  ◐ persisting  ✕ failed, torn, damaged  ◆ safety  · retired */
export function glyph(pen, row, x, y, radius) {
  pen.save();
  const gone = row.state === "missing";
  if (gone) radius = Math.max(1, radius * 0.3);
  pen.globalAlpha = gone ? 0.55 : row.abandoned ? 0.6 : 1;
  const failed = FAILED.includes(row.state);
  const open = row.state === "persisting" || row.state === "snapshot";
  const color = failed ? palette.bad : row.kind === "safety" ? palette.info : palette.accent;
  pen.fillStyle = color;
  pen.strokeStyle = color;
  pen.lineWidth = failed ? 2 : 1.4;
  pen.beginPath();
  if (failed) {
    pen.moveTo(x - radius, y - radius);
    pen.lineTo(x + radius, y + radius);
    pen.moveTo(x + radius, y - radius);
    pen.lineTo(x - radius, y + radius);
    pen.stroke();
  } else if (row.pinned && !gone) {
    label(pen, "★", x, y, color, palette.star, "center");
  } else if (row.kind === "safety") {
    const wide = radius * 1.25;
    pen.moveTo(x, y - wide);
    pen.lineTo(x + wide, y);
    pen.lineTo(x, y + wide);
    pen.lineTo(x - wide, y);
    pen.closePath();
    if (!open) pen.fill();
    pen.stroke();
  } else {
    pen.arc(x, y, radius, 0, 7);
    if (open) pen.fillStyle = palette.surface;
    pen.fill();
    pen.stroke();
    if (open) {
      pen.fillStyle = color;
      pen.beginPath();
      pen.arc(x, y, radius, Math.PI / 2, Math.PI * 1.5);
      pen.fill();
    }
  }
  pen.restore();
}

// ---- the axis that all lanes share

const STEP_PX = 90;
const DAY_SECONDS = 86400;

/** Format a position on the axis. */
export const placeText = (axis, place) => (axis === "time" ? `${day(place)} ${clock(place)}${zone()}` : count(place));

export class AxisLane extends CanvasLane {
  height() {
    return 24;
  }

  #ticks() {
    const { axis, from, to, plotWidth } = this.view;
    if (axis === "iteration") {
      const whole = steps(from, to, plotWidth / STEP_PX).filter(Number.isInteger);
      return whole.map((value) => [value, count(value)]);
    }
    const { step, places } = times(from, to, plotWidth / STEP_PX);
    const midnight = (at) => clock(at) === "00:00:00";
    return places.map((at) => [at, step >= DAY_SECONDS || midnight(at) ? day(at) : step >= 60 ? clock(at).slice(0, 5) : clock(at)]);
  }

  draw(pen) {
    const { view } = this;
    pen.fillStyle = palette.line;
    pen.fillRect(view.gutter, 0, view.plotWidth, 1);
    for (const [value, text] of this.#ticks()) {
      const x = view.x(value);
      pen.fillStyle = palette.line;
      pen.fillRect(x, 0, 1, 5);
      pen.font = palette.font;
      const half = pen.measureText(text).width / 2;
      const middle = Math.min(Math.max(x, view.gutter + half), view.gutter + view.plotWidth - half);
      label(pen, text, middle, 14, palette.muted, palette.font, "center");
    }
  }
}

// ---- round numbers for axes

/** Return the largest of 1, 2, 5 times a power of ten up to `rough`. */
export function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [5, 2, 1].find((factor) => factor * power <= rough) * power;
}

/** Return about `most` multiples of a round number. */
export function steps(from, to, most) {
  const step = roundStep(((to - from) / Math.max(1, most)) * 1.999);
  const result = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to + step * 1e-9; index += 1) result.push(index * step);
  return result;
}

/** Return powers of ten: for few, also 2 and 5 times each; for many, every n-th. */
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

/** Round a time to a multiple of `step` of the displayed clock. */
function onTheStep(at, step, how) {
  const shift = ahead(at);
  return how((at + shift) / step) * step - shift;
}

/** Return round times of the displayed clock and their step; noon stays noon across a change of daylight saving. */
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
