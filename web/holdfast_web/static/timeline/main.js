// The timeline: lanes that share an axis of iterations or time, and its controls.

import { AxisLane, FAILED, placeText, readPalette } from "./canvas.js";
import { LineageLane, PipelineLane } from "./checkpoints.js";
import { CurveLane, OverviewStrip } from "./curves.js";
import { EventLane, StallLane } from "./events.js";
import { TimelineFeed } from "./feed.js";
import { capitalized, clock, count, duration, metric as asMetric, metricLabels, zone } from "./format.js";
import { startKeys } from "./keys.js";
import { MachineLanes } from "./machine.js";
import { modelOf, convertWindow } from "./model.js";
import { OverheadLane } from "./overhead.js";
import { fillTables, lastGoodText, linkExports, Readout, saveChart, PointSelection, sentence } from "./panels.js";
import { flushAddress, isElsewhere, PointerGestures, readAddress, Viewport, writeAddress } from "./view.js";

const NARROW_PX = 620;
const REST_MS = 120;
/** Right of the plot, without and with an axis. */
const [MARGIN_PX, AXIS_PX] = [14, 54];

class TimelinePanel {
  model = null;
  receivedAt = 0;
  #drawing = false;

  constructor(root) {
    this.root = root;
    this.lanesBox = root.querySelector(".lanes");
    this.view = new Viewport();
    this.feed = new TimelineFeed(root.dataset.source, this.view);
    readPalette();
    this.#measure();
    this.#makeLanes();
    this.state = readAddress();
    this.overview = new OverviewStrip(root.querySelector(".overview"), this.view);
    this.readout = new Readout(root, this.view, this.lanes);
    this.selection = new PointSelection(this.#part("selection"));
    this.#applyAddress();
    this.#listen();
    this.#listenToInput();
    this.feed.ask();
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  /** Lanes with data, or always shown. */
  get #drawn() {
    return this.lanes.filter((lane) => !lane.element.hidden);
  }

  #button(act) {
    return this.root.querySelector(`button[data-act="${act}"]`);
  }

  #makeLanes() {
    const { view, root } = this;
    const lane = (name) => root.querySelector(`[data-lane="${name}"]`);
    const tall = view.width < NARROW_PX ? 130 : 168;
    this.metricLane = new CurveLane(lane("metric"), view, { metric: "loss", format: asMetric, labels: metricLabels, tall });
    this.points = new LineageLane(lane("lineages"), view, (id, beside) => this.selection.choose(id, beside));
    this.events = new EventLane(lane("events"), view);
    this.lanes = [
      this.points,
      this.metricLane,
      new CurveLane(lane("seconds"), view, { metric: null, format: duration, zeroBased: true, tall: 92 }),
      new OverheadLane(lane("overhead"), view),
      new PipelineLane(lane("pipeline"), view),
      new StallLane(lane("stalls"), view),
      this.events,
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
    feed.addEventListener("trouble", () => this.#showError("The timeline could not be loaded; the page retries at the next update."));
    document.addEventListener("holdfast:tick", () => {
      feed.wake();
      this.#countNew();
    });
    document.addEventListener("holdfast:theme", () => this.#restyle());
    document.addEventListener("holdfast:zone", () => this.#changeZone());
    document.addEventListener("visibilitychange", () => !document.hidden && feed.wake());
    new ResizeObserver(() => this.#resize()).observe(this.lanesBox);
    this.selection.addEventListener("change", () => this.#showSelection());
    addEventListener("popstate", () => this.#goBack());
    document.addEventListener("holdfast:select", (event) => this.selection.choose(event.detail));
    document.addEventListener("holdfast:goto", (event) => this.model && this.#pointAt(event.detail));
  }

  #listenToInput() {
    const { readout } = this;
    new PointerGestures(this.lanesBox, this.view, {
      hover: (x, y, event) => this.model && readout.hover(x, y, event),
      leave: () => readout.leave(),
      zone: (from, to) => readout.zone(from, to),
      click: (event) => {
        const { checkpoint, before } = readout.hit(event) ?? {};
        if (before != null) this.#restoreBefore(before);
        else if (checkpoint || !event.shiftKey) this.selection.choose(checkpoint?.id ?? null, event.shiftKey);
      },
    });
    this.root.addEventListener("click", (event) => {
      const act = event.target.closest("[data-act]")?.dataset.act;
      if (act) this.act(act);
    });
    this.#part("metric").addEventListener("change", (event) => this.#chooseMetric(event.target.value));
    this.#part("second").addEventListener("change", (event) => this.#chooseSecond(event.target.value || null));
    startKeys(this.root, (name) => this.act(name));
  }

  // ---- data ---------------------------------------------------------------------------------

  #receive(timeline) {
    this.root.dataset.state = timeline.extent ? "drawn" : "empty";
    this.root.querySelector(".tools").inert = false;
    this.receivedAt = Date.now() / 1000;
    this.#part("stale").hidden = true;
    if (!timeline.extent) return this.#setSummary("No iterations reported yet. They appear within a second.");
    if (this.#otherMetric(timeline.metrics)) return;
    this.machine?.receive(timeline.machine);
    this.model = modelOf(timeline);
    this.feed.secondsPerIteration = this.model.secondsPerIteration;
    this.#placeWindow(this.model.extent, this.#current(this.model.axis));
    this.#showMetrics();
    for (const lane of this.lanes) lane.setModel(this.model);
    const window = timeline.time_window ?? timeline.window;
    const whole = window[0] <= this.model.extent[0] && window[1] >= this.model.end;
    if (whole) this.#receiveWhole(this.model);
    this.selection.describe(this.model.checkpoints);
    this.#showFolds();
    this.#showState();
    if (!this.switching) return;
    this.switching = false;
    this.#switchAxis();
  }

  /** Return the part of an axis that a following window shows: all but for a running job that was restored. */
  #current(axis) {
    const { model } = this;
    if (axis === "time") return model.times;
    return this.#hasEnded ? [1, model.lastIteration] : model.current;
  }

  get #hasEnded() {
    return document.querySelector(".job-head").hasAttribute("data-ended");
  }

  /** Switch to an existing metric if the chosen one does not exist. */
  #otherMetric(names) {
    if (!names.length || (names.includes(this.feed.metric) && (!this.feed.second || names.includes(this.feed.second)))) return false;
    if (!names.includes(this.feed.metric)) this.feed.metric = this.metricLane.metric = names[0];
    if (!names.includes(this.feed.second)) this.#setSecond(null);
    this.feed.forget();
    return true;
  }

  /** Set the window from the address or the data. */
  #placeWindow(extent, current) {
    const { view } = this;
    if (!this.wanted) return view.extend(extent, current);
    const { window, live } = this.wanted;
    this.wanted = null;
    Object.assign(view, { extent, current });
    view.show(...window);
    if (live) view.follow(true);
  }

  /** Show the same range on the other axis; while an answer is awaited, once it is there. */
  #switchAxis() {
    const { view, model } = this;
    if (!model) {
      this.switching = !this.switching;
      return;
    }
    const axis = view.axis === "time" ? "iteration" : "time";
    this.#showOn(axis, view.fitted ? null : convertWindow(model, [view.from, view.to]));
  }

  #showOn(axis, window) {
    const { view, model } = this;
    const current = this.#current(axis);
    this.model = null;
    view.count(axis, axis === "time" ? model.times : [1, model.lastIteration], current, window);
    this.#press("axis", axis === "time");
    this.feed.forget();
  }

  /** Show the window of the address again, after the browser went back or forward. */
  #goBack() {
    const { view, model } = this;
    if (!model || !isElsewhere()) return;
    const { axis, window, live } = readAddress();
    if (axis !== view.axis) this.#showOn(axis, window);
    else if (window) view.show(...window);
    else view.fit();
    if (live || !window) view.follow(true);
  }

  #receiveWhole(model) {
    this.overview.setModel(model, this.metricLane.metric);
  }

  #showMetrics() {
    const [picker, other] = [this.#part("metric"), this.#part("second")];
    const names = this.model.metrics;
    const { metric, second } = this.metricLane;
    if (picker.dataset.names !== names.join()) {
      picker.dataset.names = names.join();
      picker.replaceChildren(...names.map((name) => new Option(name, name, false, name === metric)));
      other.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name, false, name === second)));
    }
    for (const option of other.options) option.disabled = option.value === metric;
    picker.disabled = other.disabled = names.length < 2;
    const title = (name) => name.replaceAll("_", " ");
    this.metricLane.element.querySelector(".lane-name").textContent = names.length ? capitalized(title(metric)) : "No metric reported";
    this.#part("second-key").hidden = !second;
    this.#part("second-key").lastChild.textContent = second ? `${title(second)}, right axis` : "";
  }

  #chooseMetric(name) {
    if (name === this.feed.second) this.#setSecond(null);
    this.metricLane.metric = this.feed.metric = name;
    this.feed.forget();
    this.#showState();
  }

  #chooseSecond(name) {
    this.#setSecond(name);
    this.feed.forget();
    this.#showState();
  }

  /** Set the second metric, with room for its axis. */
  #setSecond(name) {
    this.metricLane.second = this.feed.second = name;
    this.metricLane.secondCurve = null;
    this.#part("second").value = name ?? "";
    this.view.margin = name === null ? MARGIN_PX : AXIS_PX;
    this.overview?.draw();
  }

  /** Show the machine of a rank; null hides it. */
  #showMachine(rank) {
    this.feed.rank = rank;
    this.#press("machine", rank !== null);
    if (rank !== null) {
      this.machine ??= new MachineLanes(this.root, this.view, (chosen) => this.#showMachine(chosen));
    }
    this.machine?.show(this.lanes, this.feed.rank !== null);
    if (this.model && rank !== null) this.feed.forget();
    if (this.model) this.#showState();
  }

  // ---- drawing ------------------------------------------------------------------------------

  #draw() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      for (const lane of this.lanes) lane.move();
      this.overview.move();
      this.#part("window").textContent = this.model ? this.#windowText() : "";
      this.readout.refresh();
      this.#placeSelection();
    });
  }

  /** Place the selected point's bar right below its lane, next to the point; it covers, and moves nothing. */
  #placeSelection() {
    const bar = this.#part("selection");
    const place = this.model && !bar.hidden ? this.#placeOf(this.selection.id) : null;
    if (place === null) return;
    const below = this.points.body.getBoundingClientRect().bottom - this.lanesBox.getBoundingClientRect().top + 4;
    const x = Math.min(Math.max(4, this.view.x(place) - bar.offsetWidth / 2), this.view.width - bar.offsetWidth - 4);
    bar.style.transform = `translate(${Math.round(x)}px, ${Math.round(below)}px)`;
  }

  #windowText() {
    const { axis, from, end, extent } = this.view;
    const shown = `${placeText(axis, from)} – ${placeText(axis, end)}`;
    return axis === "time" ? shown : `iterations ${shown} of ${count(extent[1])}`;
  }

  #resize() {
    if (!this.#measure()) return;
    for (const lane of this.lanes) lane.resize();
    this.overview.draw();
    this.#draw();
  }

  #restyle() {
    readPalette();
    for (const lane of this.lanes) lane.move();
    this.overview.draw();
  }

  /** Redraw times after a change of the zone. */
  #changeZone() {
    this.#press("axis", this.view.axis === "time");
    this.#showState();
  }

  // ---- state in the address -----------------------------------------------------------------

  /** Apply the state of the address. */
  #applyAddress() {
    const { axis, window, live, selected, other, metric, second, rank, logarithmic, everything, table } = this.state;
    if (selected) this.selection.choose(selected);
    if (selected && other) this.selection.choose(other, true);
    Object.assign(this.points, { selected, other: this.selection.other });
    this.points.everything = everything;
    this.metricLane.logarithmic = logarithmic;
    if (metric) this.feed.metric = this.metricLane.metric = metric;
    if (second && second !== this.feed.metric) this.#setSecond(second);
    if (rank !== null) this.#showMachine(rank);
    this.view.axis = axis;
    this.#part("tables").hidden = !table;
    for (const [act, on] of [["log", logarithmic], ["table", table], ["axis", axis === "time"]]) this.#press(act, on);
    if (!window) return;
    this.wanted = { window, live };
    Object.assign(this.view, { fitted: false, live, from: window[0], to: window[1] });
  }

  #press(act, on) {
    this.#button(act).setAttribute("aria-pressed", String(on));
    if (act === "axis") this.root.querySelector(".axis-name").textContent = on ? `time${zone()}` : "iteration";
  }

  /** Keep the current picture and show its age. */
  #showError(text) {
    if (this.receivedAt) {
      const [mark, words] = [this.#part("stale"), `Last updated ${clock(this.receivedAt)}${zone()}`];
      mark.hidden = false;
      if (mark.textContent !== words) mark.textContent = words;
    }
    if (this.model) return;
    this.root.dataset.state = "trouble";
    this.#setSummary(text);
  }

  #showFolds() {
    const button = this.#button("branches");
    button.hidden = !this.points.folds;
    button.setAttribute("aria-pressed", String(!this.points.folded));
  }

  #showState() {
    const live = this.#button("live");
    live.hidden = this.#hasEnded;
    live.setAttribute("aria-pressed", String(this.view.live));
    if (this.view.live) live.lastElementChild.textContent = "Follow";
    writeAddress(this.view, {
      selected: this.selection.id, other: this.selection.other, metric: this.feed.metric, second: this.feed.second, rank: this.feed.rank,
      logarithmic: this.metricLane.logarithmic, everything: this.points.everything, table: !this.#part("tables").hidden,
    });
    this.#describe();
    this.#draw();
  }

  #showSelection() {
    const { id, other } = this.selection;
    Object.assign(this.points, { selected: id, other });
    if (!this.model) return;
    const place = this.#placeOf(other ?? id);
    if (place !== null) this.view.reveal(place);
    this.selection.describe(this.model.checkpoints);
    this.#showState();
  }

  #restoreBefore(iteration) {
    document.dispatchEvent(new CustomEvent("holdfast:restore", { detail: `before=${iteration}` }));
  }

  #showLastGood() {
    const button = this.#part("trouble");
    if (!button) return;
    const found = this.model.last_good?.checkpoint ? this.model.last_good : null;
    button.hidden = found === null;
    button.textContent = found ? lastGoodText(found) : "";
    button.value = found?.iteration ?? "";
  }

  /** Move the window to an iteration, and point at it. */
  #pointAt({ iteration, at }) {
    const place = this.view.axis === "time" ? at : iteration;
    this.view.reveal(place);
    this.readout.pointAt(place);
  }

  #placeOf(id) {
    if (id === null) return null;
    return this.model.checkpoints.find((row) => row.id === id)?.x ?? (this.view.axis === "iteration" ? this.selection.iteration : null);
  }

  #countNew() {
    if (this.view.live || !this.model) return;
    const newest = Number(document.querySelector("[data-iteration]").dataset.iteration);
    const missed = newest - Math.round(this.view.axis === "time" ? this.model.lastIteration : this.view.to);
    this.#button("live").lastElementChild.textContent = missed > 0 ? `Follow ▸ ${count(missed)} new` : "Follow";
  }

  #setSummary(text) {
    this.#part("summary").textContent = text;
  }

  /** Update the summary once the window is at rest. */
  #describe() {
    clearTimeout(this.describing);
    this.describing = setTimeout(() => this.#updateSummary(), REST_MS);
  }

  #updateSummary() {
    if (!this.model) return;
    this.#showLastGood();
    linkExports(this.root, this.view, this.model);
    const { metric, second, curve } = this.metricLane;
    this.#setSummary(sentence(this.model, this.view, { metric, mean: curve.mean }));
    const tables = this.#part("tables");
    const metrics = this.model.metrics.length ? [metric, second].filter(Boolean) : [];
    if (!tables.hidden) fillTables(tables, this.model, this.view, metrics, this.feed.rank === null ? [] : (this.machine?.tables() ?? []));
  }

  // ---- commands -----------------------------------------------------------------------------

  act(name) {
    const { view, selection, model } = this;
    const always = { log: () => this.#toggleLog(), table: () => this.#toggleTables(), copy: () => this.#copy(), axis: () => this.#switchAxis(), machine: () => this.#showMachine(this.feed.rank === null ? 0 : null) };
    if (always[name]) return always[name]();
    if (!model) return;
    const commands = {
      fit: () => view.fit(),
      "zoom-in": () => view.zoom(0.6),
      "zoom-out": () => view.zoom(1 / 0.6),
      "pan-left": () => view.pan(-view.span / 4),
      "pan-right": () => view.pan(view.span / 4),
      live: () => this.#follow(),
      branches: () => this.#toggleBranches(),
      png: () => saveChart("png", this.root, this.#drawn, this.view, this.#windowText()),
      svg: () => saveChart("svg", this.root, this.#drawn, this.view, this.#windowText()),
      previous: () => selection.step(model.checkpoints, -1),
      next: () => selection.step(model.checkpoints, 1),
      "other-previous": () => selection.step(model.checkpoints, -1, true),
      "other-next": () => selection.step(model.checkpoints, 1, true),
      "stall-before": () => this.#jump(model.stalls, -1),
      "stall-after": () => this.#jump(model.stalls, 1),
      "note-before": () => this.#jump(model.annotations, -1),
      "note-after": () => this.#jump(model.annotations, 1),
      annotate: () => document.dispatchEvent(new CustomEvent("holdfast:annotate", { detail: selection.iteration })),
      failure: () => this.#jump([...model.checkpoints.filter((row) => FAILED.includes(row.state)), ...this.events.events.filter((event) => ["crash", "trouble"].includes(event.mark))], 1),
      restore: () => selection.id && document.dispatchEvent(new CustomEvent("holdfast:restore", { detail: `checkpoint=${selection.id}` })),
      "restore-before": () => this.#restoreBefore(this.#part("trouble").value),
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
    const ahead = rows.map((row) => row.x).filter((place) => (place - middle) * direction > this.view.span * 0.01);
    if (ahead.length) this.view.pan((direction > 0 ? Math.min(...ahead) : Math.max(...ahead)) - middle);
  }

  #toggleTables() {
    const tables = this.#part("tables");
    tables.hidden = !tables.hidden;
    this.#press("table", !tables.hidden);
    this.#showState();
  }

  #toggleBranches() {
    this.points.unfold(this.points.folded);
    this.#showFolds();
    this.#showState();
  }

  #toggleLog() {
    this.metricLane.logarithmic = !this.metricLane.logarithmic;
    this.#press("log", this.metricLane.logarithmic);
    this.#showState();
  }

  async #copy() {
    const button = this.#button("copy");
    flushAddress();
    try {
      await navigator.clipboard.writeText(location.href);
      button.dataset.done = "Copied";
    } catch {
      // plain HTTP has no clipboard, and browsers can refuse access
      button.dataset.done = "Copy the address of this page";
    }
    setTimeout(() => delete button.dataset.done, button.dataset.done === "Copied" ? 1500 : 6000);
  }
}

const root = document.querySelector("#timeline");
if (root) new TimelinePanel(root);
