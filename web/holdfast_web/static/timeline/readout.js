// What the pointer is over: one crosshair through all lanes, their values at it, and the thing under the hand.

import { count } from "./format.js";

export class Readout {
  #x = null;

  constructor(root, view, lanes) {
    Object.assign(this, { root, view, lanes });
    this.box = root.querySelector(".lanes");
    this.crosshair = this.#part("cross");
    this.tip = this.#part("tip");
    this.band = this.#part("zone");
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  hover(x, y, event) {
    const { view } = this;
    if (x < view.gutter || x > view.gutter + view.plotWidth) return this.leave();
    this.#x = x;
    this.refresh();
    this.#describe(this.hit(event), x, y);
  }

  /** The values again, after the lanes moved under a hand at rest. */
  refresh() {
    if (this.#x === null) return;
    const iteration = Math.round(this.view.iteration(this.#x));
    this.crosshair.hidden = false;
    this.crosshair.style.transform = `translateX(${this.#x}px)`;
    this.crosshair.firstElementChild.textContent = count(iteration);
    this.crosshair.dataset.side = this.#x > this.view.width - 80 ? "left" : "right";
    for (const lane of this.lanes) {
      const value = lane.element.querySelector(".lane-value");
      if (value) value.textContent = lane.readout(iteration);
    }
  }

  leave() {
    this.#x = null;
    this.crosshair.hidden = true;
    this.tip.hidden = true;
    for (const value of this.root.querySelectorAll(".lane-value")) value.textContent = "";
  }

  /** The thing under an event: {title, lines, checkpoint?} or null. */
  hit(event) {
    // a captured pointer reports the box that captured it, so ask the document what lies there
    const body = document.elementFromPoint(event.clientX, event.clientY)?.closest(".lane-body");
    const lane = body && this.lanes.find((one) => one.body === body);
    if (!lane?.hit || !lane.model) return null;
    const box = body.getBoundingClientRect();
    return lane.hit(event.clientX - box.left, event.clientY - box.top);
  }

  #describe(thing, x, y) {
    const { tip } = this;
    this.box.dataset.hand = thing?.checkpoint ? "point" : "";
    tip.hidden = !thing;
    if (!thing) return;
    const title = document.createElement("strong");
    title.textContent = thing.title;
    const lines = thing.lines.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
    tip.replaceChildren(title, ...lines);
    const left = Math.min(Math.max(4, x + 14), this.view.width - tip.offsetWidth - 4);
    const below = y + 18 + tip.offsetHeight < this.box.clientHeight;
    tip.style.transform = `translate(${left}px, ${below ? y + 18 : y - tip.offsetHeight - 12}px)`;
  }

  /** The stretch that a drag is about to zoom into; null: none. */
  zone(from, to) {
    this.band.hidden = from === null;
    if (from === null) return;
    const left = Math.max(from, this.view.gutter);
    const right = Math.min(to, this.view.gutter + this.view.plotWidth);
    this.band.style.transform = `translateX(${left}px)`;
    this.band.style.width = `${Math.max(0, right - left)}px`;
  }
}
