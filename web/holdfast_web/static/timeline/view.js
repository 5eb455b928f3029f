// The window on show, in iterations or in time: where it is, how it moves, what follows it.

const SHORTEST = { iteration: 8, time: 1 };
const EASE_MS = 260;
const EASED_PX = 2;

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class View extends EventTarget {
  /** What is counted from left to right: "iteration", or "time" in seconds since 1970. */
  axis = "iteration";
  from = 0;
  to = 1;
  extent = [0, 1];
  live = true;
  fitted = true;
  gutter = 56;
  margin = 14;
  width = 600;
  #easing = 0;

  get plotWidth() {
    return Math.max(40, this.width - this.gutter - this.margin);
  }

  /** The last place that is both on show and known. */
  get end() {
    return Math.min(this.to, this.extent[1]);
  }

  get span() {
    return this.to - this.from;
  }

  get shortest() {
    return SHORTEST[this.axis];
  }

  x(place) {
    return this.gutter + ((place - this.from) / this.span) * this.plotWidth;
  }

  /** What lies at a pixel. */
  place(x) {
    return this.from + ((x - this.gutter) / this.plotWidth) * this.span;
  }

  shows(from, to = from) {
    return to >= this.from && from <= this.to;
  }

  /** New data: a view that follows moves its right edge along. */
  extend([start, end]) {
    this.extent = [start, Math.max(end, start + 1)];
    if (!this.live) return;
    const target = this.fitted ? this.#whole() : [this.extent[1] - this.span, this.extent[1]];
    this.#ease(target[0], target[1]);
  }

  #whole() {
    return [this.extent[0], Math.max(this.extent[1], this.extent[0] + this.shortest)];
  }

  #limited(from, to) {
    const [start, end] = this.#whole();
    const span = Math.min(Math.max(to - from, this.shortest), end - start);
    const left = Math.min(Math.max(from, start), end - span);
    return [left, left + span];
  }

  #set(from, to) {
    this.from = from;
    this.to = to;
    this.dispatchEvent(new Event("move"));
  }

  #ease(from, to) {
    cancelAnimationFrame(this.#easing);
    const start = [this.from, this.to];
    const moved = (Math.max(Math.abs(to - this.to), Math.abs(from - this.from)) / this.span) * this.plotWidth;
    if (moved < EASED_PX || moved > this.plotWidth || still() || document.hidden) return this.#set(from, to);
    const began = performance.now();
    const frame = (now) => {
      const part = Math.min(1, (now - began) / EASE_MS);
      const eased = 1 - (1 - part) ** 3;
      this.#set(start[0] + (from - start[0]) * eased, start[1] + (to - start[1]) * eased);
      if (part < 1) this.#easing = requestAnimationFrame(frame);
    };
    this.#easing = requestAnimationFrame(frame);
  }

  show(from, to) {
    cancelAnimationFrame(this.#easing);
    const [left, right] = this.#limited(from, to);
    const whole = this.#whole();
    this.fitted = left <= whole[0] && right >= whole[1];
    this.live = this.live && this.fitted;
    this.#set(left, right);
    this.dispatchEvent(new Event("state"));
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const pinned = this.live && !this.fitted;
    const centre = pinned ? this.to : around;
    this.show(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
    if (pinned) this.follow(true);
  }

  pan(by) {
    this.fitted = false;
    this.live = false;
    const [left, right] = this.#limited(this.from + by, this.to + by);
    this.show(left, right);
  }

  fit() {
    this.show(...this.#whole());
    this.follow(true);
  }

  follow(on) {
    this.live = on;
    if (on) this.extend(this.extent);
    this.dispatchEvent(new Event("state"));
  }

  /** Bring one place into view without changing the scale. */
  reveal(place) {
    if (!this.shows(place)) this.pan(place - (this.from + this.to) / 2);
  }

  /** Count something else from left to right; without a window, all of it. */
  count(axis, extent, window) {
    this.axis = axis;
    this.extent = extent;
    if (!window) return this.fit();
    const { live } = this;
    this.show(...window);
    if (live) this.follow(true);
  }
}
