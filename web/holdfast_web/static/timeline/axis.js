// The one scale that all lanes share.

import { CanvasLane, label } from "./canvas.js";
import { count } from "./format.js";
import { palette } from "./palette.js";

const STEP_PX = 90;

export function ticks(from, to, room) {
  const rough = (to - from) / Math.max(2, room / STEP_PX);
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const result = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) result.push(value);
  return result;
}

export class AxisLane extends CanvasLane {
  height() {
    return 24;
  }

  draw(pen) {
    const { view } = this;
    pen.fillStyle = palette.line;
    pen.fillRect(view.gutter, 0, view.plotWidth, 1);
    for (const value of ticks(view.from, view.to, view.plotWidth)) {
      const x = view.x(value);
      pen.fillRect(x, 0, 1, 5);
      pen.font = palette.font;
      const half = pen.measureText(count(value)).width / 2;
      const centre = Math.min(Math.max(x, view.gutter + half), view.gutter + view.plotWidth - half);
      label(pen, count(value), centre, 14, palette.muted, palette.font, "center");
    }
  }
}
