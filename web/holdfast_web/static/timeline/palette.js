// Colours come from the style sheet, so that canvas and page change theme together.

const NAMES = ["text", "muted", "line", "grid", "surface", "accent", "accent-soft", "snapshot", "block", "bad", "warn", "info", "lost", "budget"];

export const palette = {};

export function readPalette() {
  hatches.clear();
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) palette[name.replaceAll("-", "_")] = style.getPropertyValue(`--${name}`).trim();
  palette.font = `11px ${style.getPropertyValue("--font").trim()}`;
  palette.bold = `600 ${palette.font}`;
  palette.star = palette.font.replace("11", "15");
}

/** `#rrggbb` made translucent; the style sheet writes these colours in that form. */
export function alpha(colour, opacity) {
  return colour + Math.round(opacity * 255).toString(16).padStart(2, "0");
}

const hatches = new Map();

/** Diagonal stripes: what is marked by colour is marked by a texture too. */
export function stripes(context, colour) {
  if (!context.createPattern) return alpha(colour.slice(0, 7), 0.35);
  if (hatches.has(colour)) return hatches.get(colour);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  hatches.set(colour, context.createPattern(tile, "repeat"));
  return hatches.get(colour);
}
