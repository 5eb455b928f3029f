// The window and the selection live in the page's address, so that a link shows what its sender saw.

const WRITE_MS = 300;
const NAMES = ["from", "to", "live", "sel"];
let timer = 0;

export function readAddress() {
  const query = new URLSearchParams(location.search);
  const [from, to] = [Number(query.get("from")), Number(query.get("to"))];
  return { window: to > from ? [from, to] : null, live: query.get("live") === "1", selected: query.get("sel") };
}

export function writeAddress(view, selected) {
  const query = new URLSearchParams(location.search);
  for (const name of NAMES) query.delete(name);
  if (!view.fitted) {
    query.set("from", Math.round(view.from));
    query.set("to", Math.round(view.to));
    if (view.live) query.set("live", "1");
  }
  if (selected) query.set("sel", selected);
  const text = query.toString();
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash), WRITE_MS);
}
