// Charts of the dashboard, drawn on canvases with the page's colours, from plain numbers.

export const versionColour = (version, light = 58) =>
  version < 0 ? "#8a94a0" : `hsl(${(version * 137.508) % 360} 62% ${light}%)`;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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
  return { pen, width, height: shown, ink: css("--ink"), quiet: css("--quiet"), line: css("--line"),
    accent: css("--accent"), bad: css("--bad"), idle: css("--idle") };
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size && size < 0.001) return value.toExponential(1);
  return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 3 : 1);
}

function drawEmpty(on, text) {
  on.pen.fillStyle = on.quiet;
  on.pen.fillText(text, 8, on.height / 2);
}

/** Draw a curve through [x, y] points; points without y are skipped. */
export function curve(canvas, points, { from, emptyText = "no data yet" } = {}) {
  const on = begin(canvas);
  const known = points.filter(([, y]) => y !== null && y !== undefined);
  if (!known.length) return drawEmpty(on, emptyText);
  const xs = known.map(([x]) => x), ys = known.map(([, y]) => y);
  const left = Math.min(...xs), right = Math.max(...xs, left + 1);
  const low = from ?? Math.min(...ys), high = Math.max(...ys, low + 1e-9);
  const at = (x, y) => [44 + ((x - left) / (right - left)) * (on.width - 52),
    on.height - 18 - ((y - low) / (high - low)) * (on.height - 42)];
  const { pen } = on;
  pen.fillStyle = on.quiet;
  pen.fillText(short(high), 2, 28);
  pen.fillText(short(low), 2, on.height - 18);
  pen.fillText(`v${left}`, 44, on.height - 4);
  pen.fillText(`v${right}`, on.width - 34, on.height - 4);
  pen.strokeStyle = on.line;
  pen.beginPath(); pen.moveTo(44, on.height - 17.5); pen.lineTo(on.width - 8, on.height - 17.5);
  pen.stroke();
  pen.globalAlpha = 0.35;
  pen.strokeStyle = on.accent;
  trace(pen, known, at);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  trace(pen, smooth(known), at);
  pen.lineWidth = 1;
  pen.fillStyle = on.ink;
  pen.textAlign = "right";
  pen.fillText(`now ${short(ys[ys.length - 1])}`, on.width - 8, 12);
  pen.textAlign = "left";
}

function trace(pen, points, at) {
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(...at(x, y)) : pen.moveTo(...at(x, y))));
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

/** Draw bars over labels: [[label, value], …]; `limit` marks the largest allowed label. */
export function bars(canvas, pairs, { limit = null, colour, emptyText = "no data yet" } = {}) {
  const on = begin(canvas);
  if (!pairs.length) return drawEmpty(on, emptyText);
  const { pen } = on;
  const high = Math.max(...pairs.map(([, value]) => value ?? 0), 1e-12);
  const pitch = (on.width - 8) / pairs.length, barWidth = Math.min(46, pitch * 0.8);
  pairs.forEach(([label, value], i) => {
    const x = 4 + pitch * i + (pitch - barWidth) / 2;
    const height = (Math.max(0, value ?? 0) / high) * (on.height - 36);
    pen.fillStyle = limit !== null && label > limit ? on.bad : colour ? colour(label) : on.accent;
    pen.fillRect(x, on.height - 16 - height, barWidth, height);
    pen.fillStyle = on.quiet;
    pen.textAlign = "center";
    if (pitch > 16 || i % Math.ceil(20 / pitch) === 0) {
      pen.fillText(String(label), x + barWidth / 2, on.height - 3);
      if (pitch > 34) pen.fillText(short(value), x + barWidth / 2, on.height - 20 - height);
    }
    if (limit !== null && label === limit) {
      pen.strokeStyle = on.bad;
      pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(x + barWidth + 3, 4); pen.lineTo(x + barWidth + 3, on.height - 14);
      pen.stroke();
      pen.setLineDash([]);
    }
    pen.textAlign = "left";
  });
}

/** Draw one stacked bar: [[name, amount, colour], …]. */
export function parts(canvas, legend, amounts) {
  const on = begin(canvas);
  const whole = amounts.reduce((sum, [, n]) => sum + n, 0) || 1;
  let x = 0;
  legend.replaceChildren();
  for (const [name, amount, colour] of amounts) {
    const barWidth = (amount / whole) * on.width;
    on.pen.fillStyle = colour;
    on.pen.fillRect(x, 0, barWidth, on.height);
    x += barWidth;
    legend.append(key(colour, `${name} ${short(amount)} (${((100 * amount) / whole).toFixed(1)} %)`));
  }
}

/** Return a legend entry: a colour patch and its text. */
export function key(colour, text) {
  const label = document.createElement("span"), patch = document.createElement("i");
  patch.style.background = colour;
  label.append(patch, text);
  return label;
}
