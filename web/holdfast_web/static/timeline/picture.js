// Export of the chart as PNG or SVG. Loaded on demand.

const HEAD = 30;
const LANE_HEAD = 20;
const PAD = 10;
const STATE = ["fillStyle", "strokeStyle", "lineWidth", "font", "textAlign", "textBaseline", "globalAlpha"];
const ANCHORS = { left: "start", right: "end", center: "middle" };

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const round = (value) => Math.round(value * 100) / 100;

/** The part of the canvas 2D context that the lanes use, writing SVG. */
class SvgPen {
  parts = [];
  #path = [];
  #here = [0, 0];
  #saved = [];
  #dash = [];
  #clips = 0;
  #open = 0;

  constructor(measure) {
    this.measure = measure;
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "11px sans-serif", textAlign: "left", textBaseline: "alphabetic", globalAlpha: 1 });
  }

  setTransform() {}
  clearRect() {}

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  setLineDash(dash) {
    this.#dash = dash;
  }

  save() {
    this.#saved.push([STATE.map((name) => this[name]), this.#open]);
  }

  restore() {
    const [values, open] = this.#saved.pop();
    STATE.forEach((name, index) => (this[name] = values[index]));
    for (; this.#open > open; this.#open -= 1) this.parts.push("</g>");
  }

  clip() {
    this.#clips += 1;
    this.parts.push(`<clipPath id="clip${this.#clips}"><path d="${this.#path.join("")}"/></clipPath><g clip-path="url(#clip${this.#clips})">`);
    this.#open += 1;
  }

  beginPath() {
    this.#path = [];
  }

  closePath() {
    this.#path.push("Z");
  }

  moveTo(x, y) {
    this.#path.push(`M${round(x)} ${round(y)}`);
    this.#here = [x, y];
  }

  lineTo(x, y) {
    if (this.#path.length === 0) return this.moveTo(x, y);
    this.#path.push(`L${round(x)} ${round(y)}`);
    this.#here = [x, y];
  }

  /** Approximate the arc by a quadratic curve; the lanes draw right angles only. */
  arcTo(cornerX, cornerY, x, y, radius) {
    const toward = ([fromX, fromY], [toX, toY]) => {
      const far = Math.hypot(toX - fromX, toY - fromY) || 1;
      return [fromX + ((toX - fromX) / far) * radius, fromY + ((toY - fromY) / far) * radius];
    };
    const begin = toward([cornerX, cornerY], this.#here);
    const end = toward([cornerX, cornerY], [x, y]);
    this.lineTo(...begin);
    this.#path.push(`Q${round(cornerX)} ${round(cornerY)} ${end.map(round).join(" ")}`);
    this.#here = end;
  }

  arc(x, y, radius, from, to) {
    const at = (angle) => [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
    const turn = Math.min(to - from, 2 * Math.PI);
    this.#path.push(`${this.#path.length ? "L" : "M"}${at(from).map(round).join(" ")}`);
    for (const angle of [from + turn / 2, from + turn]) this.#path.push(`A${radius} ${radius} 0 0 1 ${at(angle).map(round).join(" ")}`);
    this.#here = at(from + turn);
  }

  rect(x, y, width, height) {
    this.#path.push(`M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}Z`);
  }

  fillRect(x, y, width, height) {
    this.parts.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(Math.max(0, width))}" height="${round(Math.max(0, height))}" fill="${this.fillStyle}"${this.#faded()}/>`);
  }

  fill() {
    this.parts.push(`<path d="${this.#path.join("")}" fill="${this.fillStyle}"${this.#faded()}/>`);
  }

  stroke() {
    const dash = this.#dash.length ? ` stroke-dasharray="${this.#dash.join(" ")}"` : "";
    this.parts.push(`<path d="${this.#path.join("")}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"${dash}${this.#faded()}/>`);
  }

  fillText(text, x, y) {
    const [, weight, size, family] = this.font.match(/^(\d{3} )?(\d+)px (.*)$/);
    const down = this.textBaseline === "middle" ? Number(size) * 0.35 : 0;
    this.parts.push(
      `<text x="${round(x)}" y="${round(y + down)}" fill="${this.fillStyle}" text-anchor="${ANCHORS[this.textAlign]}" font-size="${size}" font-weight="${(weight ?? "400").trim()}" font-family="${escaped(family)}">${escaped(text)}</text>`,
    );
  }

  #faded() {
    return this.globalAlpha === 1 ? "" : ` opacity="${this.globalAlpha}"`;
  }
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const nameOf = (lane) => lane.element.querySelector(".lane-name")?.textContent ?? "";

const tallOf = (lanes) => lanes.reduce((sum, lane) => sum + lane.tall + (nameOf(lane) ? LANE_HEAD : 0), HEAD + PAD);

/** Draw the heading and the lanes below each other; `draw` draws one lane at a height. */
function compose(pen, { lanes, view, title }, draw) {
  const text = (words, x, y, weight, color) => {
    Object.assign(pen, { font: `${weight} 12px ${style("--font")}`, fillStyle: color, textAlign: "left", textBaseline: "middle" });
    pen.fillText(words, x, y);
  };
  let top = HEAD;
  pen.fillStyle = style("--surface");
  pen.fillRect(0, 0, view.width, tallOf(lanes));
  text(title, PAD, HEAD / 2, 600, style("--text"));
  for (const lane of lanes) {
    if (nameOf(lane)) {
      text(nameOf(lane), PAD, top + LANE_HEAD / 2, 600, style("--muted"));
      top += LANE_HEAD;
    }
    draw(lane, top);
    top += lane.tall;
  }
}

function asPng(chart) {
  const ratio = Math.max(2, devicePixelRatio);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: chart.view.width * ratio, height: tallOf(chart.lanes) * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  compose(pen, chart, (lane, top) => {
    pen.save();
    pen.translate(0, top);
    lane.draw(pen);
    pen.restore();
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function asSvg(chart) {
  const pen = new SvgPen(document.createElement("canvas").getContext("2d"));
  compose(pen, chart, (lane, top) => {
    pen.parts.push(`<g transform="translate(0 ${top})">`);
    lane.draw(pen);
    pen.parts.push("</g>");
  });
  const tall = tallOf(chart.lanes);
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${chart.view.width}" height="${tall}" viewBox="0 0 ${chart.view.width} ${tall}">`;
  return new Blob([`${head}<title>${escaped(chart.title)}</title>${pen.parts.join("")}</svg>`], { type: "image/svg+xml" });
}

export async function exportChart(kind, job, lanes, view, window) {
  const chart = { lanes, view, title: `${job} · ${window}` };
  const blob = await (kind === "png" ? asPng(chart) : asSvg(chart));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${job}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
