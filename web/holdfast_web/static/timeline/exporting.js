// The window on show as files: links to what the server makes of it, and pictures that are made here.

import { otherAxis } from "./model.js";

export function linkExports(root, view, model) {
  const places = [view.from, view.end];
  const window = view.axis === "iteration" ? places : (otherAxis(model, places) ?? [1, model.lastIteration]);
  const from = Math.max(1, Math.floor(window[0]));
  const to = Math.min(model.lastIteration, Math.ceil(window[1]));
  const here = root.dataset.source.replace(/timeline$/, "");
  for (const link of root.querySelectorAll("[data-export]")) {
    const name = link.dataset.export;
    link.href = `${here}${name === "timeline" ? name : `export/${name}`}?from=${from}&to=${to}`;
  }
}

/** `kind`: png or svg. */
export async function saveChart(kind, root, lanes, view, window) {
  const { exportChart } = await import("./picture.js");
  await exportChart(kind, root.dataset.job, lanes, view, window);
  root.querySelector("[data-part=export]").open = false;
}
