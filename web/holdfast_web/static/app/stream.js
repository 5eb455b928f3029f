// One stream of ticks for the page. Whoever cares about what changed asks again, at most once a second.

const REFRESH_MS = 1000;
const POLL_MS = 5000;
const STALE_MS = 20000;

class Connection {
  #source = null;
  #lost = 0;
  #refreshed = 0;
  #timer = 0;

  constructor(url, chip) {
    this.url = url;
    this.chip = chip;
    setInterval(() => this.#watch(), 1000);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    document.addEventListener("htmx:error", () => this.#fail());
    document.addEventListener("holdfast:now", () => this.#refresh());
    this.open();
  }

  open() {
    if (this.#source) return;
    this.#source = new EventSource(this.url);
    this.#source.addEventListener("open", () => this.#heard());
    this.#source.addEventListener("error", () => this.#fail());
    this.#source.addEventListener("tick", () => this.#tick());
  }

  // a hidden page gives its connection back: browsers grant only six to one server
  close() {
    this.#source?.close();
    this.#source = null;
  }

  #tick() {
    this.#heard();
    this.#refresh();
  }

  #heard() {
    this.#lost = 0;
    this.#show("live", "Live");
  }

  #fail() {
    this.#lost ||= Date.now();
    // a browser gives up after an answer that is no stream; then we try again ourselves
    if (this.#source?.readyState === EventSource.CLOSED) {
      this.close();
      setTimeout(() => !document.hidden && this.open(), POLL_MS);
    }
  }

  #watch() {
    if (!this.#lost || document.hidden) return;
    const away = Date.now() - this.#lost;
    if (away > STALE_MS) this.#show("stale", `Stale since ${new Date(this.#lost).toLocaleTimeString("en-GB")}`);
    else this.#show("reconnecting", `Reconnecting, ${Math.round(away / 1000)} s`);
    if (Date.now() - this.#refreshed > POLL_MS) this.#refresh();
  }

  #show(state, text) {
    document.body.dataset.connection = state;
    if (this.chip.dataset.state === state && this.chip.lastElementChild.textContent === text) return;
    this.chip.dataset.state = state;
    this.chip.lastElementChild.textContent = text;
  }

  #refresh() {
    if (document.hidden || this.#timer) return;
    const wait = Math.max(0, REFRESH_MS - (Date.now() - this.#refreshed));
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#refreshed = Date.now();
      const live = document.querySelector("#live");
      if (live) htmx.trigger(live, "holdfast:refresh");
      document.dispatchEvent(new CustomEvent("holdfast:tick"));
    }, wait);
  }
}

export function startStream() {
  const page = document.querySelector("[data-stream]");
  if (page) new Connection(page.dataset.stream, document.querySelector("#connection"));
}
