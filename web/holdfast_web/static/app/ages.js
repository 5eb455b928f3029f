// Ages go on counting between updates; the server's clock is the one that counts.

import { age } from "../timeline/format.js";

let ahead = 0;
let heard = 0;

/** The server's time, as last heard, against this machine's. */
function hearPage() {
  const at = Number(document.querySelector("[data-now]")?.dataset.now);
  if (at && at !== heard) {
    heard = at;
    ahead = at - Date.now() / 1000;
  }
}

const serverNow = () => Date.now() / 1000 + ahead;

function tell() {
  if (document.hidden || document.body.dataset.connection === "stale") return;
  for (const element of document.querySelectorAll("time[data-at]")) {
    const text = age(Math.max(0, serverNow() - Number(element.dataset.at)));
    if (element.textContent !== text) element.textContent = text;
  }
}

export function startAges() {
  hearPage();
  document.addEventListener("htmx:after:swap", hearPage);
  setInterval(tell, 1000);
}
