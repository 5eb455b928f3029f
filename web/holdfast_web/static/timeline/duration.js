// Lengths of time, as people say them; the same rules as holdfast_web/filters.py.

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
