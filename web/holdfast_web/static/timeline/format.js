// Formatting of values, with the same rules as holdfast_web/shared/filters.py.

export const count = (value) => (value == null ? NONE : fixed(Math.round(value), 0));

export function percent(fraction) {
  if (fraction == null) return NONE;
  if (!Number.isFinite(fraction)) return nonFinite(fraction);
  const value = fraction * 100;
  if (value === 0 || Math.abs(value) >= 100) return `${value.toFixed(0)} %`;
  return `${Math.abs(value) >= 0.01 ? Number(value.toPrecision(3)) : value.toFixed(2)} %`;
}

export function size(bytes) {
  if (bytes == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  let scaled = bytes;
  while (scaled >= 999.5 && unit < units.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${bytes} B` : `${Number(scaled.toPrecision(3))} ${units[unit]}`;
}

/** Return the state of a checkpoint; "retired" if retention deleted it. */
export const stateName = ({ state, reason }) => (state === "missing" && reason?.startsWith("deleted by retention") ? "retired" : state);

/** Format the size of a checkpoint; a copy that a fork began with may be known without one. */
export function sizes(row) {
  const written = row.reused_bytes ? ` (${size(row.payload_bytes - row.reused_bytes)} written)` : "";
  return size(row.payload_bytes || null) + written;
}

export function metric(value) {
  if (value == null) return NONE;
  if (!Number.isFinite(value)) return nonFinite(value);
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(3);
  return String(Number(value.toPrecision(5)));
}

/** Return the format of all labels of an axis: with an exponent where plain numbers would be long. */
export function metricLabels(values) {
  const largest = Math.max(...values.map(Math.abs));
  if (values.every((value) => value === 0 || Math.abs(value) >= 1e-3) && largest < 1e5) return metric;
  return (value) => (value === 0 ? "0" : String(Number(value.toPrecision(5)).toExponential()).replace("e+", "e"));
}

// two scripts on the page need the zone and share only the document
const inUtc = () => document.documentElement.hasAttribute("data-utc");

/** Suffix of a time of day that is not local. */
export const zone = () => (inUtc() ? " UTC" : "");

/** Offset of the displayed clock from UTC in seconds; differs between summer and winter. */
export const ahead = (at) => (inUtc() ? 0 : -60 * new Date(at * 1000).getTimezoneOffset());

/** A date whose UTC fields show the displayed clock. */
const shown = (at) => new Date((at + ahead(at)) * 1000);

export function clock(at) {
  if (at == null) return NONE;
  const date = shown(at);
  return Number.isNaN(date.getTime()) ? NONE : date.toISOString().slice(11, 19);
}

/** Date formats without and with the year, created when needed because that takes milliseconds. */
const days = [];

/** Format a day, without the current year. */
export function day(at) {
  const date = shown(at);
  const year = date.getUTCFullYear() === new Date().getFullYear() ? undefined : "numeric";
  const format = (days[Number(year !== undefined)] ??= new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year, timeZone: "UTC" }));
  return format.format(date);
}

export const capitalized = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// ---- durations

export const NONE = "–";

/** Number formats by decimals, cached because creating one is slow. */
const formats = [];

const fixed = (value, decimals) => {
  formats[decimals] ??= new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return formats[decimals].format(value);
};

const nonFinite = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞");

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (!Number.isFinite(seconds)) return nonFinite(seconds);
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995e-3) return `${Number((seconds * 1e6).toPrecision(2))} µs`;
  if (size < 0.9995) return `${Number((seconds * 1e3).toPrecision(size >= 0.1 ? 3 : 2))} ms`;
  if (size < 59.95) return `${Number(seconds.toFixed(1))} s`;
  const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  for (const [unit, name, part, partName] of units) {
    const parts = Math.round(size / part);
    if (parts * part >= unit) {
      const rest = parts % (unit / part);
      return `${Math.floor((parts * part) / unit)} ${name}` + (rest ? ` ${rest} ${partName}` : "");
    }
  }
  return `${size.toFixed(0)} s`;
}

export function age(seconds) {
  if (seconds < 1.5) return "just now";
  return seconds < 59.5 ? `${Math.round(seconds)} s ago` : `${duration(Math.round(seconds))} ago`;
}
