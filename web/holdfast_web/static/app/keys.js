// Keys of every page. They are heard before a page's own, so that "g a" does not pan a timeline.

import { remember, remembered } from "./memory.js";
import { toggleUtc } from "./times.js";

const PLACES = { f: "/", a: "/alerts", l: "/audit", s: "/settings" };
const FIELDS = { "/": '[data-hotkey="/"]', b: "#budget", i: "#every", x: "#goto-iteration" };
const CHORD_MS = 1500;
const KEY = "holdfast-keys";
let chord = 0;
let off = false;

// A checkbox takes no letters; one in a sheet that has just been closed still has the focus for a moment.
const busy = (event) =>
  event.target.closest?.("input:not([type=checkbox]), select, textarea, [contenteditable]") ||
  event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]");

function go(key) {
  const place = document.querySelector(`.nav a[href="${PLACES[key]}"]`);
  if (place) location.assign(place.href);
  return Boolean(place);
}

/** The row below or above the one that has the focus; of none, the first. */
function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  const here = rows.findIndex((row) => row.contains(document.activeElement));
  const row = rows[here < 0 ? 0 : Math.min(Math.max(here + by, 0), rows.length - 1)];
  row?.querySelector("a, button")?.focus();
  return Boolean(row);
}

function focus(selector) {
  const field = document.querySelector(selector);
  field?.focus();
  field?.select?.();
  return Boolean(field);
}

function heard(key) {
  const second = performance.now() < chord;
  chord = 0;
  if (second && PLACES[key]) return go(key);
  if (key === "g") {
    chord = performance.now() + CHORD_MS;
    return true;
  }
  if (key === "j" || key === "k") return step(key === "j" ? 1 : -1);
  if (FIELDS[key]) return focus(FIELDS[key]);
  if (key === "?") document.querySelector("#keys").showModal();
  else if (key === "u") toggleUtc();
  else return false;
  return true;
}

/** Whoever speaks to their computer, or hits keys by chance, can do without keys of one character. */
function letSwitchOff() {
  const box = document.querySelector("#single-keys");
  off = remembered(KEY) === "off";
  box.checked = !off;
  box.addEventListener("change", () => {
    off = !box.checked;
    remember(KEY, off ? "off" : "");
  });
}

export function startKeys() {
  letSwitchOff();
  const listen = (event) => {
    if (busy(event)) return;
    const silenced = off && event.key.length === 1;
    if (!silenced && !heard(event.key.toLowerCase())) return;
    // a key that is off stays the browser's own; a page's other keys hear of neither
    if (!silenced) event.preventDefault();
    event.stopImmediatePropagation();
  };
  document.addEventListener("keydown", listen, { capture: true });
}
