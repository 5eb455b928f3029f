// The whole run in one strip, with a brush for the window on show.

import { placeText } from "./axis.js";
import { curveOf } from "./model.js";
import { alpha, palette } from "./palette.js";

const TALL = 46;
const GRIP_PX = 9;

/** With every frame, so only what is new. */
function write(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export class Overview {
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
    for (const hole of this.model.holes) {
      pen.fillStyle = alpha(palette.lost, 0.1 + 0.2 * hole.share);
      pen.fillRect(this.#x(hole.from), 0, Math.max(1, this.#x(hole.to) - this.#x(hole.from)), TALL);
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
    if (!dense) {
      for (const row of checkpoints) if (row.state === "durable") pen.fillRect(this.#x(row.x), TALL - 4, 1, 4);
      return;
    }
    const { gutter, plotWidth } = this.view;
    dense.start.forEach((start, index) => {
      if (!dense.durable[index]) return;
      const left = Math.max(gutter, this.#x(start));
      pen.fillRect(left, TALL - 4, Math.max(1, Math.min(gutter + plotWidth, this.#x(start + dense.width)) - left), 4);
    });
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

  #tick(pen, place, colour) {
    pen.fillStyle = colour;
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
