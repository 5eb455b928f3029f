// Figures for people; the same rules as holdfast_web/filters.py.

export const count = (value) => (value == null ? NONE : fixed(Math.round(value), 0));

export function percent(fraction) {
  if (fraction == null) return NONE;
  if (!Number.isFinite(fraction)) return odd(fraction);
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
  return unit === 0 ? `${bytes} B` : `${significant(scaled)} ${units[unit]}`;
}

export function metric(value) {
  if (value == null) return NONE;
  if (!Number.isFinite(value)) return odd(value);
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(3);
  return String(Number(value.toPrecision(5)));
}

// two scripts ask on one page, and share nothing but the page
const inUtc = () => document.documentElement.hasAttribute("data-utc");

/** Told behind a time of day, where the clock is not the reader's own. */
export const zone = () => (inUtc() ? " UTC" : "");

/** Seconds that the clock on show is ahead of UTC at a moment: other ones in summer than in winter. */
export const ahead = (at) => (inUtc() ? 0 : -60 * new Date(at * 1000).getTimezoneOffset());

/** Its UTC fields are what the clock shows. */
const shown = (at) => new Date((at + ahead(at)) * 1000);

export function clock(at) {
  if (at == null) return NONE;
  const date = shown(at);
  return Number.isNaN(date.getTime()) ? NONE : date.toISOString().slice(11, 19);
}

const days = [undefined, "numeric"].map((year) => new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year, timeZone: "UTC" }));

/** Of this year, without it. */
export function day(at) {
  const date = shown(at);
  return days[Number(date.getUTCFullYear() !== new Date().getFullYear())].format(date);
}

export const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// ---- lengths of time

export const NONE = "–";

/** By decimals: to make one takes far longer than to use it. */
const formats = [];

export const fixed = (value, decimals) => {
  formats[decimals] ??= new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return formats[decimals].format(value);
};

export const significant = (value, digits = 3) => (value === 0 ? "0" : fixed(value, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))))));

export const odd = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞");

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (!Number.isFinite(seconds)) return odd(seconds);
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995e-3) return `${significant(seconds * 1e6, 2)} µs`;
  if (size < 0.9995) return `${significant(seconds * 1e3, size >= 0.1 ? 3 : 2)} ms`;
  if (size < 59.95) return `${seconds.toFixed(1)} s`;
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
