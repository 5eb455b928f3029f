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

const LOST = "it may have been saved. The page shows what is true as soon as it is live.";
const reads = (event) => (event.detail.ctx?.request?.method ?? "GET") === "GET";
const ofThePage = (event) => event.detail.ctx?.sourceElement?.id === "live";

export function startTrouble() {
  document.addEventListener("htmx:error", (event) => {
    if (ofThePage(event)) return;
    tell(reads(event) ? "The server cannot be reached. Try again when the page is live." : `The server cannot be reached: ${LOST}`);
  });
  document.addEventListener("htmx:response:error", (event) => {
    const status = event.detail.ctx.response.status;
    if (ofThePage(event) || [404, 409, 422].includes(status)) return;
    if (status < 500) tell(`The server answered ${status}: nothing was changed. Try again in a moment.`);
    else tell(reads(event) ? `The server answered ${status}. Try again in a moment.` : `The server answered ${status}: ${LOST}`);
  });
}
