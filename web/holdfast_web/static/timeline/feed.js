// Requests the visible window and a margin from the API: one request at a time, at most one a second.

const MARGIN = 0.35;
const LIVE_MS = 1000;
const SLOWEST_MS = 10000;
const CALM_MS = 5000;
const MOVE_MS = 140;
const PATIENCE_MS = 20000;
const WHOLE_POINTS = 300;
/** Pixels per sample; a finer resolution is not visible and doubles the cost. */
const POINT_PX = 2;
const MARK_PX = 12;
/** The most checkpoints that the server sends one by one. */
const CHECKPOINTS = 1000;
const DIGITS = 5;

export class TimelineFeed extends EventTarget {
  #asking = false;
  #again = false;
  #timer = 0;
  #due = Infinity;
  #asked = -Infinity;
  #askedWhole = -Infinity;
  #covered = null;
  metric = "loss";
  /** Second metric, and the rank whose machine is shown; null for none. */
  second = null;
  rank = null;
  /** Approximate duration of an iteration; limits the request rate of a following window. */
  secondsPerIteration = 1;

  constructor(source, view) {
    super();
    this.source = source;
    this.view = view;
  }

  /** Milliseconds until the picture moves by a pixel, within limits. */
  get #pace() {
    if (!this.view.live) return CALM_MS;
    const stepSeconds = this.view.axis === "time" ? 1 : this.secondsPerIteration;
    const pixelMs = (1000 * stepSeconds * this.view.span) / this.view.plotWidth;
    return Math.min(SLOWEST_MS, Math.max(LIVE_MS, pixelMs));
  }

  /** What an answer must be about to be of use. */
  get #subject() {
    return [this.view.axis, this.metric, this.second, this.rank].join();
  }

  /** Discard the covered window after a change of the subject. */
  forget() {
    this.#covered = null;
    this.#askedWhole = -Infinity;
    this.ask();
  }

  /** Schedule a request after new data; less often for a window that does not follow. */
  wake() {
    if (document.hidden) return;
    this.#plan(Math.max(0, this.#pace - (performance.now() - this.#asked)));
    if (!this.view.whole && performance.now() - this.#askedWhole > CALM_MS) this.#askWhole();
  }

  /** Request data when the window leaves the covered range or needs a finer resolution. */
  moved() {
    if (!this.#covered) return;
    const { view } = this;
    const [from, to, span] = this.#covered;
    if (view.from < from || view.to > to || view.span < span * 0.72) this.#plan(MOVE_MS);
  }

  #plan(wait) {
    if (this.#asking) {
      this.#again = true;
      return;
    }
    const due = performance.now() + wait;
    if (due >= this.#due) return;
    clearTimeout(this.#timer);
    this.#due = due;
    this.#timer = setTimeout(() => this.ask(), wait);
  }

  #terms(points) {
    return { x: this.view.axis, points, metric: this.metric, digits: DIGITS, marks: Math.max(60, Math.round((points * POINT_PX) / MARK_PX)), checkpoints: CHECKPOINTS };
  }

  #query() {
    const { view } = this;
    const wide = view.whole ? view.plotWidth : view.plotWidth * (1 + 2 * MARGIN);
    const query = this.#terms(Math.round(Math.min(2000, Math.max(300, wide / POINT_PX))));
    if (this.second !== null) query.metric = [this.metric, this.second];
    if (this.rank !== null) query.machine = this.rank;
    if (view.whole) return query;
    const margin = view.span * MARGIN;
    const from = Math.max(view.axis === "time" ? 0 : 1, Math.floor(view.from - margin));
    return view.live && !view.behind ? { ...query, from } : { ...query, from, to: Math.max(from, Math.ceil(view.to + margin)) };
  }

  async #get(query) {
    const options = { headers: { Accept: "application/json" }, signal: AbortSignal.timeout(PATIENCE_MS) };
    const pairs = Object.entries(query).flatMap(([name, values]) => [values].flat().map((value) => [name, value]));
    const response = await fetch(`${this.source}?${new URLSearchParams(pairs)}`, options);
    if (!response.ok) throw new Error(`the timeline's API answered ${response.status}`);
    return response.json();
  }

  async ask() {
    if (this.#asking) {
      this.#again = true;
      return;
    }
    this.#asking = true;
    this.#again = false;
    this.#due = Infinity;
    clearTimeout(this.#timer);
    this.#asked = performance.now();
    const { span } = this.view;
    const subject = this.#subject;
    try {
      const timeline = await this.#get(this.#query());
      if (subject !== this.#subject) return; // it changed meanwhile
      if (timeline.extent) this.#cover(timeline, span);
      this.dispatchEvent(new CustomEvent("timeline", { detail: timeline }));
      this.#asking = false;
      this.moved();
    } catch (error) {
      this.dispatchEvent(new CustomEvent("trouble", { detail: error }));
    } finally {
      this.#asking = false;
      if (this.#again) this.#covered ? this.wake() : this.ask();
    }
  }

  #cover(timeline, span) {
    const [from, to] = timeline.time_window ?? timeline.window;
    const [start, end] = timeline.time_window ? timeline.times : timeline.extent;
    const coarse = timeline.bucketed || timeline.checkpoint_density || timeline.stall_density.length;
    this.#covered = [from <= start ? -Infinity : from, to >= end ? Infinity : to, coarse ? span : 0];
  }

  /** Request a coarse view of the whole run for the overview. */
  async #askWhole() {
    this.#askedWhole = performance.now();
    try {
      const { axis } = this.view;
      const timeline = await this.#get(this.#terms(WHOLE_POINTS));
      if (timeline.extent && axis === this.view.axis) this.dispatchEvent(new CustomEvent("whole", { detail: timeline }));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("trouble", { detail: error }));
    }
  }
}
