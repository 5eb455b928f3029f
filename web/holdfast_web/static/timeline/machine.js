// Lanes of a rank's machine: GPU, CPU, memory, disk and network. Loaded on demand.

import { alpha, CanvasLane, palette } from "./canvas.js";
import { CurveLane, valueAt } from "./curves.js";
import { count, NONE, percent, size } from "./format.js";
import { curveOf } from "./model.js";
import { table, thinned, windowText } from "./panels.js";

const TALL = 68;
const bytes = (value) => size(value === null ? null : Math.round(value));
/** Bytes on the scale, where 2.00 MB is 2 MB. */
const short = (value) => bytes(value).replace(/\.0+ /, " ");
const rate = (value) => (value === null ? NONE : `${bytes(value)}/s`);
const cores = (value) => (value === null ? NONE : `${Number(value.toPrecision(2))} cores`);

/** Per lane: its name, its values as [field, words, format], how many of them are drawn, and the top of its scale. */
const LANES = [
  { name: "GPU", values: [["gpu_share", "busy", percent], ["gpu_memory_bytes", "memory", bytes]], drawn: 1, top: 1 },
  { name: "CPU", values: [["cpu_share", "host", percent], ["process_cpu_cores", "process", cores]], drawn: 1, top: 1 },
  { name: "Memory", values: [["memory_bytes", "host", bytes], ["process_memory_bytes", "process", bytes]], drawn: 2 },
  { name: "Disk", values: [["disk_write_bytes_per_second", "write", rate], ["disk_read_bytes_per_second", "read", rate], ["disk_busy_share", "busy", percent]], drawn: 2, persists: true },
  { name: "Network", values: [["network_sent_bytes_per_second", "sent", rate], ["network_received_bytes_per_second", "received", rate]], drawn: 2 },
];

function swatch(kind, words) {
  const mark = document.createElement("i");
  mark.className = `key-swatch ${kind}`;
  return [mark, words];
}

function laneElement(kind, name, ...heads) {
  const [element, head, title, body] = ["div", "div", "span", "div"].map((tag) => document.createElement(tag));
  Object.assign(element, { className: kind });
  Object.assign(head, { className: "lane-head" });
  Object.assign(title, { className: "lane-name", textContent: name });
  Object.assign(body, { className: "lane-body" });
  const value = document.createElement("output");
  value.className = "lane-value";
  value.setAttribute("aria-live", "off");
  head.append(title, ...heads, value);
  element.append(head, body);
  return element;
}

/** One lane: the first value with its range, the second as a line on the same scale. */
class MachineLane extends CurveLane {
  constructor(view, about) {
    const key = document.createElement("span");
    key.className = "lane-key";
    const words = about.values.map(([, word]) => word);
    key.append(...swatch("line", words[0]), ...(about.drawn === 2 ? swatch("second", words[1]) : []), ...(about.persists ? swatch("persist", "persist") : []));
    if (about.values[0][2] === rate) key.append(" (scale: bytes per second)");
    super(laneElement("lane", about.name, key), view, { metric: about.values[0][0], format: about.values[0][2], zeroBased: true, tall: TALL });
    this.about = about;
    this.tick = about.top ? percent : short;
    if (about.drawn === 2) this.second = about.values[1][0];
  }

  setModel(model) {
    this.series = { ...model, series: model.machine?.series ?? [] };
    this.curves = this.about.values.map(([field]) => curveOf(this.series, field));
    this.element.hidden = !this.curves[0].x.length;
    super.setModel(model);
  }

  curveOf(model, metric) {
    return curveOf(this.series, metric);
  }

  scales(shown) {
    const both = this.secondCurve ? [this.curve, this.secondCurve] : [this.curve];
    const scale = this.scale(both, shown, this.about.top);
    return [scale, this.secondCurve && scale];
  }

  draw(pen) {
    if (this.about.persists) this.clipped(pen, () => this.#persists(pen));
    super.draw(pen);
  }

  /** Shade while checkpoints are written. */
  #persists(pen) {
    pen.fillStyle = alpha(palette.accent, 0.12);
    for (const { copied, to } of this.model.spans) {
      if (this.view.shows(copied, to)) pen.fillRect(this.view.x(copied), 0, Math.max(1, this.view.x(to) - this.view.x(copied)), this.tall);
    }
  }

  readout(place) {
    const known = this.about.values.map(([, words, format], index) => [words, format, valueAt(this.curves?.[index], place)]);
    return known.filter(([, , value]) => value !== null).map(([words, format, value]) => `${words} ${format(value)}`).join(" · ");
  }

  at() {
    return null;
  }

  note() {
    return "";
  }
}

/** The head above the lanes, with the choice of the rank. */
class MachineHead extends CanvasLane {
  constructor(view, choose) {
    const picker = document.createElement("label");
    picker.className = "picker";
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Rank");
    picker.append("Rank ", select);
    super(laneElement("lane machine-head", "Machine", picker), view);
    this.canvas.remove();
    Object.assign(this, { picker, select });
    select.addEventListener("change", () => choose(Number(select.value)));
  }

  /** Offer the ranks that were measured. */
  offer({ rank, ranks }) {
    const names = ranks.join();
    if (this.select.dataset.names !== names) {
      this.select.dataset.names = names;
      this.select.replaceChildren(...ranks.map((one) => new Option(count(one), one)));
    }
    this.select.value = rank;
    this.picker.hidden = ranks.length < 2;
    this.isEmpty = !ranks.length;
  }

  height() {
    return 0;
  }

  note() {
    return this.isEmpty ? "No samples yet: the agent sends the first after about 10 seconds" : "";
  }
}

export class MachineLanes {
  /** @param choose called with the rank that a person chooses */
  constructor(root, view, choose) {
    this.view = view;
    this.box = document.createElement("div");
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Machine");
    this.head = new MachineHead(view, choose);
    this.lanes = [this.head, ...LANES.map((about) => new MachineLane(view, about))];
    this.box.append(...this.lanes.map((lane) => lane.element));
    root.querySelector("[data-lane=axis]").before(this.box);
  }

  /** Add the lanes to those of the timeline, before its axis, or remove them. */
  show(lanes, on) {
    this.box.hidden = !on;
    if (on !== lanes.includes(this.head)) lanes.splice(on ? lanes.length - 1 : lanes.indexOf(this.head), on ? 0 : this.lanes.length, ...(on ? this.lanes : []));
  }

  receive(machine) {
    this.machine = machine;
    if (machine) this.head.offer(machine);
  }

  /** Return the samples in the window as a table. */
  tables() {
    const { machine, view } = this;
    const values = LANES.flatMap(({ name, values: fields }) => fields.map(([field, words, format]) => [`${name}, ${words}`, field, format]));
    const rows = (machine?.series ?? []).flatMap((series) =>
      series.iteration.flatMap((iteration, index) => (view.shows(view.axis === "time" ? series.at[index] : iteration) ? [[series, index]] : [])),
    );
    const known = values.filter(([, field]) => rows.some(([series]) => series.metrics[field]));
    const cell = ([series, index], [, field, format]) => {
      const value = series.metrics[field]?.mean[index];
      return Number.isFinite(value) ? format(value) : NONE;
    };
    const shown = thinned(rows);
    return [
      table(
        `Machine of rank ${machine?.rank ?? 0}, ${windowText(view)}, ${shown.length} rows`,
        ["Iteration", ...known.map(([words]) => words)],
        shown.map((row) => [count(row[0].iteration[row[1]]), ...known.map((about) => cell(row, about))]),
      ),
    ];
  }
}
