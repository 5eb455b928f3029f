// Moments: ages go on counting between updates, by the server's clock; times of day are told where the reader is.

import { age } from "../timeline/format.js";

const KEY = "holdfast-utc";
let ahead = 0;
let heard = 0;
let utc = false;

/** The server's time, as last heard, against this machine's. */
function hearPage() {
  const at = Number(document.querySelector("[data-now]")?.dataset.now);
  if (at && at !== heard) {
    heard = at;
    ahead = at - Date.now() / 1000;
  }
}

const serverNow = () => Date.now() / 1000 + ahead;

const two = (number) => String(number).padStart(2, "0");

function stamp(at, inUtc) {
  const time = new Date((at - (inUtc ? 0 : new Date(at * 1000).getTimezoneOffset() * 60)) * 1000);
  const day = `${time.getUTCFullYear()}-${two(time.getUTCMonth() + 1)}-${two(time.getUTCDate())}`;
  return [day, `${two(time.getUTCHours())}:${two(time.getUTCMinutes())}:${two(time.getUTCSeconds())}`];
}

const named = (text) => (utc ? `${text} UTC` : text);

/** A time of day; the zone is told where it is not the reader's own. */
export const clock = (at) => named(stamp(at, utc)[1]);

function tell() {
  const still = document.hidden || document.body.dataset.connection === "stale";
  for (const element of document.querySelectorAll("time[data-at]")) {
    const at = Number(element.dataset.at);
    const counts = !element.dataset.as;
    if (still && counts) continue;
    const text = counts ? age(Math.max(0, serverNow() - at)) : element.dataset.as === "clock" ? clock(at) : named(stamp(at, utc).join(" "));
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Both, when somebody asks by resting on it. */
function explain(event) {
  const element = event.target.closest?.("time[data-at]");
  if (!element) return;
  const at = Number(element.dataset.at);
  element.title = `${stamp(at, false).join(" ")} local · ${stamp(at, true).join(" ")} UTC`;
}

/** What else tells times on this page sees it at the root, and hears of it. */
function name() {
  document.documentElement.toggleAttribute("data-utc", utc);
  document.dispatchEvent(new CustomEvent("holdfast:zone"));
  const button = document.querySelector("[data-utc-toggle]");
  if (button) button.textContent = utc ? "Show local times" : "Show times in UTC";
}

export function toggleUtc() {
  utc = !utc;
  remember(KEY, utc ? "1" : "");
  name();
  tell();
}

export function startTimes() {
  utc = remembered(KEY) === "1";
  hearPage();
  name();
  tell();
  document.addEventListener("htmx:after:swap", () => {
    hearPage();
    tell();
  });
  document.addEventListener("pointerover", explain);
  document.addEventListener("focusin", explain);
  document.addEventListener("click", (event) => event.target.closest("[data-utc-toggle]") && toggleUtc());
  setInterval(tell, 1000);
}

// ---- what this browser remembers; where storage is forbidden, a choice lasts for the page

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
