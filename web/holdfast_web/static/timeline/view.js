// The visible window in iterations or time, its state in the address, and pointer gestures.

const SHORTEST = { iteration: 8, time: 1 };
const EASE_MS = 260;
const EASED_PX = 2;
/** Share of the run by which a restore is behind for a following window to leave out what it discarded. */
const BEHIND = 0.25;
/** Share of the run that such a window shows before the current lineage. */
const BEFORE = 0.05;

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Viewport extends EventTarget {
  /** "iteration", or "time" in seconds since 1970. */
  axis = "iteration";
  from = 0;
  to = 1;
  extent = [0, 1];
  /** The current lineage: its first and newest positions. */
  current = [0, 1];
  live = true;
  /** Whether the window is the whole run, or, while it follows a job that is behind, the current lineage. */
  fitted = true;
  gutter = 56;
  margin = 14;
  width = 600;
  #easing = 0;

  get plotWidth() {
    return Math.max(40, this.width - this.gutter - this.margin);
  }

  /** Last visible position with data. */
  get end() {
    return Math.min(this.to, this.extent[1]);
  }

  get span() {
    return this.to - this.from;
  }

  get shortest() {
    return SHORTEST[this.axis];
  }

  /** Whether the newest position is well before the end of the run: a restore discarded the rest. */
  get behind() {
    return this.extent[1] - this.current[1] > BEHIND * (this.extent[1] - this.extent[0]);
  }

  /** Whether the window is the whole run, also when the run grows. */
  get whole() {
    return this.fitted && !(this.live && this.behind);
  }

  x(place) {
    return this.gutter + ((place - this.from) / this.span) * this.plotWidth;
  }

  /** Return the position at a pixel. */
  place(x) {
    return this.from + ((x - this.gutter) / this.plotWidth) * this.span;
  }

  shows(from, to = from) {
    return to >= this.from && from <= this.to;
  }

  /** Set a new extent; a window that follows moves its right edge to the newest position. */
  extend([start, end], current = [start, end]) {
    this.extent = [start, Math.max(end, start + 1)];
    this.current = current;
    if (this.live) this.#ease(...this.#followed());
  }

  #followed() {
    const [from, newest] = this.current;
    if (!this.behind) return this.fitted ? this.#whole() : [this.extent[1] - this.span, this.extent[1]];
    return this.#limited(this.fitted ? from - BEFORE * (this.extent[1] - this.extent[0]) : newest - this.span, newest);
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
    const middle = pinned ? this.to : around;
    this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
    if (pinned) this.follow(true);
  }

  pan(by) {
    this.fitted = false;
    this.live = false;
    const [left, right] = this.#limited(this.from + by, this.to + by);
    this.show(left, right);
  }

  /** Show the whole run; it follows unless the current lineage is what a following window shows. */
  fit() {
    this.show(...this.#whole());
    this.follow(!this.behind);
  }

  follow(on) {
    this.live = on;
    if (on) this.extend(this.extent, this.current);
    this.dispatchEvent(new Event("state"));
  }

  /** Scroll a position into view without zooming. */
  reveal(place) {
    if (!this.shows(place)) this.pan(place - (this.from + this.to) / 2);
  }

  /** Change the axis; without a window, show everything. */
  count(axis, extent, current, window) {
    Object.assign(this, { axis, extent, current });
    const live = this.live || (!window && !this.behind);
    this.show(...(window ?? this.#whole()));
    if (live) this.follow(true);
  }
}

// ---- address: a link to the page restores the window and the selection

const WRITE_MS = 300;
const NAMES = ["x", "from", "to", "live", "sel", "with", "metric", "second", "machine", "log", "branches", "table"];
const TENTHS = 10;
let timer = 0;
let write = null;

export function readAddress() {
  const query = new URLSearchParams(location.search);
  const [from, to] = [Number(query.get("from")), Number(query.get("to"))];
  return {
    axis: query.get("x") === "time" ? "time" : "iteration",
    window: to > from ? [from, to] : null,
    live: query.get("live") === "1",
    selected: query.get("sel"),
    other: query.get("with"),
    metric: query.get("metric"),
    second: query.get("second"),
    rank: /^\d+$/.test(query.get("machine")) ? Number(query.get("machine")) : null,
    logarithmic: query.get("log") === "1",
    everything: { all: true, standing: false }[query.get("branches")] ?? null,
    table: query.get("table") === "1",
  };
}

function shown(view, { selected, other, metric, second, rank, logarithmic, everything, table }) {
  const query = new URLSearchParams(location.search);
  for (const name of NAMES) query.delete(name);
  if (view.axis === "time") query.set("x", "time");
  if (!view.fitted || (view.behind && !view.live)) {
    const rounded = (place) => (view.axis === "time" ? Math.round(place * TENTHS) / TENTHS : Math.round(place));
    query.set("from", rounded(view.from));
    query.set("to", rounded(view.to));
    if (view.live) query.set("live", "1");
  }
  if (metric && metric !== "loss") query.set("metric", metric);
  if (second) query.set("second", second);
  if (rank !== null) query.set("machine", rank);
  if (logarithmic) query.set("log", "1");
  if (everything !== null) query.set("branches", everything ? "all" : "standing");
  if (table) query.set("table", "1");
  if (selected) query.set("sel", selected);
  if (selected && other) query.set("with", other);
  return query.toString();
}

let [written, entry] = [null, null];

/** Whether the address is not the one that was written last: the browser went back or forward. */
export function isElsewhere() {
  if (location.search === written) return false;
  [written, entry] = [location.search, null];
  return true;
}

/**
 * Update the address once the window is at rest; browsers limit the rate of changes. Another window is another entry
 * of the history, so that going back undoes a zoom; a window that follows stays one entry.
 */
export function writeAddress(view, state) {
  clearTimeout(timer);
  const window = view.fitted ? "all" : view.live ? "live" : `${Math.round(view.from)} ${Math.round(view.to)}`;
  const now = `${view.axis} ${window}`;
  entry ??= now;
  write = () => {
    const text = shown(view, state);
    history[entry === now ? "replaceState" : "pushState"](history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    entry = now;
    written = location.search;
  };
  timer = setTimeout(flushAddress, WRITE_MS);
}

/** Write a pending address now. */
export function flushAddress() {
  clearTimeout(timer);
  write?.();
  write = null;
}

// ---- pointer: drag zooms, shift-drag pans, ctrl-wheel zooms at the pointer, touch pans and pinches

const CLICK_PX = 4;

export class PointerGestures {
  #touches = new Map();

  /** @param actions {hover(x, y, event), leave(), click(event), zone(from, to)}, in pixels of the element */
  constructor(element, view, actions) {
    Object.assign(this, { element, view, actions });
    element.addEventListener("pointerdown", (event) => this.#down(event));
    element.addEventListener("pointermove", (event) => this.#move(event));
    element.addEventListener("pointerleave", () => actions.leave());
    element.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    element.addEventListener("dblclick", () => view.fit());
  }

  #at(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #move(event) {
    if (this.#touches.size === 0 && event.pointerType !== "touch") this.actions.hover(...this.#at(event), event);
  }

  #down(event) {
    if (event.button !== 0 || event.target.closest("button, select, a, input, .selection")) return;
    if (event.pointerType === "touch") return this.#touch(event);
    const pan = event.shiftKey;
    const [startX] = this.#at(event);
    const start = [this.view.from, this.view.to];
    let last = startX;
    const drag = (moved) => {
      const [x] = this.#at(moved);
      if (pan) this.view.pan(((last - x) / this.view.plotWidth) * (start[1] - start[0]));
      else if (Math.abs(x - startX) > CLICK_PX) this.actions.zone(Math.min(startX, x), Math.max(startX, x));
      last = x;
    };
    this.#until(event, drag, (ended) => {
      const [x, y] = this.#at(ended);
      this.actions.zone(null);
      if (Math.abs(x - startX) <= CLICK_PX) return this.actions.click(ended);
      if (!pan) this.view.show(this.view.place(Math.min(startX, x)), this.view.place(Math.max(startX, x)));
    });
  }

  #touch(event) {
    const [startX] = this.#at(event);
    this.#touches.set(event.pointerId, startX);
    const drag = (moved) => {
      const before = [...this.#touches.values()];
      const [x] = this.#at(moved);
      const by = this.#touches.get(moved.pointerId) - x;
      this.#touches.set(moved.pointerId, x);
      if (before.length === 1) return this.view.pan((by / this.view.plotWidth) * this.view.span);
      const now = [...this.#touches.values()];
      const apart = (pair) => Math.max(20, Math.abs(pair[0] - pair[1]));
      this.view.zoom(apart(before) / apart(now), this.view.place((now[0] + now[1]) / 2));
    };
    this.#until(event, drag, (ended) => {
      this.#touches.delete(ended.pointerId);
      const [x] = this.#at(ended);
      if (ended.type === "pointerup" && Math.abs(x - startX) <= CLICK_PX) this.actions.click(ended);
    });
  }

  #until(event, drag, end) {
    const { element } = this;
    const mine = (moved) => moved.pointerId === event.pointerId && drag(moved);
    const finish = (ended) => {
      if (ended.pointerId !== event.pointerId) return;
      element.removeEventListener("pointermove", mine);
      element.removeEventListener("pointerup", finish);
      element.removeEventListener("pointercancel", finish);
      end(ended);
    };
    element.setPointerCapture(event.pointerId);
    element.addEventListener("pointermove", mine);
    element.addEventListener("pointerup", finish);
    element.addEventListener("pointercancel", finish);
  }

  #wheel(event) {
    const [x] = this.#at(event);
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), this.view.place(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX / this.view.plotWidth) * this.view.span);
    }
  }
}
