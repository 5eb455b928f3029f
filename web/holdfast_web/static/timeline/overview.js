// The whole run in one strip, with a brush for the window on show.

import { curveOf } from "./model.js";
import { count } from "./format.js";
import { alpha, palette } from "./palette.js";

const TALL = 46;
const GRIP_PX = 9;

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

  #x(iteration) {
    const [start, end] = this.view.extent;
    return this.view.gutter + ((iteration - start) / Math.max(1, end - start)) * this.view.plotWidth;
  }

  #iteration(x) {
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
    for (const row of this.model.attempts) if (row.previous_exit) this.#tick(pen, row.iteration, palette.bad);
    for (const row of this.model.lineages) if (row.parent) this.#tick(pen, row.iteration, palette.info);
    pen.fillStyle = alpha(palette.accent, 0.7);
    for (const row of this.model.checkpoints) {
      if (row.state === "durable") pen.fillRect(this.#x(row.iteration), TALL - 4, 1, 4);
    }
    this.move();
  }

  #line(pen) {
    const values = this.curve.mean.filter(Number.isFinite);
    if (values.length < 2) return;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const y = (value) => TALL - 9 - ((value - low) / (high - low || 1)) * (TALL - 16);
    pen.beginPath();
    let drawing = false;
    this.curve.iteration.forEach((iteration, index) => {
      const value = this.curve.mean[index];
      if (!Number.isFinite(value)) drawing = false;
      else {
        if (drawing) pen.lineTo(this.#x(iteration), y(value));
        else pen.moveTo(this.#x(iteration), y(value));
        drawing = true;
      }
    });
    pen.strokeStyle = alpha(palette.muted, 0.8);
    pen.lineWidth = 1;
    pen.stroke();
  }

  #tick(pen, iteration, colour) {
    pen.fillStyle = colour;
    pen.fillRect(this.#x(iteration) - 0.5, 3, 1.5, TALL - 9);
  }

  move() {
    const left = Math.max(this.view.gutter, this.#x(this.view.from));
    const right = Math.min(this.view.gutter + this.view.plotWidth, this.#x(this.view.to));
    this.brush.style.transform = `translateX(${left}px)`;
    this.brush.style.width = `${Math.max(4, right - left)}px`;
    this.grips.forEach((grip, index) => {
      const value = Math.round(index === 0 ? this.view.from : this.view.to);
      grip.setAttribute("aria-valuemin", Math.round(this.view.extent[0]));
      grip.setAttribute("aria-valuemax", Math.round(this.view.extent[1]));
      grip.setAttribute("aria-valuenow", value);
      grip.setAttribute("aria-valuetext", `iteration ${count(value)}`);
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
    if (index === 0) this.view.show(Math.min(this.view.from + move, this.view.to - 8), this.view.to);
    else this.view.show(this.view.from, Math.max(this.view.to + move, this.view.from + 8));
  }

  #press(event) {
    if (event.button !== 0) return;
    const box = this.element.getBoundingClientRect();
    const at = (moved) => this.#iteration(moved.clientX - box.left);
    const start = at(event);
    const x = event.clientX - box.left;
    const { from, to } = this.view;
    const nearLeft = Math.abs(x - this.#x(from)) < GRIP_PX;
    const nearRight = Math.abs(x - this.#x(to)) < GRIP_PX;
    const inside = start > from && start < to && !this.view.fitted;
    const drag = (moved) => {
      const now = at(moved);
      if (nearRight) this.view.show(from, Math.max(now, from + 8));
      else if (nearLeft) this.view.show(Math.min(now, to - 8), to);
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
