// The one scale that all lanes share.

import { CanvasLane, label } from "./canvas.js";
import { clock, count, day, zone } from "./format.js";
import { palette } from "./palette.js";
import { steps, times } from "./scale.js";

const STEP_PX = 90;
const DAY_SECONDS = 86400;

/** What the axis counts, at one place, in words. */
export const placeText = (axis, place) => (axis === "time" ? `${day(place)} ${clock(place)}${zone()}` : count(place));

export class AxisLane extends CanvasLane {
  height() {
    return 24;
  }

  #ticks() {
    const { axis, from, to, plotWidth } = this.view;
    if (axis === "iteration") {
      const whole = steps(from, to, plotWidth / STEP_PX).filter(Number.isInteger);
      return whole.map((value) => [value, count(value)]);
    }
    const { step, places } = times(from, to, plotWidth / STEP_PX);
    const midnight = (at) => clock(at) === "00:00:00";
    return places.map((at) => [at, step >= DAY_SECONDS || midnight(at) ? day(at) : step >= 60 ? clock(at).slice(0, 5) : clock(at)]);
  }

  draw(pen) {
    const { view } = this;
    pen.fillStyle = palette.line;
    pen.fillRect(view.gutter, 0, view.plotWidth, 1);
    for (const [value, text] of this.#ticks()) {
      const x = view.x(value);
      pen.fillStyle = palette.line;
      pen.fillRect(x, 0, 1, 5);
      pen.font = palette.font;
      const half = pen.measureText(text).width / 2;
      const centre = Math.min(Math.max(x, view.gutter + half), view.gutter + view.plotWidth - half);
      label(pen, text, centre, 14, palette.muted, palette.font, "center");
    }
  }
}
