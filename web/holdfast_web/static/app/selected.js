// The restore point that is selected on the timeline is marked in the table too, and the other way round.

let selected = new URLSearchParams(location.search).get("sel");

function mark() {
  for (const row of document.querySelectorAll("[data-checkpoint]")) {
    row.toggleAttribute("data-selected", row.dataset.checkpoint === selected);
  }
}

export function startSelected() {
  mark();
  document.addEventListener("holdfast:selected", (event) => {
    selected = event.detail;
    mark();
  });
  document.addEventListener("htmx:after:swap", mark);
  document.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-select]");
    if (!chosen) return;
    document.dispatchEvent(new CustomEvent("holdfast:select", { detail: chosen.dataset.select }));
    document.querySelector("#timeline").scrollIntoView({ block: "nearest" });
  });
}
