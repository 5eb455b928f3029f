// Live updates of an open page: the stream of ticks, the rows of the fleet, the forms.

import { clock } from "./times.js";

// ---- one stream of ticks per page; after a tick the page refreshes, at most once a second

const REFRESH_MS = 1000;
const POLL_MS = 5000;
const STALE_MS = 20000;
/** Three idle ticks: a proxy can drop the connection without closing it. */
const SILENT_MS = 15000;
/** Maximum wait for a refresh; the request of #live times out shortly after. */
const PATIENCE_MS = 8000;
const SLOW_MS = 15000;
/** Least time between two states of the chip, which screen readers announce. */
const CALM_MS = 5000;

const UNREACHED = 599;

class LiveConnection {
  #source = null;
  #lost = 0;
  #refreshed = 0;
  #timer = 0;
  #retry = 0;
  #lastEvent = 0;
  /** Time of the unanswered refresh request; 0 if none is open. */
  #asked = 0;
  #refused = false;
  #panels = Date.now();
  #changed = 0;
  /** The page was just rendered, so the first tick needs no refresh. */
  #new = true;

  constructor(url, chip) {
    this.url = url;
    this.chip = chip;
    setInterval(() => this.#watch(), 1000);
    document.addEventListener("visibilitychange", () => {
      this.#asked = 0;
      document.hidden ? this.close() : this.open();
    });
    // a form that failed says so itself; the stream reports a lost server
    document.addEventListener("htmx:error", (event) => event.detail.ctx?.sourceElement?.id === "live" && this.#answered({ status: UNREACHED }));
    document.addEventListener("htmx:after:request", (event) => event.detail.ctx.sourceElement?.id === "live" && this.#answered(event.detail.ctx.response));
    document.addEventListener("holdfast:refresh-now", () => this.#refresh());
    this.open();
  }

  open() {
    if (this.#source) return;
    clearTimeout(this.#retry);
    this.#lastEvent = Date.now();
    this.#source = new EventSource(this.url);
    this.#source.addEventListener("open", () => this.#received());
    this.#source.addEventListener("error", () => this.#fail());
    this.#source.addEventListener("tick", () => this.#tick());
  }

  // close the connection of a hidden page: browsers allow only six per server
  close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #tick() {
    this.#received();
    if (!this.#new) this.#refresh();
    this.#new = false;
  }

  #received() {
    this.#lost = 0;
    this.#lastEvent = Date.now();
    this.#update();
  }

  #answered({ status }) {
    this.#refused = status >= 400;
    if (!this.#refused) this.#asked = 0;
    this.#update();
  }

  /** Start of the outage: the stream is lost, or a refresh has no answer. */
  get #since() {
    if (this.#lost) return this.#lost;
    return this.#refused || Date.now() - this.#asked > PATIENCE_MS ? this.#asked : 0;
  }

  #fail() {
    this.#lost ||= Date.now();
    // browsers do not reconnect after an HTTP error, so retry here
    if (this.#source?.readyState === EventSource.CLOSED) {
      this.close();
      document.dispatchEvent(new CustomEvent("holdfast:stream-refused"));
      this.#retry = setTimeout(() => !document.hidden && this.open(), POLL_MS);
    }
  }

  #reconnect() {
    this.#fail();
    this.close();
    this.open();
  }

  #watch() {
    if (document.hidden) return;
    if (this.#source && Date.now() - this.#lastEvent > SILENT_MS) this.#reconnect();
    this.#update();
    if (this.#since && Date.now() - this.#refreshed > POLL_MS) this.#refresh();
  }

  #update() {
    if (document.body.dataset.signedOut === "") return this.#show("stale", "Signed out");
    const since = this.#since;
    if (!since) return this.#source?.readyState === EventSource.OPEN && this.#show("live", "Live");
    const away = Date.now() - since;
    if (away > STALE_MS) this.#show("stale", `Stale since ${clock(since / 1000)}`);
    else this.#show("reconnecting", this.#lost ? "Reconnecting" : "No answer", `${Math.round(away / 1000)} s`);
  }

  /** `counts` is hidden from screen readers because it changes every second. */
  #show(state, text, counts = "") {
    const shown = this.chip.dataset.state;
    if (state !== shown) {
      if (shown !== "waiting" && Date.now() - this.#changed < CALM_MS) return;
      this.#changed = Date.now();
      document.body.dataset.connection = this.chip.dataset.state = state;
    }
    const [, words, counter] = this.chip.children;
    if (words.textContent !== text) words.textContent = text;
    if (counter.textContent !== counts) counter.textContent = counts;
  }

  #refresh() {
    if (document.hidden || this.#timer) return;
    const wait = Math.max(0, REFRESH_MS - (Date.now() - this.#refreshed));
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#refreshed = Date.now();
      const live = document.querySelector("#live");
      if (live) {
        this.#asked ||= Date.now();
        htmx.trigger(live, "holdfast:refresh");
      }
      document.dispatchEvent(new CustomEvent("holdfast:tick"));
      if (Date.now() - this.#panels < SLOW_MS) return;
      this.#panels = Date.now();
      document.dispatchEvent(new CustomEvent("holdfast:refresh-panels"));
    }, wait);
  }
}

export function startStream() {
  const page = document.querySelector("[data-stream]");
  if (page) new LiveConnection(page.dataset.stream, document.querySelector("#connection"));
}

// ---- row order: rows keep their positions while one is hovered or focused, so that no job moves under a click;
// the next update afterwards sorts them

const table = () => document.querySelector("#fleet .jobs");
let before = [];

const isHovered = () => Boolean(table()?.matches(":hover, :focus-within"));
const rows = (place = table()) => [...(place?.querySelectorAll("tr[id]") ?? [])];

/** Restore the previous row order within each group. */
function restore(group) {
  const now = rows(group);
  const known = new Map(now.map((row) => [row.id, row]));
  const wanted = before.filter((id) => known.has(id)).map((id) => known.get(id));
  wanted.push(...now.filter((row) => !before.includes(row.id)));
  const focused = document.activeElement;
  wanted.forEach((row, place) => {
    const there = rows(group)[place];
    if (there !== row) there.before(row);
  });
  if (focused !== document.activeElement) focused.focus({ preventScroll: true });
}

export function startRowOrder() {
  const fleet = document.querySelector(".fleet");
  if (!fleet) return;
  const update = () => fleet.toggleAttribute("data-held", isHovered());
  for (const name of ["pointerover", "pointerleave", "focusin", "focusout"]) fleet.addEventListener(name, update);
  document.addEventListener("htmx:before:swap", () => (before = isHovered() ? rows().map((row) => row.id) : []));
  document.addEventListener("htmx:after:swap", () => {
    if (before.length) for (const group of table()?.tBodies ?? []) restore(group);
    update();
  });
}

// ---- forms: sliders next to number fields, and drafts that live updates must not overwrite

function toRange(value, { low, high, scale }) {
  if (scale === "linear") return (1000 * (value - low)) / (high - low);
  return (1000 * Math.log(value / low)) / Math.log(high / low);
}

function fromRange(step, { low, high, scale, whole }) {
  const [first, last, part] = [Number(low), Number(high), step / 1000];
  if (part === 0) return low;
  if (part === 1) return high;
  const value = scale === "linear" ? first + (last - first) * part : first * (last / first) ** part;
  if (whole !== undefined) return String(Math.round(value));
  return scale === "linear" ? String(Number(value.toPrecision(3))) : rounded(value);
}

function rounded(value) {
  return String(Number(value.toPrecision(value < 1 ? 1 : 2)));
}

function placeSliders() {
  for (const range of document.querySelectorAll("[data-log-range]")) {
    const value = Number(document.querySelector(range.dataset.logRange).value);
    if (value > 0 || range.dataset.scale === "linear") range.value = toRange(value, range.dataset);
  }
}

function slide(range) {
  const field = document.querySelector(range.dataset.logRange);
  field.value = fromRange(Number(range.value), range.dataset);
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Remove the error of the previous value once a new one is typed. */
function clearError(field) {
  field.removeAttribute("aria-invalid");
  for (const error of field.form.querySelectorAll(".field-error")) error.remove();
}

/** Show the state of a change before the server answers: draft, saving, failed. */
function showDraft(form, state, text) {
  const line = document.querySelector(`[data-draft="${form.getAttribute("action").split("/").at(-1)}"]`);
  if (!line) return;
  line.dataset.state = state;
  line.lastElementChild.textContent = text;
  line.hidden = !state;
}

/** The form whose answer is about to be swapped in was refused. */
let refused = false;

const inControls = (event) => event.detail.ctx?.sourceElement?.closest?.("#controls form[action]");

function startDrafts() {
  document.addEventListener("htmx:before:request", (event) => {
    const form = inControls(event);
    if (form && event.detail.ctx.request.method === "POST") showDraft(form, "draft", "Saving…");
  });
  const fail = (event) => {
    const form = inControls(event);
    if (!form || event.detail.ctx.request.method !== "POST") return;
    const status = event.detail.ctx.response?.status;
    if (status >= 400 && status < 500) {
      refused = status !== 401;
      showDraft(form, "failed", status === 401 ? "Not saved: signed out" : "Not saved");
      return;
    }
    // the next refresh tells whether it was saved
    form.dataset.unanswered = "failed";
    delete form.dataset.typed;
    showDraft(form, "failed", "No answer; the change may have been saved");
  };
  document.addEventListener("htmx:error", fail);
  document.addEventListener("htmx:response:error", fail);
  document.addEventListener("htmx:before:request", (event) => {
    if (event.detail.ctx.sourceElement?.id !== "live") return;
    for (const form of document.querySelectorAll("[data-unanswered]")) form.dataset.unanswered = "asked";
  });
  document.addEventListener("htmx:after:request", (event) => {
    if (event.detail.ctx.sourceElement?.id === "live" && !(event.detail.ctx.response?.status < 400)) {
      for (const form of document.querySelectorAll("[data-unanswered]")) form.dataset.unanswered = "failed";
    }
  });
}

/** Resolve changes without an answer, once a later refresh shows the version: the same one means not saved. */
function resolveUnanswered() {
  const version = document.querySelector("[data-version]")?.dataset.version;
  for (const form of document.querySelectorAll('[data-unanswered="asked"]')) {
    delete form.dataset.unanswered;
    if (form.querySelector("[name=version]")?.value !== version) continue;
    if (form.matches("[data-guard]")) form.dataset.typed = "";
    showDraft(form, "failed", "Not saved: apply again");
  }
}

/** Return whether a control has unsaved input. */
const hasDraft = () => document.querySelector("#controls form[data-typed]") !== null;

function refreshControls() {
  const controls = document.querySelector("#controls");
  const current = document.querySelector(".job-head[data-settings]")?.dataset.settings;
  const shown = controls?.querySelector("[data-settings]")?.dataset.settings;
  if (controls && current !== shown && !hasDraft()) htmx.trigger(controls, "holdfast:controls");
}

export function startForms() {
  placeSliders();
  startDrafts();
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-log-range]")) slide(event.target);
    else if (event.target.closest("[data-guard]")) {
      event.target.closest("[data-guard]").dataset.typed = "";
      clearError(event.target);
      placeSliders();
      showDraft(event.target.form, "draft", "Not saved yet");
    }
  });
  // do not replace input that was typed during the request
  document.addEventListener("htmx:before:swap", (event) => {
    if (event.detail.ctx.sourceElement?.id === "controls" && hasDraft()) event.preventDefault();
  });
  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx.target?.id === "controls") {
      placeSliders();
      // a refused value is to be typed anew; htmx puts the focus back on the button first
      if (refused) requestAnimationFrame(() => document.querySelector("#controls [aria-invalid=true]")?.focus());
      refused = false;
      return;
    }
    resolveUnanswered();
    refreshControls();
  });
}
