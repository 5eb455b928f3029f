// How a checkpoint is marked: a shape for its state, so that colour is not all that tells.

import { label } from "./canvas.js";
import { palette } from "./palette.js";

export const FAILED = ["failed", "torn", "damaged"];

/** What operators say of it, in words. */
export const marks = (row) => [row.label, row.pinned && "pinned"].filter(Boolean);

/** ● durable  ★ pinned  ◐ persisting  ✕ failed, torn, damaged  ◆ safety; · retired: a trace, so that what is left stands out. */
export function glyph(pen, row, x, y, radius) {
  pen.save();
  const gone = row.state === "missing";
  if (gone) radius = Math.max(1, radius * 0.3);
  pen.globalAlpha = gone ? 0.55 : row.abandoned ? 0.6 : 1;
  const failed = FAILED.includes(row.state);
  const open = row.state === "persisting" || row.state === "snapshot";
  const colour = failed ? palette.bad : row.kind === "safety" ? palette.info : palette.accent;
  pen.fillStyle = colour;
  pen.strokeStyle = colour;
  pen.lineWidth = failed ? 2 : 1.4;
  pen.beginPath();
  if (failed) {
    pen.moveTo(x - radius, y - radius);
    pen.lineTo(x + radius, y + radius);
    pen.moveTo(x + radius, y - radius);
    pen.lineTo(x - radius, y + radius);
    pen.stroke();
  } else if (row.pinned && !gone) {
    label(pen, "★", x, y, colour, palette.star, "center");
  } else if (row.kind === "safety") {
    const wide = radius * 1.25;
    pen.moveTo(x, y - wide);
    pen.lineTo(x + wide, y);
    pen.lineTo(x, y + wide);
    pen.lineTo(x - wide, y);
    pen.closePath();
    if (!open) pen.fill();
    pen.stroke();
  } else {
    pen.arc(x, y, radius, 0, 7);
    if (open) pen.fillStyle = palette.surface;
    pen.fill();
    pen.stroke();
    if (open) {
      pen.fillStyle = colour;
      pen.beginPath();
      pen.arc(x, y, radius, Math.PI / 2, Math.PI * 1.5);
      pen.fill();
    }
  }
  pen.restore();
}
