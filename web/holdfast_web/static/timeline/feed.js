// Asks the API for the window on show and a margin around it; one question at a time, at most one a second.

const MARGIN = 0.35;
const LIVE_MS = 1000;
const CALM_MS = 5000;
const MOVE_MS = 140;
const WHOLE_POINTS = 400;

export class Feed extends EventTarget {
  #asking = false;
  #again = false;
  #timer = 0;
  #due = Infinity;
  #asked = -Infinity;
  #askedWhole = -Infinity;
  #covered = null;

  constructor(source, view) {
    super();
    this.source = source;
    this.view = view;
  }

  /** Something new has happened; a window that does not follow hears of it more seldom. */
  wake() {
    if (document.hidden) return;
    const pace = this.view.live ? LIVE_MS : CALM_MS;
    this.#plan(Math.max(0, pace - (performance.now() - this.#asked)));
    if (!this.view.fitted && performance.now() - this.#askedWhole > CALM_MS) this.#askWhole();
  }

  /** The window moved: ask when it leaves what is known, or when it could be seen more sharply. */
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

  #query() {
    const { view } = this;
    const points = Math.round(Math.min(2000, Math.max(300, view.plotWidth * 1.6)));
    if (view.fitted) return { points };
    const margin = view.span * MARGIN;
    const from = Math.max(1, Math.floor(view.from - margin));
    return view.live ? { points, from } : { points, from, to: Math.max(from, Math.ceil(view.to + margin)) };
  }

  async #get(query) {
    const response = await fetch(`${this.source}?${new URLSearchParams(query)}`, { headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(`the timeline's API answered ${response.status}`);
    return response.json();
  }

  async ask() {
    if (this.#asking) return;
    this.#asking = true;
    this.#again = false;
    this.#due = Infinity;
    this.#asked = performance.now();
    const span = this.view.span;
    try {
      const timeline = await this.#get(this.#query());
      if (timeline.extent) this.#cover(timeline, span);
      this.dispatchEvent(new CustomEvent("timeline", { detail: timeline }));
      this.#asking = false;
      this.moved();
    } catch (error) {
      this.dispatchEvent(new CustomEvent("trouble", { detail: error }));
    } finally {
      this.#asking = false;
      if (this.#again) this.wake();
    }
  }

  #cover(timeline, span) {
    const [from, to] = timeline.window;
    const [start, end] = timeline.extent;
    this.#covered = [from <= start ? -Infinity : from, to >= end ? Infinity : to, timeline.bucketed ? span : 0];
  }

  /** The whole run, roughly, for the strip above a window that shows a part of it. */
  async #askWhole() {
    this.#askedWhole = performance.now();
    try {
      const timeline = await this.#get({ points: WHOLE_POINTS });
      if (timeline.extent) this.dispatchEvent(new CustomEvent("whole", { detail: timeline }));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("trouble", { detail: error }));
    }
  }
}
