// Numbers as text.

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size && size < 0.001) return value.toExponential(1);
  return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 3 : 1);
}

/** Format a value on an axis: as short as its round steps allow. */
export function tick(value) {
  const size = Math.abs(value);
  if (size && size < 0.001) return value.toExponential(0);
  if (size >= 1e4) return short(value).replace(/\.0+(?=[kMG])/, "");
  return String(Number(value.toPrecision(4)));
}

export const percent = (share) =>
  (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

export const seconds = (s) => (Math.abs(s) < 1 ? `${short(1000 * s)} ms` : `${short(s)} s`);

/** Format a time on an axis whose ticks are `stepS` apart. */
export function clock(s, stepS) {
  const size = Math.abs(s), sign = s < 0 ? "−" : "";
  if (stepS < 0.1) return `${sign}${Math.round(1000 * size)} ms`;
  if (stepS < 1) return `${sign}${size.toFixed(1)} s`;
  if (size < 120) return `${sign}${Math.round(size)} s`;
  const minutes = Math.floor(size / 60) % 60, hours = Math.floor(size / 3600);
  const rest = Math.round(size % 60);
  return `${sign}${hours ? `${hours} h ` : ""}${minutes} min${stepS < 60 && rest ? ` ${rest} s` : ""}`;
}

/** Format the length of a stretch of time. */
export const duration = (s) => clock(s, s < 1 ? 0.01 : s < 10 ? 0.1 : 1);

/** Return the round step (1, 2 or 5 times a power of ten) that cuts `span` into at most `most`. */
export function roundStep(span, most) {
  const least = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999);
}
