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
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-log-range]")) slide(event.target);
    else if (event.target.closest("[data-guard]")) {
      event.target.closest("[data-guard]").dataset.typed = "";
      forgetError(event.target);
      placeSliders();
    }
  });
  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx.target?.id === "controls") placeSliders();
    else refreshControls();
  });
}
