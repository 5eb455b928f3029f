// What is on show, and the selection, live in the page's address, so that a link shows what its sender saw.

const WRITE_MS = 300;
const NAMES = ["x", "from", "to", "live", "sel", "metric", "log", "branches", "table"];
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
    metric: query.get("metric"),
    logarithmic: query.get("log") === "1",
    everything: { all: true, standing: false }[query.get("branches")] ?? null,
    table: query.get("table") === "1",
  };
}

function shown(view, { selected, metric, logarithmic, everything, table }) {
  const query = new URLSearchParams(location.search);
  for (const name of NAMES) query.delete(name);
  if (view.axis === "time") query.set("x", "time");
  if (!view.fitted) {
    const rounded = (place) => (view.axis === "time" ? Math.round(place * TENTHS) / TENTHS : Math.round(place));
    query.set("from", rounded(view.from));
    query.set("to", rounded(view.to));
    if (view.live) query.set("live", "1");
  }
  if (metric && metric !== "loss") query.set("metric", metric);
  if (logarithmic) query.set("log", "1");
  if (everything !== null) query.set("branches", everything ? "all" : "standing");
  if (table) query.set("table", "1");
  if (selected) query.set("sel", selected);
  return query.toString();
}

/** Once the window has come to rest: browsers take offence at an address that changes with every frame. */
export function writeAddress(view, state) {
  clearTimeout(timer);
  write = () => {
    const text = shown(view, state);
    history.replaceState(history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
  };
  timer = setTimeout(flushAddress, WRITE_MS);
}

/** What is still to be written, now. */
export function flushAddress() {
  clearTimeout(timer);
  write?.();
  write = null;
}
