// Sliders beside number fields, and forms that live updates must not overwrite while somebody types.

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
    if (form && event.detail.ctx.request.method === "POST") tellDraft(form, "draft", "saving…");
  });
  const fail = (event) => {
    const form = inControls(event);
    if (!form || event.detail.ctx.request.method !== "POST") return;
    const status = event.detail.ctx.response?.status;
    if (status >= 400 && status < 500) {
      tellDraft(form, "failed", "not saved: all is as it was");
      return;
    }
    // Where it was saved after all, the page's next news brings the controls again, over what was typed.
    delete form.dataset.typed;
    tellDraft(form, "failed", "no answer: it may have been saved");
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
      tellDraft(event.target.form, "draft", "draft, not saved");
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
