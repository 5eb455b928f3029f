// The curves (a metric, iteration time): mean, minimum to maximum, and lost parts.

import { alpha, CanvasLane, decades, label, palette, placeText, steps, stripes } from "./canvas.js";
import { clock, count, zone } from "./format.js";
import { curveOf, lowerBound, nearest, resolutionText, runs } from "./model.js";

const FEW_POINTS = 60;
const TOP = 8;
const BOTTOM = 6;
const TICK_PX = 30;
const THINNED = 0.95;

export class CurveLane extends CanvasLane {
  /** Second metric, drawn as a line; null for none. It has its own scale at the right. */
  second = null;
  secondCurve = null;

  /** @param format turns a value into text with its unit; `labels` returns the format of all values of an axis. */
  constructor(element, view, { metric, format, labels = () => format, zeroBased = false, tall }) {
    super(element, view);
    Object.assign(this, { metric, format, labels, zeroBased, logarithmic: false, curve: null, own: tall });
  }

  height() {
    return this.own;
  }

  setModel(model) {
    this.curve = this.curveOf(model, this.metric);
    this.secondCurve = this.second && this.curveOf(model, this.second);
    super.setModel(model);
  }

  curveOf(model, metric) {
    return curveOf(model, metric);
  }

  /** Return the scales of both curves, each null without data. */
  scales(shown) {
    const second = this.secondCurve && this.scale([this.secondCurve], shown);
    return [this.scale([this.curve], shown), second];
  }

  draw(pen) {
    const { curve, view } = this;
    const shown = ({ x }) => [Math.max(0, lowerBound(x, view.from) - 1), Math.min(x.length - 1, lowerBound(x, view.to))];
    const [first, last] = shown(curve);
    const [scale, second] = this.scales(shown);
    this.#axis(pen, scale);
    if (second && second !== scale) this.#rightAxis(pen, second);
    if (second) this.clipped(pen, () => this.#line(pen, this.secondCurve, second.y, ...shown(this.secondCurve), palette.snapshot, [6, 2]));
    if (!scale) return;
    this.clipped(pen, () => {
      this.#missing(pen);
      this.#band(pen, scale.y, first, last);
      for (const lost of curve.lost) this.#line(pen, lost, scale.y, ...shown(lost), palette.lost, [4, 3]);
      this.#line(pen, curve, scale.y, first, last, palette.accent, []);
      this.#dots(pen, scale.y, first, last);
      this.#nonFinite(pen);
    });
  }

  /** Return the scale of curves that share it; null if none has data in the window. `top`: its end, if fixed. */
  scale(curves, shown, top = null) {
    const { tall } = this;
    let [low, high] = [Infinity, -Infinity];
    const positive = this.logarithmic ? 0 : -Infinity;
    for (const curve of curves) {
      const [first, last] = shown(curve);
      for (let index = first; index <= last; index += 1) {
        for (const value of [curve.min[index], curve.mean[index], curve.max[index]]) {
          if (value === null || !Number.isFinite(value) || value <= positive) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return null;
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    if (this.logarithmic) {
      const [from, to] = [Math.log10(low) - 0.05, Math.log10(high) + 0.05];
      const y = (value) => tall - BOTTOM - ((Math.log10(Math.max(value, low)) - from) / (to - from)) * (tall - TOP - BOTTOM);
      return { y, ticks: decades(low, high, (tall - TOP) / TICK_PX) };
    }
    const [from, to] = this.zeroBased ? [0, top ?? high + room] : [low - room, high + room];
    const y = (value) => tall - BOTTOM - ((value - from) / (to - from)) * (tall - TOP - BOTTOM);
    return { y, ticks: steps(from, to, (tall - TOP) / TICK_PX) };
  }

  #axis(pen, scale) {
    const { view } = this;
    if (!scale) return label(pen, "No data in this window", view.gutter + 2, this.tall / 2, palette.muted, palette.font);
    const format = this.tick ?? this.labels(scale.ticks);
    for (const value of scale.ticks) {
      const y = Math.round(scale.y(value));
      pen.fillStyle = palette.grid;
      pen.fillRect(view.gutter, y, view.plotWidth, 1);
      label(pen, format(value), view.gutter - 6, Math.max(6, y), palette.muted, palette.font, "right");
    }
  }

  #rightAxis(pen, scale) {
    const format = this.labels(scale.ticks);
    for (const value of scale.ticks) {
      label(pen, format(value), this.view.gutter + this.view.plotWidth + 6, Math.max(6, scale.y(value)), palette.snapshot, palette.font);
    }
  }

  /** Shade ranges with missing samples. */
  #missing(pen) {
    for (const gap of this.model.missing) {
      if (!this.view.shows(gap.from, gap.to)) continue;
      const [left, right] = [this.view.x(gap.from), this.view.x(gap.to)];
      const wide = Math.max(2, right - left);
      pen.fillStyle = alpha(palette.lost, 0.1 + 0.16 * gap.share);
      pen.fillRect(left, 0, wide, this.tall);
      if (wide < 56) continue;
      const lines = gap.silent ? ["no report", `since ${clock(gap.silent).slice(0, 5)}`] : [gap.share > THINNED ? "no data" : "thinned"];
      lines.reverse().forEach((text, up) => label(pen, text, left + wide / 2, this.tall - 10 - 13 * up, palette.muted, palette.font, "center"));
    }
  }

  #band(pen, y, first, last) {
    const { curve, view } = this;
    pen.fillStyle = alpha(palette.accent, 0.18);
    let start = -1;
    for (let index = first; index <= last + 1; index += 1) {
      const known = index <= last && Number.isFinite(curve.min[index]) && Number.isFinite(curve.max[index]) && curve.max[index] !== null;
      if (known && start < 0) start = index;
      if (known || start < 0) continue;
      pen.beginPath();
      for (let up = start; up < index; up += 1) pen.lineTo(view.x(curve.x[up]), y(curve.max[up]));
      for (let down = index - 1; down >= start; down -= 1) pen.lineTo(view.x(curve.x[down]), y(curve.min[down]));
      pen.fill();
      start = -1;
    }
  }

  #line(pen, curve, y, first, last, color, dash) {
    pen.beginPath();
    let drawing = false;
    for (let index = first; index <= last; index += 1) {
      const value = curve.mean[index];
      if (value === null || !Number.isFinite(value)) drawing = false;
      else {
        if (drawing) pen.lineTo(this.view.x(curve.x[index]), y(value));
        else pen.moveTo(this.view.x(curve.x[index]), y(value));
        drawing = true;
      }
    }
    pen.strokeStyle = color;
    pen.lineWidth = dash.length ? 1.2 : 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(dash);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** Draw points where there are few, or an isolated one. */
  #dots(pen, y, first, last) {
    const { mean, x } = this.curve;
    const few = last - first <= FEW_POINTS;
    const known = (index) => mean[index] != null && Number.isFinite(mean[index]);
    pen.fillStyle = palette.accent;
    for (let index = first; index <= last; index += 1) {
      if (!known(index) || !(few || (!known(index - 1) && !known(index + 1)))) continue;
      pen.beginPath();
      pen.arc(this.view.x(x[index]), y(mean[index]), 2, 0, 7);
      pen.fill();
    }
  }

  #nonFinite(pen) {
    const { view } = this;
    const end = view.gutter + view.plotWidth;
    for (const range of this.curve.nonFinite) {
      if (!view.shows(range.from, range.to)) continue;
      const left = Math.max(view.gutter, view.x(range.from));
      const width = Math.max(3, Math.min(end, view.x(range.to)) - left);
      pen.fillStyle = alpha(palette.bad, 0.14);
      pen.fillRect(left, 0, width, this.tall);
      pen.fillStyle = stripes(pen, palette.bad);
      pen.fillRect(left, 0, width, this.tall);
      const text = this.format(range.value);
      pen.font = palette.bold;
      const box = pen.measureText(text).width + 8;
      const boxLeft = Math.min(left + width + 3, end - box);
      pen.fillStyle = palette.bad;
      pen.fillRect(boxLeft, 2, box, 16);
      label(pen, text, boxLeft + 4, 10.5, palette.surface, palette.bold);
    }
  }

  /** Return the nearest row of the curve. */
  at(place) {
    const index = this.curve ? nearest(this.curve.x, place) : -1;
    if (index < 0 || this.curve.mean[index] === null) return null;
    return { iteration: this.curve.iteration[index], at: this.curve.at[index], index };
  }

  /** Return the values at a position as text. */
  readout(place) {
    const { curve, second, secondCurve } = this;
    if (!curve) return "";
    const value = valueAt(secondCurve, place);
    return value === null ? this.#readout(place) : `${this.#readout(place)} · ${second} ${this.format(value)}`;
  }

  #readout(place) {
    const { curve } = this;
    const row = this.at(place);
    if (!row) return "no data";
    const mean = this.format(curve.mean[row.index]);
    const [low, high] = [curve.min[row.index], curve.max[row.index]];
    if (!Number.isFinite(low) || low === high) return mean;
    return this.zeroBased ? `${mean} · max ${this.format(high)}` : `${mean} · ${this.format(low)} to ${this.format(high)}`;
  }

  note() {
    const { axis, series } = this.model;
    const shown = ({ iteration, at }) => iteration.length && (axis === "time" ? this.view.shows(at[0], at.at(-1)) : this.view.shows(iteration[0], iteration.at(-1)));
    return resolutionText(series.filter(shown));
  }

  hit(x) {
    const place = this.view.place(x);
    const wrong = this.zeroBased ? null : this.curve?.nonFinite.find((one) => this.view.x(one.from) - 4 <= x && x <= this.view.x(one.to) + 4);
    if (wrong) return { title: `${this.format(wrong.value)} from iteration ${count(wrong.iteration)}`, lines: [BEFORE_WORDS], before: wrong.iteration };
    const gap = this.model.missing.find((one) => one.from <= place && one.to >= place);
    if (!gap) return null;
    if (gap.silent) return { title: `No report since ${clock(gap.silent)}${zone()}`, lines: ["The job or its network stopped; the axis does not grow further"] };
    const of = gap.last_iteration - gap.first_iteration + 1;
    return {
      title: gap.share > THINNED ? "No data" : "Thinned",
      lines: [`The agent dropped samples of ${count(gap.dropped)} of ${count(of)} iterations because the server was unreachable`],
    };
  }
}

/** Return the mean of a curve at a position; null without data there. */
export function valueAt(curve, place) {
  const index = curve ? nearest(curve.x, place) : -1;
  return index < 0 ? null : curve.mean[index];
}

export const BEFORE_WORDS = "Click to restore the last good checkpoint before";

// ---- overview of the whole run with a brush for the window

const TALL = 46;
const GRIP_PX = 9;
/** Ticks that are closer are one line: single ones would show a pattern of the screen's pixels. */
const TICK_GAP_PX = 4;

/** Set an attribute only when it changes, since this runs with every frame. */
function write(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export class OverviewStrip {
  constructor(element, view) {
    this.element = element;
    this.view = view;
    this.canvas = element.querySelector("canvas");
    this.brush = element.querySelector(".brush");
    this.grips = [...element.querySelectorAll("[role=slider]")];
    this.curve = null;
    this.model = null;
    this.#listen();
  }

  setModel(model, metric) {
    this.model = model;
    this.curve = curveOf(model, metric);
    this.draw();
  }

  #x(place) {
    const [start, end] = this.view.extent;
    return this.view.gutter + ((place - start) / Math.max(1, end - start)) * this.view.plotWidth;
  }

  #place(x) {
    const [start, end] = this.view.extent;
    return start + ((x - this.view.gutter) / this.view.plotWidth) * (end - start);
  }

  draw() {
    if (!this.model) return;
    const ratio = devicePixelRatio;
    const { view } = this;
    Object.assign(this.canvas, { width: view.width * ratio, height: TALL * ratio });
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#line(pen);
    for (const gap of this.model.missing) {
      pen.fillStyle = alpha(palette.lost, 0.1 + 0.2 * gap.share);
      pen.fillRect(this.#x(gap.from), 0, Math.max(1, this.#x(gap.to) - this.#x(gap.from)), TALL);
    }
    const timed = this.model.axis === "time";
    for (const row of this.model.attempts) if (row.previous_exit) this.#tick(pen, timed ? row.started_at : row.iteration, palette.bad);
    for (const row of this.model.lineages) if (row.parent) this.#tick(pen, row.from, palette.info);
    this.#checkpoints(pen);
    this.move();
  }

  #checkpoints(pen) {
    const { checkpoint_density: dense, checkpoints } = this.model;
    pen.fillStyle = alpha(palette.accent, 0.7);
    const { gutter, plotWidth } = this.view;
    const durable = dense ? dense.start.filter((_, index) => dense.durable[index]) : checkpoints.filter((row) => row.state === "durable").map((row) => row.x);
    const width = dense ? Math.max(1, this.#x(dense.width) - this.#x(0)) : 1;
    const places = durable.map((place) => Math.max(gutter, this.#x(place)));
    for (const [first, last] of runs(places, width + TICK_GAP_PX)) {
      pen.fillRect(places[first], TALL - 4, Math.min(gutter + plotWidth, places[last] + width) - places[first], 4);
    }
  }

  #line(pen) {
    const values = this.curve.mean.filter(Number.isFinite);
    if (values.length < 2) return;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const y = (value) => TALL - 9 - ((value - low) / (high - low || 1)) * (TALL - 16);
    pen.beginPath();
    let drawing = false;
    this.curve.x.forEach((place, index) => {
      const value = this.curve.mean[index];
      if (!Number.isFinite(value)) drawing = false;
      else {
        if (drawing) pen.lineTo(this.#x(place), y(value));
        else pen.moveTo(this.#x(place), y(value));
        drawing = true;
      }
    });
    pen.strokeStyle = alpha(palette.muted, 0.8);
    pen.lineWidth = 1;
    pen.stroke();
  }

  #tick(pen, place, color) {
    pen.fillStyle = color;
    pen.fillRect(this.#x(place) - 0.5, 3, 1.5, TALL - 9);
  }

  move() {
    const left = Math.max(this.view.gutter, this.#x(this.view.from));
    const right = Math.min(this.view.gutter + this.view.plotWidth, this.#x(this.view.to));
    this.brush.style.transform = `translateX(${left}px)`;
    this.brush.style.width = `${Math.max(4, right - left)}px`;
    this.grips.forEach((grip, index) => {
      const value = Math.round(index === 0 ? this.view.from : this.view.to);
      write(grip, "aria-valuemin", Math.round(this.view.extent[0]));
      write(grip, "aria-valuemax", Math.round(this.view.extent[1]));
      write(grip, "aria-valuenow", value);
      write(grip, "aria-valuetext", `${this.view.axis === "time" ? "" : "iteration "}${placeText(this.view.axis, value)}`);
    });
  }

  #listen() {
    this.element.addEventListener("pointerdown", (event) => this.#press(event));
    this.grips.forEach((grip, index) => grip.addEventListener("keydown", (event) => this.#key(event, index)));
  }

  #key(event, index) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const move = (step * (this.view.extent[1] - this.view.extent[0])) / 100;
    if (index === 0) this.view.show(Math.min(this.view.from + move, this.view.to - this.view.shortest), this.view.to);
    else this.view.show(this.view.from, Math.max(this.view.to + move, this.view.from + this.view.shortest));
  }

  #press(event) {
    if (event.button !== 0) return;
    const box = this.element.getBoundingClientRect();
    const at = (moved) => this.#place(moved.clientX - box.left);
    const start = at(event);
    const x = event.clientX - box.left;
    const { from, to } = this.view;
    const nearLeft = Math.abs(x - this.#x(from)) < GRIP_PX;
    const nearRight = Math.abs(x - this.#x(to)) < GRIP_PX;
    const inside = start > from && start < to && !this.view.fitted;
    const drag = (moved) => {
      const now = at(moved);
      if (nearRight) this.view.show(from, Math.max(now, from + this.view.shortest));
      else if (nearLeft) this.view.show(Math.min(now, to - this.view.shortest), to);
      else if (inside) this.view.show(from + now - start, to + now - start);
      else if (Math.abs(now - start) > 1) this.view.show(Math.min(start, now), Math.max(start, now));
    };
    this.element.setPointerCapture(event.pointerId);
    this.element.addEventListener("pointermove", drag);
    const end = () => this.element.removeEventListener("pointermove", drag);
    this.element.addEventListener("pointerup", end, { once: true });
    this.element.addEventListener("pointercancel", end, { once: true });
  }
}
