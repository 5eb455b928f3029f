// A request that a person made and that came to nothing is told; one that the page made is asked again anyway.

const SHOWN_MS = 8000;
let timer = 0;

function tell(text) {
  const box = document.querySelector("#trouble");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (box.hidden = true), SHOWN_MS);
}

const ofThePage = (event) => event.detail.ctx?.sourceElement?.id === "live";

export function startTrouble() {
  document.addEventListener("htmx:error", (event) => {
    if (!ofThePage(event)) tell("The server cannot be reached: nothing was changed. Try again when the page is live.");
  });
  document.addEventListener("htmx:response:error", (event) => {
    const status = event.detail.ctx.response.status;
    if (ofThePage(event) || [404, 409, 422].includes(status)) return;
    tell(`The server answered ${status}: nothing was changed. Try again in a moment.`);
  });
}
