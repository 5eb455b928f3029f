// The timeline: lanes that share one axis of iterations, and the hands that move it.

import { readAddress, writeAddress } from "./address.js";
import { AxisLane } from "./axis.js";
import { CurveLane } from "./curves.js";
import { EventLane } from "./events.js";
import { Feed } from "./feed.js";
import { capitalised, count, duration, metric as asMetric } from "./format.js";
import { startKeys } from "./keys.js";
import { FAILED, LineageLane } from "./lineages.js";
import { modelOf } from "./model.js";
import { OverheadLane } from "./overhead.js";
import { Overview } from "./overview.js";
import { readPalette } from "./palette.js";
import { PipelineLane } from "./pipeline.js";
import { Pointer } from "./pointer.js";
import { Readout } from "./readout.js";
import { Selection } from "./selection.js";
import { StallLane } from "./stalls.js";
import { fillTables, sentence } from "./table.js";
import { View } from "./view.js";

const NARROW_PX = 620;

class Timeline {
  model = null;
  #drawing = false;

  constructor(root) {
    this.root = root;
    this.lanesBox = root.querySelector(".lanes");
    this.view = new View();
    this.feed = new Feed(root.dataset.source, this.view);
    readPalette();
    this.#measure();
    this.#makeLanes();
    this.overview = new Overview(root.querySelector(".overview"), this.view);
    this.readout = new Readout(root, this.view, this.lanes);
    this.selection = new Selection(this.#part("selection"));
    this.#readAddress();
    this.#listen();
    this.#listenToHands();
    this.feed.ask();
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  #button(act) {
    return this.root.querySelector(`.tools [data-act="${act}"]`);
  }

  #makeLanes() {
    const { view, root } = this;
    const lane = (name) => root.querySelector(`[data-lane="${name}"]`);
    const tall = view.width < NARROW_PX ? 130 : 168;
    this.metricLane = new CurveLane(lane("metric"), view, { metric: "loss", format: asMetric, height: tall });
    this.points = new LineageLane(lane("lineages"), view);
    this.lanes = [
      this.metricLane,
      new CurveLane(lane("seconds"), view, { metric: null, format: duration, zeroBased: true, height: 92 }),
      new OverheadLane(lane("overhead"), view),
      new PipelineLane(lane("pipeline"), view),
      new StallLane(lane("stalls"), view),
      this.points,
      new EventLane(lane("events"), view),
      new AxisLane(lane("axis"), view),
    ];
  }

  #measure() {
    const width = this.lanesBox.clientWidth;
    if (width === this.view.width) return false;
    Object.assign(this.view, { width, gutter: width < NARROW_PX ? 48 : 62 });
    return true;
  }

  #listen() {
    const { view, feed } = this;
    view.addEventListener("move", () => this.#draw());
    view.addEventListener("move", () => feed.moved());
    view.addEventListener("state", () => this.#showState());
    feed.addEventListener("timeline", (event) => this.#receive(event.detail));
    feed.addEventListener("whole", (event) => this.#receiveWhole(modelOf(event.detail)));
    feed.addEventListener("trouble", () => this.#say("The timeline could not be read; it is asked for again with the next news of the job."));
    document.addEventListener("holdfast:tick", () => {
      feed.wake();
      this.#countNew();
    });
    document.addEventListener("holdfast:theme", () => this.#restyle());
    document.addEventListener("visibilitychange", () => !document.hidden && feed.wake());
    new ResizeObserver(() => this.#resize()).observe(this.lanesBox);
    this.selection.addEventListener("change", () => this.#showSelection());
    document.addEventListener("holdfast:select", (event) => this.selection.choose(event.detail));
  }

  #listenToHands() {
    const { readout } = this;
    new Pointer(this.lanesBox, this.view, {
      hover: (x, y, event) => this.model && readout.hover(x, y, event),
      leave: () => readout.leave(),
      zone: (from, to) => readout.zone(from, to),
      click: (event) => {
        const point = readout.hit(event)?.checkpoint;
        if (point) this.selection.choose(point.id);
      },
    });
    this.root.addEventListener("click", (event) => {
      const act = event.target.closest("[data-act]")?.dataset.act;
      if (act) this.act(act);
    });
    this.#part("metric").addEventListener("change", (event) => this.#chooseMetric(event.target.value));
    startKeys(this.root, (name) => this.act(name));
  }

  // ---- data ---------------------------------------------------------------------------------

  #receive(timeline) {
    this.root.dataset.state = timeline.extent ? "drawn" : "empty";
    if (!timeline.extent) return this.#say("No iteration has been reported yet. The first ones appear here within a second of being trained.");
    this.model = modelOf(timeline);
    this.#place(timeline.extent);
    this.#showMetrics();
    for (const lane of this.lanes) lane.setModel(this.model);
    const whole = timeline.window[0] <= timeline.extent[0] && timeline.window[1] >= timeline.extent[1];
    if (whole) this.#receiveWhole(this.model);
    this.selection.describe(this.model.checkpoints);
    this.#showState();
  }

  /** Where the view is, now that there is something to see. */
  #place(extent) {
    const { view } = this;
    if (!this.wanted) return view.extend(extent);
    const { window, live } = this.wanted;
    this.wanted = null;
    view.extent = extent;
    view.show(...window);
    if (live) view.follow(true);
  }

  #receiveWhole(model) {
    this.whole = model;
    this.overview.setModel(model, this.metricLane.metric);
  }

  #showMetrics() {
    const picker = this.#part("metric");
    const names = this.model.metrics;
    if (names.length && !names.includes(this.metricLane.metric)) this.metricLane.metric = names[0];
    if (picker.dataset.names !== names.join()) {
      picker.dataset.names = names.join();
      picker.replaceChildren(...names.map((name) => new Option(name, name, false, name === this.metricLane.metric)));
    }
    picker.parentElement.hidden = names.length < 2;
    const title = names.length ? capitalised(this.metricLane.metric.replaceAll("_", " ")) : "No metric reported";
    this.metricLane.element.querySelector(".lane-name").textContent = title;
  }

  #chooseMetric(name) {
    this.metricLane.metric = name;
    this.#showMetrics();
    this.metricLane.restyle(this.model);
    this.overview.setModel(this.whole ?? this.model, name);
    this.#describe();
  }

  // ---- drawing ------------------------------------------------------------------------------

  #draw() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      for (const lane of this.lanes) lane.move();
      this.overview.move();
      this.#part("window").textContent = `iterations ${count(this.view.from)} – ${count(this.view.end)} of ${count(this.view.extent[1])}`;
      this.readout.refresh();
    });
  }

  #resize() {
    if (!this.#measure()) return;
    for (const lane of this.lanes) lane.resize();
    this.overview.draw();
    this.#draw();
  }

  #restyle() {
    readPalette();
    for (const lane of this.lanes) lane.restyle(this.model);
    this.overview.draw();
  }

  // ---- state that others see ----------------------------------------------------------------

  #readAddress() {
    const { window, live, selected } = readAddress();
    if (selected) this.selection.choose(selected);
    this.points.selected = selected;
    if (!window) return;
    this.wanted = { window, live };
    Object.assign(this.view, { fitted: false, live, from: window[0], to: window[1] });
  }

  #showState() {
    const live = this.#button("live");
    live.setAttribute("aria-pressed", String(this.view.live));
    if (this.view.live) live.lastElementChild.textContent = "Live";
    writeAddress(this.view, this.selection.id);
    this.#describe();
    this.#draw();
  }

  #showSelection() {
    this.points.selected = this.selection.id;
    if (!this.model) return;
    if (this.selection.id) this.view.reveal(this.selection.iteration);
    this.selection.describe(this.model.checkpoints);
    this.#showState();
  }

  #countNew() {
    if (this.view.live || !this.model) return;
    const newest = Number(document.querySelector("[data-iteration]").dataset.iteration);
    const missed = newest - Math.round(this.view.to);
    this.#button("live").lastElementChild.textContent = missed > 0 ? `Live ▸ ${count(missed)} ahead` : "Live";
  }

  #say(text) {
    this.#part("summary").textContent = text;
  }

  #describe() {
    if (!this.model) return;
    this.#say(sentence(this.model, this.view));
    const tables = this.#part("tables");
    if (!tables.hidden) fillTables(tables, this.model, this.view, this.model.metrics.length ? this.metricLane.metric : null);
  }

  // ---- commands -----------------------------------------------------------------------------

  act(name) {
    const { view, selection, model } = this;
    if (!model) return;
    const commands = {
      fit: () => view.fit(),
      "zoom-in": () => view.zoom(0.6),
      "zoom-out": () => view.zoom(1 / 0.6),
      "pan-left": () => view.pan(-view.span / 4),
      "pan-right": () => view.pan(view.span / 4),
      live: () => this.#follow(),
      table: () => this.#toggleTables(),
      log: () => this.#toggleLog(),
      copy: () => this.#copy(),
      previous: () => selection.step(model.checkpoints, -1),
      next: () => selection.step(model.checkpoints, 1),
      "stall-before": () => this.#jump(model.stalls, -1),
      "stall-after": () => this.#jump(model.stalls, 1),
      failure: () => this.#jump([...model.checkpoints.filter((row) => FAILED.includes(row.state)), ...model.attempts.filter((row) => row.previous_exit)], 1),
      restore: () => selection.id && document.dispatchEvent(new CustomEvent("holdfast:restore", { detail: selection.id })),
      clear: () => selection.choose(null),
    };
    commands[name]?.();
  }

  #follow() {
    this.view.follow(!this.view.live);
    if (this.view.live) this.feed.ask();
  }

  #jump(rows, direction) {
    const middle = (this.view.from + this.view.to) / 2;
    const ahead = rows.map((row) => row.iteration).filter((iteration) => (iteration - middle) * direction > this.view.span * 0.01);
    if (ahead.length) this.view.pan((direction > 0 ? Math.min(...ahead) : Math.max(...ahead)) - middle);
  }

  #toggleTables() {
    const tables = this.#part("tables");
    tables.hidden = !tables.hidden;
    this.#button("table").setAttribute("aria-pressed", String(!tables.hidden));
    this.#describe();
  }

  #toggleLog() {
    this.metricLane.logarithmic = !this.metricLane.logarithmic;
    this.#button("log").setAttribute("aria-pressed", String(this.metricLane.logarithmic));
    this.metricLane.restyle(this.model);
  }

  async #copy() {
    const button = this.#button("copy");
    await navigator.clipboard?.writeText(location.href);
    button.dataset.done = "";
    setTimeout(() => delete button.dataset.done, 1500);
  }
}

const root = document.querySelector("#timeline");
if (root) new Timeline(root);
