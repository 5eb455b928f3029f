// Hands on the timeline: drag zooms, shift-drag pans, ctrl-wheel zooms where it points, touch pans and pinches.

const CLICK_PX = 4;

export class Pointer {
  #touches = new Map();

  /** @param actions {hover(x, y, event), leave(), click(event), zone(from, to)}, in pixels of the element */
  constructor(element, view, actions) {
    Object.assign(this, { element, view, actions });
    element.addEventListener("pointerdown", (event) => this.#down(event));
    element.addEventListener("pointermove", (event) => this.#move(event));
    element.addEventListener("pointerleave", () => actions.leave());
    element.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    element.addEventListener("dblclick", () => view.fit());
  }

  #at(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #move(event) {
    if (this.#touches.size === 0 && event.pointerType !== "touch") this.actions.hover(...this.#at(event), event);
  }

  #down(event) {
    if (event.button !== 0 || event.target.closest("button, select, a, input")) return;
    if (event.pointerType === "touch") return this.#touch(event);
    const pan = event.shiftKey;
    const [startX] = this.#at(event);
    const start = [this.view.from, this.view.to];
    let last = startX;
    const drag = (moved) => {
      const [x] = this.#at(moved);
      if (pan) this.view.pan(((last - x) / this.view.plotWidth) * (start[1] - start[0]));
      else if (Math.abs(x - startX) > CLICK_PX) this.actions.zone(Math.min(startX, x), Math.max(startX, x));
      last = x;
    };
    this.#until(event, drag, (ended) => {
      const [x, y] = this.#at(ended);
      this.actions.zone(null);
      if (Math.abs(x - startX) <= CLICK_PX) return this.actions.click(ended);
      if (!pan) this.view.show(this.view.place(Math.min(startX, x)), this.view.place(Math.max(startX, x)));
    });
  }

  #touch(event) {
    const [startX] = this.#at(event);
    this.#touches.set(event.pointerId, startX);
    const drag = (moved) => {
      const before = [...this.#touches.values()];
      const [x] = this.#at(moved);
      const by = this.#touches.get(moved.pointerId) - x;
      this.#touches.set(moved.pointerId, x);
      if (before.length === 1) return this.view.pan((by / this.view.plotWidth) * this.view.span);
      const now = [...this.#touches.values()];
      const apart = (pair) => Math.max(20, Math.abs(pair[0] - pair[1]));
      this.view.zoom(apart(before) / apart(now), this.view.place((now[0] + now[1]) / 2));
    };
    this.#until(event, drag, (ended) => {
      this.#touches.delete(ended.pointerId);
      const [x] = this.#at(ended);
      if (ended.type === "pointerup" && Math.abs(x - startX) <= CLICK_PX) this.actions.click(ended);
    });
  }

  #until(event, drag, end) {
    const { element } = this;
    const mine = (moved) => moved.pointerId === event.pointerId && drag(moved);
    const finish = (ended) => {
      if (ended.pointerId !== event.pointerId) return;
      element.removeEventListener("pointermove", mine);
      element.removeEventListener("pointerup", finish);
      element.removeEventListener("pointercancel", finish);
      end(ended);
    };
    element.setPointerCapture(event.pointerId);
    element.addEventListener("pointermove", mine);
    element.addEventListener("pointerup", finish);
    element.addEventListener("pointercancel", finish);
  }

  #wheel(event) {
    const [x] = this.#at(event);
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), this.view.place(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX / this.view.plotWidth) * this.view.span);
    }
  }
}
