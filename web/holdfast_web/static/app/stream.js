// One stream of ticks for the page. Whoever cares about what changed asks again, at most once a second.

import { clock } from "./times.js";

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
