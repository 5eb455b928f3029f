// The curves (a metric, iteration time): mean, minimum to maximum, and what was given up.

import { CanvasLane, label } from "./canvas.js";
import { clock, count, zone } from "./format.js";
import { curveOf, lowerBound, nearest } from "./model.js";
import { alpha, palette, stripes } from "./palette.js";
import { decades, steps } from "./scale.js";

const FEW_POINTS = 60;
const TOP = 8;
const BOTTOM = 6;
const TICK_PX = 30;
const THINNED = 0.95;

export class CurveLane extends CanvasLane {
  /** @param format turns a value into text with its unit. */
  constructor(element, view, { metric, format, zeroBased = false, tall }) {
    super(element, view);
    Object.assign(this, { metric, format, zeroBased, logarithmic: false, curve: null, own: tall });
  }

  height() {
    return this.own;
  }

  setModel(model) {
    this.curve = curveOf(model, this.metric);
    super.setModel(model);
  }

  draw(pen) {
    const { curve, view } = this;
    const shown = ({ x }) => [Math.max(0, lowerBound(x, view.from) - 1), Math.min(x.length - 1, lowerBound(x, view.to))];
    const [first, last] = shown(curve);
    const scale = this.#scale(first, last);
    this.#axis(pen, scale);
    if (!scale) return;
    this.clipped(pen, () => {
      this.#holes(pen);
      this.#band(pen, scale.y, first, last);
      for (const lost of curve.lost) this.#line(pen, lost, scale.y, ...shown(lost), palette.lost, [4, 3]);
      this.#line(pen, curve, scale.y, first, last, palette.accent, []);
      this.#dots(pen, scale.y, first, last);
      this.#odd(pen);
    });
  }

  #scale(first, last) {
    const { curve, tall } = this;
    let [low, high] = [Infinity, -Infinity];
    const positive = this.logarithmic ? 0 : -Infinity;
    for (let index = first; index <= last; index += 1) {
      for (const value of [curve.min[index], curve.mean[index], curve.max[index]]) {
        if (value === null || !Number.isFinite(value) || value <= positive) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (low > high) return null;
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    if (this.logarithmic) {
      const [from, to] = [Math.log10(low) - 0.05, Math.log10(high) + 0.05];
      const y = (value) => tall - BOTTOM - ((Math.log10(Math.max(value, low)) - from) / (to - from)) * (tall - TOP - BOTTOM);
      return { y, ticks: decades(low, high, (tall - TOP) / TICK_PX) };
    }
    const [from, to] = this.zeroBased ? [0, high + room] : [low - room, high + room];
    const y = (value) => tall - BOTTOM - ((value - from) / (to - from)) * (tall - TOP - BOTTOM);
    return { y, ticks: steps(from, to, (tall - TOP) / TICK_PX) };
  }

  #axis(pen, scale) {
    const { view } = this;
    if (!scale) return label(pen, "no data in this window", view.gutter + 2, this.tall / 2, palette.muted, palette.font);
    for (const value of scale.ticks) {
      const y = Math.round(scale.y(value));
      pen.fillStyle = palette.grid;
      pen.fillRect(view.gutter, y, view.plotWidth, 1);
      label(pen, this.format(value), view.gutter - 6, Math.max(6, y), palette.muted, palette.font, "right");
    }
  }

  /** Where samples were thinned away nothing is known, and nothing is made up. */
  #holes(pen) {
    for (const hole of this.model.holes) {
      if (!this.view.shows(hole.from, hole.to)) continue;
      const [left, right] = [this.view.x(hole.from), this.view.x(hole.to)];
      const wide = Math.max(2, right - left);
      pen.fillStyle = alpha(palette.lost, 0.1 + 0.16 * hole.share);
      pen.fillRect(left, 0, wide, this.tall);
      if (wide < 56) continue;
      const lines = hole.silent ? ["no word", `since ${clock(hole.silent).slice(0, 5)}`] : [hole.share > THINNED ? "no data" : "thinned"];
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

  #line(pen, curve, y, first, last, colour, dash) {
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
    pen.strokeStyle = colour;
    pen.lineWidth = dash.length ? 1.2 : 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(dash);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** Points, where there are few of them or one stands alone. */
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

  #odd(pen) {
    const { view } = this;
    const end = view.gutter + view.plotWidth;
    for (const range of this.curve.odd) {
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

  /** The row of the curve nearest to a place: its iteration and its time. */
  at(place) {
    const index = this.curve ? nearest(this.curve.x, place) : -1;
    if (index < 0 || this.curve.mean[index] === null) return null;
    return { iteration: this.curve.iteration[index], at: this.curve.at[index], index };
  }

  /** What the lane shows at a place, in words. */
  readout(place) {
    const { curve } = this;
    if (!curve) return "";
    const row = this.at(place);
    if (!row) return "no data";
    const mean = this.format(curve.mean[row.index]);
    const [low, high] = [curve.min[row.index], curve.max[row.index]];
    if (!Number.isFinite(low) || low === high) return mean;
    return this.zeroBased ? `${mean} · max ${this.format(high)}` : `${mean} · ${this.format(low)} to ${this.format(high)}`;
  }

  hit(x) {
    const place = this.view.place(x);
    const hole = this.model.holes.find((one) => one.from <= place && one.to >= place);
    if (!hole) return null;
    if (hole.silent) return { title: `No word since ${clock(hole.silent)}${zone()}`, lines: ["the job or its network stopped; this stretch of the axis grows no longer than it is"] };
    const of = hole.last_iteration - hole.first_iteration + 1;
    return {
      title: hole.share > THINNED ? "No data" : "Thinned",
      lines: [`samples of ${count(hole.dropped)} of ${count(of)} iterations were dropped by the agent: no server took them in time`],
    };
  }
}
