// Figures as people read them. What is not known is a dash.
export const DASH = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : DASH;
}

export function rate(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(value < 0.095 ? 2 : 1);
  return value < 10000 ? count(value) : `${(value / 1000).toFixed(value < 99950 ? 1 : 0)}k`;
}

export function share(value) {
  if (!known(value)) return DASH;
  const percent = value * 100;
  return `${percent > 99 && percent < 100 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (!known(value)) return DASH;
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 9.95 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}
