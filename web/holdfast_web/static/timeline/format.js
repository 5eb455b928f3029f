// Figures for people; the same rules as holdfast_web/filters.py.

const NONE = "–";
const grouped = new Intl.NumberFormat("en-US");

export const count = (value) => (value == null ? NONE : grouped.format(Math.round(value)));

const significant = (value, digits = 3) => {
  if (value === 0) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
};

const odd = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞");

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

export const clock = (at) => (at == null ? NONE : new Date(at * 1000).toLocaleTimeString("en-GB"));

export const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);
