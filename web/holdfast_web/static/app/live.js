// What changes while a page is open: the stream of ticks, the rows of the fleet, the forms.

import { clock } from "./times.js";

// ---- one stream of ticks for the page; what depends on a change asks again, at most once a second

const REFRESH_MS = 1000;
const POLL_MS = 5000;
const STALE_MS = 20000;
/** Three ticks of a server that has nothing new to tell: what lies between may drop a connection and tell nobody. */
const SILENT_MS = 15000;
/** An answer to what the page asks for itself; #live gives up a little later, and asks again. */
const PATIENCE_MS = 8000;
const SLOW_MS = 15000;

class Connection {
  #source = null;
  #lost = 0;
  #refreshed = 0;
  #timer = 0;
  #retry = 0;
  #lastWord = 0;
  /** Since when what the page asked for itself has not been answered; 0: it has. */
  #asked = 0;
  #refused = false;
  #panels = Date.now();
  /** The page has just been made: the first tick tells of nothing that it does not show. */
  #new = true;

  constructor(url, chip) {
    this.url = url;
    this.chip = chip;
    setInterval(() => this.#watch(), 1000);
    document.addEventListener("visibilitychange", () => {
      this.#asked = 0;
      document.hidden ? this.close() : this.open();
    });
    document.addEventListener("htmx:error", () => this.#fail());
    document.addEventListener("htmx:after:request", (event) => event.detail.ctx.sourceElement?.id === "live" && this.#answered(event.detail.ctx.response));
    document.addEventListener("holdfast:now", () => this.#refresh());
    this.open();
  }

  open() {
    if (this.#source) return;
    clearTimeout(this.#retry);
    this.#lastWord = Date.now();
    this.#source = new EventSource(this.url);
    this.#source.addEventListener("open", () => this.#heard());
    this.#source.addEventListener("error", () => this.#fail());
    this.#source.addEventListener("tick", () => this.#tick());
  }

  // a hidden page gives its connection back: browsers grant only six to one server
  close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #tick() {
    this.#heard();
    if (!this.#new) this.#refresh();
    this.#new = false;
  }

  #heard() {
    this.#lost = 0;
    this.#lastWord = Date.now();
    this.#tell();
  }

  #answered({ status }) {
    this.#refused = status >= 400;
    if (!this.#refused) this.#asked = 0;
    this.#tell();
  }

  /** A stream that lives is not enough: what it told of has to come, too. */
  get #since() {
    if (this.#lost) return this.#lost;
    return this.#refused || Date.now() - this.#asked > PATIENCE_MS ? this.#asked : 0;
  }

  #fail() {
    this.#lost ||= Date.now();
    // a browser gives up after an answer that is no stream; then we try again ourselves
    if (this.#source?.readyState === EventSource.CLOSED) {
      this.close();
      this.#retry = setTimeout(() => !document.hidden && this.open(), POLL_MS);
    }
  }

  #listenAgain() {
    this.#fail();
    this.close();
    this.open();
  }

  #watch() {
    if (document.hidden) return;
    if (this.#source && Date.now() - this.#lastWord > SILENT_MS) this.#listenAgain();
    this.#tell();
    if (this.#since && Date.now() - this.#refreshed > POLL_MS) this.#refresh();
  }

  #tell() {
    const since = this.#since;
    if (!since) return this.#source?.readyState === EventSource.OPEN && this.#show("live", "Live");
    const away = Date.now() - since;
    if (away > STALE_MS) this.#show("stale", `Stale since ${clock(since / 1000)}`);
    else this.#show("reconnecting", this.#lost ? "Reconnecting" : "No answer", `${Math.round(away / 1000)} s`);
  }

  /** `counts` goes on by itself, and is read aloud to nobody. */
  #show(state, text, counts = "") {
    document.body.dataset.connection = this.chip.dataset.state = state;
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
      document.dispatchEvent(new CustomEvent("holdfast:slow"));
    }, wait);
  }
}

export function startStream() {
  const page = document.querySelector("[data-stream]");
  if (page) new Connection(page.dataset.stream, document.querySelector("#connection"));
}

// ---- order of rows: rows keep their places while the pointer or the keyboard is on one, so that no job moves
// away under a click; the next update after that brings the true order

const table = () => document.querySelector("#fleet .jobs");
let before = [];

const held = () => Boolean(table()?.matches(":hover, :focus-within"));
const rows = (place = table()) => [...(place?.querySelectorAll("tr[id]") ?? [])];

/** Within a group: a job stands under its project. */
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

export function startOrder() {
  const fleet = document.querySelector(".fleet");
  if (!fleet) return;
  const tell = () => fleet.toggleAttribute("data-held", held());
  for (const name of ["pointerover", "pointerleave", "focusin", "focusout"]) fleet.addEventListener(name, tell);
  document.addEventListener("htmx:before:swap", () => (before = held() ? rows().map((row) => row.id) : []));
  document.addEventListener("htmx:after:swap", () => {
    if (before.length) for (const group of table()?.tBodies ?? []) restore(group);
    tell();
  });
}

// ---- forms: sliders beside number fields, and drafts that live updates must not overwrite

const toRange = (value, low, high) => (1000 * Math.log(value / low)) / Math.log(high / low);
const fromRange = (step, low, high) => low * (high / low) ** (step / 1000);

function rounded(value) {
  return String(Number(value.toPrecision(value < 1 ? 1 : 2)));
}

function placeSliders() {
  for (const range of document.querySelectorAll("[data-log-range]")) {
    const value = Number(document.querySelector(range.dataset.logRange).value);
    if (value > 0) range.value = toRange(value, Number(range.dataset.low), Number(range.dataset.high));
  }
}

function slide(range) {
  const field = document.querySelector(range.dataset.logRange);
  field.value = rounded(fromRange(Number(range.value), Number(range.dataset.low), Number(range.dataset.high)));
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

/** The reason why the value before was refused says nothing of the one that is being typed. */
function forgetError(field) {
  field.removeAttribute("aria-invalid");
  for (const error of field.form.querySelectorAll(".field-error")) error.remove();
}

/** What is true before the server has spoken: a draft, a change on its way, one that did not get there. */
function tellDraft(form, state, text) {
  const line = document.querySelector(`[data-draft="${form.getAttribute("action").split("/").at(-1)}"]`);
  if (!line) return;
  line.dataset.state = state;
  line.lastElementChild.textContent = text;
  line.hidden = !state;
}

const inControls = (event) => event.detail.ctx?.sourceElement?.closest?.("#controls form[action]");

function startDrafts() {
  document.addEventListener("htmx:before:request", (event) => {
    const form = inControls(event);
    if (form && event.detail.ctx.request.method === "POST") tellDraft(form, "draft", "Saving…");
  });
  const fail = (event) => {
    const form = inControls(event);
    if (!form || event.detail.ctx.request.method !== "POST") return;
    const status = event.detail.ctx.response?.status;
    if (status >= 400 && status < 500) {
      tellDraft(form, "failed", "Not saved");
      return;
    }
    // Where it was saved after all, the page's next news brings the controls again, over what was typed.
    delete form.dataset.typed;
    tellDraft(form, "failed", "No answer; the change may have been saved");
  };
  document.addEventListener("htmx:error", fail);
  document.addEventListener("htmx:response:error", fail);
}

/** Whether somebody is at work in the controls. */
const busy = () => document.querySelector("#controls form[data-typed]") !== null;

function refreshControls() {
  const controls = document.querySelector("#controls");
  const version = document.querySelector("[data-version]")?.dataset.version;
  const shown = controls?.querySelector("[name=version]")?.value;
  if (controls && version !== shown && !busy()) htmx.trigger(controls, "holdfast:controls");
}

export function startForms() {
  placeSliders();
  startDrafts();
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-log-range]")) slide(event.target);
    else if (event.target.closest("[data-guard]")) {
      event.target.closest("[data-guard]").dataset.typed = "";
      forgetError(event.target);
      placeSliders();
      tellDraft(event.target.form, "draft", "Not saved yet");
    }
  });
  // Somebody may have begun to type since the controls were asked for.
  document.addEventListener("htmx:before:swap", (event) => {
    if (event.detail.ctx.sourceElement?.id === "controls" && busy()) event.preventDefault();
  });
  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx.target?.id === "controls") placeSliders();
    else refreshControls();
  });
}
