// Behavior of every page. A part whose elements are missing does nothing.

import { startForms, startRowOrder, startStream } from "./live.js";
import { checkSession, startSession, statusOf } from "./session.js";
import { remember, remembered, startTimes, toggleUtc } from "./times.js";

// ---- theme: the system's, until light or dark is chosen

const NEXT = { system: "light", light: "dark", dark: "system" };
const root = document.documentElement;

const announce = () => document.dispatchEvent(new CustomEvent("holdfast:theme"));

function show(button) {
  const name = `Theme: ${root.dataset.theme ?? "system"}`;
  button.setAttribute("aria-label", name);
  button.title = name;
}

function choose(theme) {
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  remember("holdfast-theme", theme);
  announce();
}

function startTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  const button = document.querySelector("[data-theme-toggle]");
  show(button);
  button.addEventListener("click", () => {
    choose(NEXT[root.dataset.theme ?? "system"]);
    show(button);
  });
}

// ---- keyboard shortcuts of all pages; they run before those of a page, so that "g a" does not pan the timeline

const PLACES = { f: "/", a: "/alerts", l: "/audit", s: "/settings" };
const FIELDS = { "/": '[data-hotkey="/"]', b: "#budget", i: "#every", x: "#goto-iteration" };
const CHORD_MS = 1500;
const KEY = "holdfast-keys";
let chord = 0;
let off = false;

// checkboxes take no letters; one in a closing dialog can still have the focus
const isTyping = (event) =>
  event.target.closest?.("input:not([type=checkbox]), select, textarea, [contenteditable]") ||
  event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]");

function go(key) {
  const place = document.querySelector(`.nav a[href="${PLACES[key]}"]`);
  if (place) location.assign(place.href);
  return Boolean(place);
}

// the rows of a page: those that it names, else those of its lists, else its panels
const ROWS = ["[data-row]", ":is(.alerts > li, .rows tbody tr, .report-projects tbody tr, .report .log > li)", ".settings > section"];

function listRows() {
  for (const selector of ROWS) {
    const rows = [...document.querySelectorAll(selector)].filter((row) => row.checkVisibility());
    if (rows.length) return rows;
  }
  return [];
}

/** Move the focus to the next or previous row, at its link if it has one: Enter opens it, and changes nothing. */
function step(by) {
  const rows = listRows();
  const here = rows.findLastIndex((row) => row.contains(document.activeElement));
  const row = rows[here < 0 ? 0 : Math.min(Math.max(here + by, 0), rows.length - 1)];
  if (!row) return false;
  const target = row.querySelector("a[href]");
  if (!target) row.tabIndex = -1;
  (target ?? row).focus();
  return true;
}

function focus(selector) {
  const field = document.querySelector(selector);
  field?.focus();
  field?.select?.();
  return Boolean(field);
}

function handleKey(key) {
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

/** Let users disable single-key shortcuts, for speech input and accidental key presses (WCAG 2.1.4). */
function startKeySwitch() {
  const box = document.querySelector("#single-keys");
  off = remembered(KEY) === "off";
  box.checked = !off;
  box.addEventListener("change", () => {
    off = !box.checked;
    remember(KEY, off ? "off" : "");
  });
}

function startKeys() {
  startKeySwitch();
  const listen = (event) => {
    if (isTyping(event)) return;
    const silenced = off && event.key.length === 1;
    if (!silenced && !handleKey(event.key.toLowerCase())) return;
    // a disabled key keeps its browser default; other listeners get neither
    if (!silenced) event.preventDefault();
    event.stopImmediatePropagation();
  };
  document.addEventListener("keydown", listen, { capture: true });
}

// ---- dialogs: the server renders them; this code opens and closes them

const restore = () => document.querySelector("#restore-dialog");

function openDialog(url) {
  htmx.ajax("GET", url, { target: "#restore-dialog", swap: "innerHTML" });
}

/** Whether a swap belongs to a dialog that opens: a form in it answers with other parts of the page too. */
const isOpening = ({ detail: { ctx } }) => ctx.target === restore() && ctx.target !== null && ctx.request?.method === "GET";

/** Open the dialog with its frame at once; the answer fills it, unless it was closed meanwhile. */
function startSkeleton() {
  document.addEventListener("htmx:before:request", (event) => {
    const dialog = restore();
    if (!isOpening(event) || dialog.open) return;
    dialog.replaceChildren(document.querySelector("#dialog-skeleton").content.cloneNode(true));
    dialog.showModal();
  });
  document.addEventListener("htmx:before:swap", (event) => isOpening(event) && !restore().open && event.preventDefault());
  document.addEventListener("htmx:after:swap", (event) => isOpening(event) && restore().querySelector("[autofocus]")?.focus());
  document.addEventListener("htmx:finally:request", (event) => {
    if (isOpening(event) && restore().querySelector(".skeleton")) restore().close();
  });
}

function startDialogs() {
  startSkeleton();
  document.addEventListener("holdfast:restore", (event) => {
    openDialog(`/jobs/${document.querySelector("[data-job]").dataset.job}/restore?${event.detail}`);
  });
  document.addEventListener("holdfast:annotate", (event) => {
    const link = document.querySelector("#annotate");
    if (link) openDialog(`${link.pathname}${event.detail === null ? "" : `?iteration=${event.detail}`}`);
  });
  for (const done of ["holdfast:restore-requested", "holdfast:annotated"]) document.addEventListener(done, () => restore()?.close());
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) document.querySelector(opener.dataset.open).showModal();
    const closer = event.target.closest("dialog [data-close]");
    if (closer) {
      event.preventDefault();
      closer.closest("dialog").close();
    }
    // a click on the backdrop reaches the dialog itself
    if (event.target.matches("dialog[open]")) event.target.close();
  });
}

/** Apply an interval of the plan on the page of its job, whose controls show the outcome. */
function startPlan() {
  document.addEventListener("submit", async (event) => {
    const { target: form } = event;
    if (!form.matches(".apply-plan") || !document.querySelector("#controls")) return;
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    await htmx.ajax("POST", form.action, { source: form, target: "#controls", values });
    document.querySelector("#interval-title")?.scrollIntoView({ block: "center" });
  });
}

// ---- copying to the clipboard

const DONE_MS = 1500;
const TO_DO_MS = 6000;

/** Copy to the clipboard; where that fails (plain HTTP, or a refusal), select the text for manual copying. */
async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

function startCopying() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const done = await copyText(document.querySelector(button.dataset.copy));
    button.textContent = done ? "Copied" : "Selected; press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), done ? DONE_MS : TO_DO_MS);
  });
}

// ---- filters: a choice loads the page with the new query; empty fields are omitted

function address(form) {
  const query = String(new URLSearchParams([...new FormData(form)].filter(([, value]) => value)));
  return new URL(form.action).pathname + (query ? `?${query}` : "");
}

function startFilters() {
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submits]")) location.assign(address(event.target.form));
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-in-address]")) history.replaceState(null, "", address(event.target.form));
  });
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || !event.target.matches(".filters")) return;
    event.preventDefault();
    // typing has updated the rows and the address already, and a new page would lose the focus
    if (document.activeElement?.matches("[data-in-address]")) return;
    location.assign(address(event.target));
  });
  document.addEventListener("keydown", (event) => {
    const menu = event.key === "Escape" && document.querySelector(":is(.view-options, .save-view)[open]");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

// ---- selected rows of the fleet

const checkRows = (checked) => {
  for (const box of document.querySelectorAll(".select-row")) box.checked = checked;
};

function startSelection() {
  document.addEventListener("change", (event) => {
    if (event.target.matches("#select-all")) checkRows(event.target.checked);
    else if (event.target.matches(".select-row:not(:checked)")) document.querySelector("#select-all").checked = false;
  });
  document.addEventListener("htmx:after:swap", () => document.querySelector("#select-all:checked") && checkRows(true));
}

// ---- selected restore point: marked in the table and on the timeline

let selected = new URLSearchParams(location.search).get("sel");

function mark() {
  for (const row of document.querySelectorAll("[data-checkpoint]")) {
    row.toggleAttribute("data-selected", row.dataset.checkpoint === selected);
  }
}

function startSelected() {
  mark();
  document.addEventListener("holdfast:selected", (event) => {
    selected = event.detail;
    mark();
  });
  document.addEventListener("htmx:after:swap", mark);
  document.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-select], [data-goto]");
    if (!chosen) return;
    const { select, goto, at } = chosen.dataset;
    if (select) document.dispatchEvent(new CustomEvent("holdfast:select", { detail: select }));
    else document.dispatchEvent(new CustomEvent("holdfast:goto", { detail: { iteration: Number(goto), at: Number(at) } }));
    document.querySelector('[data-lane="lineages"]').scrollIntoView({ block: "nearest" });
  });
}

// ---- the title and the icon of the tab follow the verdict; the navigation counts the firing alerts

const COUNT_MS = 60000;

function showVerdict() {
  const state = document.querySelector("[data-icon]")?.dataset;
  if (!state) return;
  if (document.title !== state.title) document.title = state.title;
  const icon = document.querySelector('link[rel="icon"]');
  if (icon.getAttribute("href") !== state.icon) icon.setAttribute("href", state.icon);
}

async function countAlerts(badge) {
  if (document.hidden) return;
  const answer = await fetch("/alerts/count").catch(() => null);
  if (!answer?.ok) return;
  const count = await answer.text();
  badge.firstElementChild.textContent = count;
  badge.hidden = count === "0";
}

function startTab() {
  document.addEventListener("htmx:after:swap", showVerdict);
  const badge = document.querySelector(".alert-count");
  if (!badge) return;
  countAlerts(badge);
  setInterval(() => countAlerts(badge), COUNT_MS);
}

// ---- failed requests: report those that the user made; the page repeats its own

const SHOWN_MS = 8000;
let timer = 0;

function showError(text) {
  const box = document.querySelector("#request-error");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (box.hidden = true), SHOWN_MS);
}

const UNKNOWN = "the change may have been saved. The page shows the result once it is live.";
const isRead = (event) => (event.detail.ctx?.request?.method ?? "GET") === "GET";
const isPageRefresh = (event) => event.detail.ctx?.sourceElement?.id === "live";

/** Return what keeps the server from taking a form; empty if nothing does. A lost session shows its own banner. */
async function findObstacle() {
  for (const status of await Promise.all([statusOf("/readyz"), checkSession()])) {
    if (status === 0) return "The server cannot be reached; nothing was changed. Try again in a moment.";
    if (status >= 500) return `The server answered ${status}; nothing was changed. Try again in a moment.`;
    if (status === 401) return "You are signed out; nothing was changed.";
  }
  return "";
}

/** Before a form leaves the page, ask whether the server takes it: another page would lose what was typed. A form that signs in is sent at once. */
function startLeaving() {
  let answered = null;
  let asking = false;
  document.addEventListener("submit", async (event) => {
    const { target: form, submitter } = event;
    const stays = event.defaultPrevented || form.method !== "post" || form.matches("[hx-post], [action='/logout']");
    if (stays || form.closest(".login") || submitter?.matches("[hx-post]")) return;
    const leaves = form === answered;
    answered = null;
    if (leaves) return;
    event.preventDefault();
    if (asking) return;
    asking = true;
    const obstacle = await findObstacle();
    asking = false;
    if (obstacle) return showError(obstacle);
    answered = form;
    form.requestSubmit(submitter);
  });
}

/** Load a panel again whose first load failed, with the next refresh of the panels. */
function retryLater(event) {
  const panel = event.detail.ctx?.sourceElement;
  if (panel?.matches?.("section[hx-get]")) panel.dataset.failed = "";
}

function retryPanels() {
  for (const panel of document.querySelectorAll("[data-failed]")) {
    delete panel.dataset.failed;
    htmx.trigger(panel, "holdfast:retry");
  }
}

function startErrors() {
  for (const failed of ["htmx:error", "htmx:response:error"]) document.addEventListener(failed, retryLater);
  document.addEventListener("holdfast:refresh-panels", retryPanels);
  document.addEventListener("htmx:error", (event) => {
    if (isPageRefresh(event)) return;
    showError(isRead(event) ? "The server cannot be reached. Try again once the page is live." : `The server cannot be reached: ${UNKNOWN}`);
  });
  document.addEventListener("htmx:response:error", (event) => {
    const status = event.detail.ctx.response.status;
    if (isPageRefresh(event) || [401, 404, 409, 422].includes(status)) return;
    if (status < 500) showError(`The server answered ${status}; nothing was changed. Try again in a moment.`);
    else showError(isRead(event) ? `The server answered ${status}. Try again in a moment.` : `The server answered ${status}: ${UNKNOWN}`);
  });
}

/** Fill in the code of a one-time link. It is in the URL fragment, which browsers do not send. */
function startOneTimeLink() {
  const field = document.querySelector("[data-from-address]");
  const code = field && decodeURIComponent(location.hash.slice(1));
  if (!code) return;
  field.value = code;
  field.closest(".code-field").hidden = true;
  history.replaceState(null, "", location.pathname);
}

/** Unfold the panel that a link leads to; once htmx has started, which loads its content then. */
function startFoldedPanels() {
  const unfold = (hash) => document.getElementById(hash.slice(1))?.closest("details")?.setAttribute("open", "");
  for (const moved of ["load", "hashchange"]) addEventListener(moved, () => unfold(location.hash));
  // a second click on a link changes no hash
  document.addEventListener("click", (event) => unfold(event.target.closest?.('a[href^="#"]')?.hash ?? ""));
}

for (const start of [
  startTheme, startTimes, startCopying, startDialogs, startFilters, startFoldedPanels, startForms, startKeys, startPlan, startRowOrder, startSelected, startSelection, startSession, startStream, startErrors,
  startLeaving, startOneTimeLink, startTab,
]) start();
