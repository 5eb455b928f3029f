// A lane drawn on its own canvas, sharp on every screen.

export class CanvasLane {
  constructor(element, view) {
    this.element = element;
    this.view = view;
    this.body = element.querySelector(".lane-body");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.body.append(this.canvas);
    this.model = null;
    this.tall = 0;
  }

  /** Height in CSS pixels for the model at hand. */
  height() {
    return 40;
  }

  draw() {}

  /** The thing under a point of the lane, if there is one: {title, lines, checkpoint?}. */
  hit() {
    return null;
  }

  /** What is to be said of the lane as a whole, such as that there is more than it shows. */
  note() {
    return "";
  }

  /** What the lane shows at a place, in words. */
  readout() {
    return this.model ? this.note() : "";
  }

  setModel(model) {
    this.model = model;
    this.resize();
  }

  resize() {
    const ratio = devicePixelRatio;
    this.tall = this.model ? this.height() : 40;
    const [width, height] = [Math.round(this.view.width * ratio), Math.round(this.tall * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      Object.assign(this.canvas, { width, height });
      this.canvas.style.height = `${this.tall}px`;
    }
    this.move();
  }

  move() {
    if (!this.model) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, this.view.width, this.tall);
    this.draw(pen);
  }

  /** Draw inside the plot only, so that nothing spills over the labels. */
  clipped(pen, paint) {
    pen.save();
    pen.beginPath();
    pen.rect(this.view.gutter, 0, this.view.plotWidth, this.tall);
    pen.clip();
    paint();
    pen.restore();
  }
}

export function label(pen, text, x, y, colour, font, align = "left") {
  pen.font = font;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(text, x, y);
}

export function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 1 && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}
