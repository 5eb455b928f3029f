// Times on the page: ages count between updates by the server's clock; times of day are local or UTC.

import { age } from "../timeline/format.js";

const KEY = "holdfast-utc";
let ahead = 0;
let lastNow = 0;
let utc = false;

/** Read the server's time from the page, to correct for the local clock. */
function readServerTime() {
  const at = Number(document.querySelector("[data-now]")?.dataset.now);
  if (at && at !== lastNow) {
    lastNow = at;
    ahead = at - Date.now() / 1000;
  }
}

const serverNow = () => Date.now() / 1000 + ahead;

/** Return the day and the time of day. */
function stamp(at, inUtc) {
  const offset = inUtc ? 0 : new Date(at * 1000).getTimezoneOffset() * 60;
  return new Date((at - offset) * 1000).toISOString().slice(0, 19).split("T");
}

const named = (text) => (utc ? `${text} UTC` : text);

/** Format a time of day, with the zone if it is not the local one. */
export const clock = (at) => named(stamp(at, utc)[1]);

function updateTimes() {
  const still = document.hidden || document.body.dataset.connection === "stale";
  for (const element of document.querySelectorAll("time[data-at]")) {
    const at = Number(element.dataset.at);
    const counts = !element.dataset.as;
    if (still && counts) continue;
    const text = counts ? age(Math.max(0, serverNow() - at)) : element.dataset.as === "clock" ? clock(at) : named(stamp(at, utc).join(" "));
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Show local time and UTC in the tooltip. */
function showBothZones(event) {
  const element = event.target.closest?.("time[data-at]");
  if (!element) return;
  const at = Number(element.dataset.at);
  element.title = `${stamp(at, false).join(" ")} local · ${stamp(at, true).join(" ")} UTC`;
}

/** Announce the zone to the timeline, which shares only the document with this script. */
function announceZone() {
  document.documentElement.toggleAttribute("data-utc", utc);
  document.dispatchEvent(new CustomEvent("holdfast:zone"));
  const button = document.querySelector("[data-utc-toggle]");
  if (button) button.textContent = utc ? "Show local times" : "Show times in UTC";
}

export function toggleUtc() {
  utc = !utc;
  remember(KEY, utc ? "1" : "");
  announceZone();
  updateTimes();
}

export function startTimes() {
  utc = remembered(KEY) === "1";
  readServerTime();
  announceZone();
  updateTimes();
  document.addEventListener("htmx:after:swap", () => {
    readServerTime();
    updateTimes();
  });
  document.addEventListener("pointerover", showBothZones);
  document.addEventListener("focusin", showBothZones);
  document.addEventListener("click", (event) => event.target.closest("[data-utc-toggle]") && toggleUtc());
  setInterval(updateTimes, 1000);
}

// ---- settings stored in the browser; without storage they last until the page closes

export function remembered(key) {
  try {
    return localStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // as above
  }
}
