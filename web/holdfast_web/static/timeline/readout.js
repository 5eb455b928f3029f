// What the pointer is over: one crosshair through all lanes, their values at it, and the thing under the hand.

import { placeText } from "./axis.js";
import { clock, count, day, zone } from "./format.js";

const SIDE_PX = 90;

export class Readout {
  #x = null;

  constructor(root, view, lanes) {
    Object.assign(this, { root, view, lanes });
    this.box = root.querySelector(".lanes");
    this.values = lanes.map((lane) => [lane, lane.element.querySelector(".lane-value")]).filter(([, value]) => value);
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
    if (this.#x === null) return this.#notes();
    const { view } = this;
    const place = view.axis === "time" ? view.place(this.#x) : Math.round(view.place(this.#x));
    this.crosshair.hidden = false;
    this.crosshair.style.transform = `translateX(${this.#x}px)`;
    this.crosshair.firstElementChild.textContent = this.#where(place);
    const room = Math.min(this.#x, view.width - this.#x);
    this.crosshair.dataset.side = room > SIDE_PX ? "" : this.#x > view.width / 2 ? "left" : "right";
    this.#tell((lane) => lane.readout(place));
  }

  /** The place on this axis, and on the other one too. */
  #where(place) {
    const row = this.lanes[0].at(place) ?? this.lanes[1].at(place);
    const text = placeText(this.view.axis, place);
    if (!row) return text;
    return this.view.axis === "time" ? `${text} · iteration ${count(row.iteration)}` : `${text} · ${day(row.at)} ${clock(row.at)}${zone()}`;
  }

  leave() {
    this.#x = null;
    this.crosshair.hidden = true;
    this.tip.hidden = true;
    this.#notes();
  }

  #notes() {
    this.#tell((lane) => (lane.model ? lane.note() : ""));
  }

  #tell(told) {
    for (const [lane, value] of this.values) {
      const text = told(lane);
      if (value.textContent !== text) value.textContent = text;
    }
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
