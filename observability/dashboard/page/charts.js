// Charts drawn on canvases from plain numbers. Each says its data in words too, as its label.

import { theme } from "./colours.js";
import { element, key } from "./dom.js";
import { roundStep, short, tick } from "./format.js";

const PART_WIDTH_MIN = 3;
const LEFT = 46, RIGHT = 10, TOP = 34, BOTTOM = 34;

/** Clear a canvas, scale it to the screen's resolution, and return its pen, size and colours. */
export function begin(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  if (height) canvas.style.height = `${height}px`;
  const width = canvas.clientWidth, shown = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(shown * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(shown * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, shown);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height: shown, ...theme() };
}

/** Show, in place of a chart without data, what would fill it; hide the text for `null`. */
function setEmpty(canvas, text) {
  let note = canvas.nextElementSibling;
  if (!note?.classList.contains("empty")) {
    note = element("p", "", "empty");
    canvas.after(note);
  }
  canvas.hidden = text !== null;
  note.hidden = text === null;
  note.textContent = text ?? "";
}

const describe = (canvas, text) => canvas.setAttribute("aria-label", text);

/** Draw the axes' titles and the y axis from 0 or `low` to `high`; return the scale of y. */
function drawFrame(on, { low, high, xTitle, yTitle }) {
  const { pen } = on, bottom = on.height - BOTTOM;
  const yOf = (y) => bottom - ((y - low) / (high - low)) * (bottom - TOP);
  pen.fillStyle = on.quiet;
  pen.textAlign = "left";
  pen.fillText(yTitle, 2, 11);
  pen.textAlign = "center";
  pen.fillText(xTitle, LEFT + (on.width - LEFT - RIGHT) / 2, on.height - 4);
  pen.strokeStyle = on.line;
  const step = roundStep(high - low, 4);
  for (let y = Math.ceil(low / step) * step; y <= high * (1 + 1e-9); y += step) {
    const at = Math.round(yOf(y)) + 0.5;
    pen.beginPath(); pen.moveTo(LEFT, at); pen.lineTo(on.width - RIGHT, at); pen.stroke();
    pen.textAlign = "right";
    pen.fillText(tick(y), LEFT - 5, at + 3.5);
  }
  pen.textAlign = "left";
  return yOf;
}

/**
 * Draw curves over weight versions: `series` is [{ name, points: [[x, y], …], colour, dashes,
 * hasDots }, …]. Each is drawn smoothed, with its points paler behind it. `marks`: [[x, text], …],
 * vertical lines. `names`: whether the names of several curves are written in the corner.
 */
export function curves(canvas, series, { from = null, xTitle = "weight version", yTitle, emptyText,
  marks = [], names = false, format = (x) => `v${x}` }) {
  const drawn = series.map((each) => ({ ...each, points: each.points.filter(isKnown) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return setEmpty(canvas, emptyText);
  setEmpty(canvas, null);
  const on = begin(canvas), all = drawn.flatMap((each) => each.points);
  const left = Math.min(...all.map(([x]) => x)), right = Math.max(...all.map(([x]) => x), left + 1);
  const ys = all.map(([, y]) => y), low = from ?? Math.min(...ys);
  const yOf = drawFrame(on, { low, high: Math.max(...ys, low + 1e-9), xTitle, yTitle });
  const xOf = (x) => LEFT + ((x - left) / (right - left)) * (on.width - LEFT - RIGHT);
  drawXTicks(on, left, right, xOf, format);
  for (const [x, text] of marks) drawMark(on, xOf(x), text);
  for (const { points, colour, dashes, hasDots } of drawn) {
    on.pen.setLineDash(dashes ?? []);
    drawCurve(on, points, colour ?? on.accent, xOf, yOf);
    on.pen.setLineDash([]);
    if (hasDots || points.length === 1) drawDots(on, points, colour ?? on.accent, xOf, yOf);
  }
  if (names && drawn.length > 1) drawNames(on, drawn);
  describe(canvas, `${yTitle} over ${xTitle}. ` + drawn.map(({ name, points }) =>
    `${name ? `${name}: ` : ""}${short(points[0][1])} at ${format(short(points[0][0]))}, `
    + `${short(points.at(-1)[1])} at ${format(short(points.at(-1)[0]))}`).join("; "));
}

/** Name the curves in the top right corner, each in its colour. */
function drawNames(on, drawn) {
  on.pen.textAlign = "right";
  let x = on.width - RIGHT;
  for (const { name, colour } of [...drawn].reverse()) {
    on.pen.fillStyle = colour ?? on.accent;
    on.pen.fillText(`■ ${name}`, x, 11);
    x -= on.pen.measureText(`■ ${name}`).width + 12;
  }
  on.pen.textAlign = "left";
}

const isKnown = ([, y]) => y !== null && y !== undefined;

function drawXTicks(on, left, right, xOf, format) {
  const step = Math.max(roundStep(right - left, Math.max(2, on.width / 80)), 1e-9);
  on.pen.fillStyle = on.quiet;
  on.pen.textAlign = "center";
  for (let x = Math.ceil(left / step) * step; x <= right; x += step) {
    if (left >= 0 && right - left > 1 && step < 1 && !Number.isInteger(x)) continue;
    on.pen.fillText(format(short(x)), Math.min(xOf(x), on.width - 16), on.height - BOTTOM + 14);
  }
  on.pen.textAlign = "left";
}

function drawMark(on, x, text) {
  on.pen.strokeStyle = on.quiet;
  on.pen.fillStyle = on.quiet;
  on.pen.setLineDash([2, 3]);
  on.pen.beginPath(); on.pen.moveTo(x, TOP - 4); on.pen.lineTo(x, on.height - BOTTOM); on.pen.stroke();
  on.pen.setLineDash([]);
  on.pen.fillText(text, x + 3, TOP + 4);
}

function drawCurve(on, points, colour, xOf, yOf) {
  const { pen } = on;
  pen.strokeStyle = colour;
  pen.globalAlpha = 0.35;
  trace(pen, points, xOf, yOf);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  trace(pen, smooth(points), xOf, yOf);
  pen.lineWidth = 1;
}

function drawDots(on, points, colour, xOf, yOf) {
  on.pen.fillStyle = colour;
  for (const [x, y] of points) on.pen.fillRect(xOf(x) - 2.5, yOf(y) - 2.5, 5, 5);
}

function trace(pen, points, xOf, yOf) {
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(xOf(x), yOf(y)) : pen.moveTo(xOf(x), yOf(y))));
  pen.stroke();
}

/** Return the moving average over the last points, a twentieth of the curve. */
function smooth(points) {
  const span = Math.max(1, Math.floor(points.length / 20));
  let sum = 0;
  return points.map(([x, y], i) => {
    sum += y - (i >= span ? points[i - span][1] : 0);
    return [x, sum / Math.min(i + 1, span)];
  });
}

/**
 * Draw bars over labels: `pairs` is [[label, value], …]. Bars beyond the label `bound` are red, and
 * a line after the bound says so; a bar at the bound is an ordinary one.
 */
export function bars(canvas, pairs, { bound = null, xTitle, yTitle, emptyText, high = null }) {
  if (!pairs.length) return setEmpty(canvas, emptyText);
  setEmpty(canvas, null);
  const on = begin(canvas), { pen } = on;
  const top = high ?? Math.max(...pairs.map(([, value]) => value ?? 0), 1e-12);
  const yOf = drawFrame(on, { low: 0, high: top, xTitle, yTitle });
  const pitch = (on.width - LEFT - RIGHT) / pairs.length, barWidth = Math.min(46, pitch * 0.8);
  pairs.forEach(([label, value], i) => {
    const x = LEFT + pitch * i + (pitch - barWidth) / 2, y = yOf(Math.max(0, value ?? 0));
    pen.fillStyle = bound !== null && label > bound ? on.bad : on.accent;
    pen.fillRect(x, y, barWidth, on.height - BOTTOM - y);
    pen.fillStyle = on.quiet;
    pen.textAlign = "center";
    if (pitch > 18 || i % Math.ceil(24 / pitch) === 0) {
      pen.fillText(String(label), x + barWidth / 2, on.height - BOTTOM + 14);
    }
    pen.fillStyle = on.ink;
    if (pitch > 38) pen.fillText(short(value), x + barWidth / 2, y - 4);
    if (label === bound) drawBound(on, LEFT + pitch * (i + 1), i + 1 === pairs.length);
  });
  pen.textAlign = "left";
  const passed = bound === null ? [] : pairs.filter(([label, value]) => label > bound && value);
  describe(canvas, `${yTitle} by ${xTitle}: ${pairs.map(([label, value]) =>
    `${label}: ${short(value)}`).join("; ")}`
    + (bound === null ? "" : `. Bound ${bound}, ${passed.length ? "passed" : "not passed"}`));
}

/**
 * Draw bars of several runs beside each other, in percent:
 * `series` is [{ name, points: [[label, value], …], colour }, …].
 */
export function groupedBars(canvas, series, { xTitle, yTitle, emptyText }) {
  const labels = [...new Set(series.flatMap(({ points }) => points.map(([label]) => label)))];
  labels.sort((a, b) => (typeof a === "number" ? a - b : 0));
  if (!labels.length) return setEmpty(canvas, emptyText);
  setEmpty(canvas, null);
  const on = begin(canvas), { pen } = on;
  const yOf = drawFrame(on, { low: 0, high: 100, xTitle, yTitle });
  const pitch = (on.width - LEFT - RIGHT) / labels.length;
  const barWidth = Math.min(30, (pitch * 0.8) / series.length);
  labels.forEach((label, i) => {
    const middle = LEFT + pitch * (i + 0.5);
    series.forEach(({ points, colour }, run) => {
      const value = points.find(([each]) => each === label)?.[1] ?? 0;
      const x = middle + barWidth * (run - series.length / 2);
      pen.fillStyle = colour;
      pen.fillRect(x, yOf(value), barWidth - 1, on.height - BOTTOM - yOf(value));
      if (barWidth < 22 || !value) return;
      pen.fillStyle = on.ink;
      pen.textAlign = "center";
      pen.fillText(value.toFixed(0), x + barWidth / 2, yOf(value) - 4);
    });
    pen.fillStyle = on.quiet;
    pen.textAlign = "center";
    pen.fillText(String(label), middle, on.height - BOTTOM + 14);
  });
  pen.textAlign = "left";
  describe(canvas, `${yTitle} by ${xTitle}. ${series.map(({ name, points }) =>
    `${name}: ${points.map(([label, value]) => `${label}: ${short(value)}`).join(", ")}`).join("; ")}`);
}

function drawBound(on, x, isAtEdge) {
  const at = isAtEdge ? on.width - RIGHT - 0.5 : x;
  on.pen.strokeStyle = on.ink;
  on.pen.fillStyle = on.ink;
  on.pen.setLineDash([4, 3]);
  on.pen.beginPath(); on.pen.moveTo(at, 4); on.pen.lineTo(at, on.height - BOTTOM); on.pen.stroke();
  on.pen.setLineDash([]);
  on.pen.textAlign = "right";
  on.pen.fillText("bound", at - 4, 12);
}

/**
 * Draw one stacked bar and its legend: `amounts` is [[name, amount, colour], …]. Every amount but 0
 * is at least a few pixels wide, because a single lost token must be seen.
 */
export function parts(canvas, legend, amounts, { unit }) {
  const on = begin(canvas);
  const whole = amounts.reduce((sum, [, n]) => sum + n, 0) || 1;
  let x = 0;
  const texts = amounts.map(([name, amount]) =>
    `${name} ${short(amount)} (${((100 * amount) / whole).toFixed(1)} %)`);
  const known = amounts.filter(([, amount]) => amount > 0);
  const room = on.width - PART_WIDTH_MIN * known.length;
  for (const [, amount, colour] of known) {
    const barWidth = PART_WIDTH_MIN + (amount / whole) * room;
    on.pen.fillStyle = colour;
    on.pen.fillRect(x, 0, barWidth, on.height);
    on.pen.fillStyle = on.card;
    if (x) on.pen.fillRect(x, 0, 1, on.height);
    x += barWidth;
  }
  legend.replaceChildren(...amounts.map(([, , colour], i) => key(colour, texts[i])));
  describe(canvas, `${unit}: ${texts.join("; ")}`);
}
