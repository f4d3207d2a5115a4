// Timeline: the trainer's activities, all engines together, and a row for each engine.
//
// Rows are in a box that scrolls, and only visible ones are drawn, so a thousand engines cost no
// more than twenty. Drag over the strips, or press the buttons, to zoom.

import { begin } from "./charts.js";
import { versionColour, versionTint } from "./colours.js";
import { byId, key } from "./dom.js";
import { clock, duration, percent, roundStep } from "./format.js";

const SLICES_KEPT = 480, MARKS_KEPT = 2000;
const NAMES_WIDTH = 106, ROW_HEIGHT = 17, ROWS_SHOWN = 20, HEAD_HEIGHT = 48, TOTAL_ROW = 26;
const SLICES_SHOWN_MIN = 8, LIVE_LENGTH_MIN_US = 20e6;

/** What times on the axis count from: [its name, the text of its tick]. */
const ORIGINS = { start: ["time since start", "0 s"], now: ["time before now", "now"],
  end: ["time before the end", "end"] };

/** Slices by engine, marks, and the trainer's intervals, merged from updates that overlap. */
class TimelineData {
  constructor() {
    Object.assign(this, { engines: new Map(), marks: new Map(), trainer: new Map(),
      sliceUs: 1, newest: 0, oldest: Infinity });
  }

  /** Add a timeline. Slices, marks and intervals that were added before are replaced. */
  add(timeline) {
    this.sliceUs = timeline.slice_us;
    for (const [name, slices] of Object.entries(timeline.engines)) {
      if (!this.engines.has(name)) this.engines.set(name, new Map());
      const strip = this.engines.get(name);
      for (const slice of slices) {
        strip.set(slice[0], slice);
        this.newest = Math.max(this.newest, slice[0]);
        this.oldest = Math.min(this.oldest, slice[0]);
      }
      for (const number of strip.keys()) {
        if (number > this.newest - SLICES_KEPT) break;
        strip.delete(number);
      }
    }
    this.oldest = Math.max(this.oldest, this.newest - SLICES_KEPT + 1);
    for (const mark of timeline.marks) this.marks.set(mark.slice(0, 3).join(), mark);
    for (const interval of timeline.trainer) {
      this.trainer.set(interval.slice(0, 2).join(), interval);
    }
    for (const kept of [this.marks, this.trainer]) {
      for (const name of kept.keys()) {
        if (kept.size <= MARKS_KEPT) break;
        kept.delete(name);
      }
    }
  }
}

export class Timeline {
  /** `loadRange(startUs, endUs)` returns a finer timeline of a range, or null if there is none. */
  constructor(loadRange) {
    Object.assign(this, { loadRange, data: new TimelineData(), finer: null, atUs: 0, origin: "now",
      isResumed: false, range: null });
    byId("zoom-in").onclick = () => this.zoom(0.5);
    byId("zoom-out").onclick = () => this.zoom(2);
    byId("zoom-earlier").onclick = () => this.pan(-0.5);
    byId("zoom-later").onclick = () => this.pan(0.5);
    byId("zoom-all").onclick = () => this.setRange(null);
    byId("engine-scroll").onscroll = () => this.draw();
    for (const id of ["timeline", "engine-rows"]) this.followPointer(byId(id));
  }

  add(timeline, atUs) {
    this.data.add(timeline);
    this.atUs = atUs;
  }

  // ------------------------------------------------------------ the range shown

  /** Return the largest range that there is data of. */
  whole() {
    const { sliceUs, newest, oldest } = this.data, lastUs = (newest + 1) * sliceUs;
    const endUs = this.origin === "now" ? Math.max(lastUs, this.atUs) : lastUs;
    let startUs = Math.max(Math.min(oldest, newest) * sliceUs, endUs - SLICES_KEPT * sliceUs);
    if (this.origin === "now") startUs = Math.min(startUs, endUs - LIVE_LENGTH_MIN_US);
    return [startUs, endUs];
  }

  shown() {
    return this.range ?? this.whole();
  }

  zoom(factor) {
    const [startUs, endUs] = this.shown(), middle = (startUs + endUs) / 2;
    const half = ((endUs - startUs) * factor) / 2;
    this.setRange([middle - half, middle + half]);
  }

  pan(share) {
    const [startUs, endUs] = this.shown(), by = (endUs - startUs) * share;
    this.setRange([startUs + by, endUs + by]);
  }

  /** Show a range, moved and cut so that it lies within the data; `null` shows everything. */
  setRange(range) {
    const [first, last] = this.whole();
    this.range = null;
    if (range !== null && range[1] - range[0] < last - first) {
      const shortest = this.origin === "start" ? 1000 : SLICES_SHOWN_MIN * this.data.sliceUs;
      const lengthUs = Math.max(range[1] - range[0], shortest);
      const startUs = Math.min(Math.max(range[0], first), last - lengthUs);
      this.range = [startUs, startUs + lengthUs];
    }
    this.finer = null;
    this.draw();
    this.loadFiner();
  }

  async loadFiner() {
    const range = this.range, loaded = range && (await this.loadRange(...range));
    if (!loaded || range !== this.range) return;
    this.finer = new TimelineData();
    this.finer.add(loaded);
    this.draw();
  }

  followPointer(canvas) {
    const usAt = (event) => {
      const [startUs, endUs] = this.shown(), width = canvas.clientWidth - NAMES_WIDTH;
      const share = (event.offsetX - NAMES_WIDTH) / width;
      return startUs + Math.min(1, Math.max(0, share)) * (endUs - startUs);
    };
    canvas.onpointerdown = (event) => { this.draggedFrom = [usAt(event), event.offsetX]; };
    canvas.onpointerup = (event) => {
      const [fromUs, x] = this.draggedFrom ?? [0, event.offsetX];
      this.draggedFrom = null;
      if (Math.abs(event.offsetX - x) < 6) return;
      this.setRange([fromUs, usAt(event)].sort((a, b) => a - b));
    };
    canvas.ondblclick = () => this.setRange(null);
  }

  // ------------------------------------------------------------ drawing

  draw() {
    const names = [...this.data.engines.keys()], data = this.finer ?? this.data;
    const [startUs, endUs] = this.shown(), canvas = byId("timeline");
    const on = begin(canvas, HEAD_HEIGHT + (names.length > 1 ? TOTAL_ROW : 0));
    const xOf = (us) =>
      NAMES_WIDTH + ((us - startUs) / (endUs - startUs)) * (on.width - NAMES_WIDTH);
    const strips = { data, startUs, endUs, xOf };
    this.drawAxis(on, strips);
    this.drawTrainer(on, strips);
    if (names.length > 1) this.drawTotal(on, strips, HEAD_HEIGHT);
    const versions = this.drawRows(names, strips);
    this.describe(names, strips);
    this.drawLegend(versions);
    for (const id of ["zoom-out", "zoom-earlier", "zoom-later", "zoom-all"]) {
      byId(id).disabled = this.range === null;
    }
  }

  /** Draw the ticks of the time axis. */
  drawAxis(on, { startUs, endUs, xOf }) {
    const [title, zero] = ORIGINS[this.origin];
    const originUs = this.origin === "start" ? this.whole()[0] : this.whole()[1];
    const stepS = roundStep((endUs - startUs) / 1e6, Math.max(2, on.width / 110));
    const firstS = Math.ceil((startUs - originUs) / 1e6 / stepS - 1e-6) * stepS;
    on.pen.textAlign = "left";
    on.pen.fillStyle = on.quiet;
    on.pen.fillText(title, 2, 12);
    on.pen.textAlign = "center";
    for (let s = firstS; s <= (endUs - originUs) / 1e6 + 1e-9; s += stepS) {
      const x = xOf(originUs + s * 1e6);
      on.pen.fillStyle = on.line;
      on.pen.fillRect(Math.round(x), 16, 1, on.height - 16);
      on.pen.fillStyle = on.quiet;
      const text = Math.abs(s) < 1e-6 ? zero : clock(s, stepS);
      const half = on.pen.measureText(text).width / 2;
      on.pen.fillText(text, Math.min(on.width - half, Math.max(NAMES_WIDTH + half + 6, x)), 12);
    }
    on.pen.textAlign = "left";
  }

  drawTrainer(on, { data, xOf }) {
    this.drawName(on, "trainer", 36);
    for (const [kind, fromUs, toUs] of data.trainer.values()) {
      const x = Math.max(NAMES_WIDTH, xOf(fromUs)), end = Math.min(on.width, xOf(toUs));
      if (end < NAMES_WIDTH || x > on.width) continue;
      on.pen.fillStyle = { train: on.quiet, evaluate: on.quiet, publish: on.ink }[kind] ?? on.idle;
      on.pen.fillRect(x, 24, Math.max(0.7, end - x), 16);
    }
  }

  /** Draw the mean share of all engines in steps, stacked by version. */
  drawTotal(on, { data, startUs, endUs, xOf }, top) {
    const inner = TOTAL_ROW - 4, { sliceUs } = data, count = data.engines.size;
    this.drawName(on, `all ${count}`, top + inner - 7);
    on.pen.fillStyle = on.idle;
    on.pen.fillRect(NAMES_WIDTH, top, on.width - NAMES_WIDTH, inner);
    const first = Math.floor(startUs / sliceUs), last = Math.ceil(endUs / sliceUs);
    const busyOf = new Map();
    for (const strip of data.engines.values()) {
      for (let number = first; number <= last; number++) {
        const slice = strip.get(number);
        if (!slice) continue;
        if (!busyOf.has(number)) busyOf.set(number, new Map());
        const byVersion = busyOf.get(number);
        byVersion.set(slice[1], (byVersion.get(slice[1]) ?? 0) + slice[2] + slice[3]);
      }
    }
    for (const [number, byVersion] of busyOf) {
      const x = Math.max(NAMES_WIDTH, xOf(number * sliceUs));
      const width = xOf((number + 1) * sliceUs) - x + 0.4;
      let y = top + inner;
      for (const [version, busyUs] of [...byVersion].sort(([a], [b]) => a - b)) {
        const height = Math.min(1, busyUs / (sliceUs * count)) * inner;
        on.pen.fillStyle = versionColour(version);
        on.pen.fillRect(x, y - height, width, height);
        y -= height;
      }
    }
  }

  /** Draw the engines' rows that are scrolled into view; return the versions drawn. */
  drawRows(names, strips) {
    const box = byId("engine-scroll"), canvas = byId("engine-rows");
    box.hidden = !names.length;
    byId("timeline-empty").hidden = names.length > 0;
    if (!names.length) return new Set();
    box.style.maxHeight = `${ROWS_SHOWN * ROW_HEIGHT}px`;
    byId("engine-spacer").style.height = `${names.length * ROW_HEIGHT}px`;
    const on = begin(canvas, Math.min(names.length, ROWS_SHOWN) * ROW_HEIGHT);
    const firstRow = Math.floor(box.scrollTop / ROW_HEIGHT), versions = new Set();
    const marks = groupMarks(strips.data.marks.values());
    names.slice(firstRow, firstRow + ROWS_SHOWN).forEach((name, row) => {
      const y = row * ROW_HEIGHT;
      this.drawName(on, name, y + ROW_HEIGHT - 5);
      this.drawStrip(on, strips, strips.data.engines.get(name) ?? new Map(), y, versions);
      this.drawMarks(on, strips, marks.get(name) ?? [], y);
    });
    return versions;
  }

  drawStrip(on, { data, startUs, endUs, xOf }, strip, y, versions) {
    const inner = ROW_HEIGHT - 2, { sliceUs } = data;
    on.pen.fillStyle = on.idle;
    on.pen.fillRect(NAMES_WIDTH, y, on.width - NAMES_WIDTH, inner);
    for (let n = Math.floor(startUs / sliceUs); n * sliceUs < endUs; n++) {
      const slice = strip.get(n);
      if (!slice) continue;
      const [, version, decodeUs, prefillUs] = slice;
      versions.add(version);
      const x = Math.max(NAMES_WIDTH, xOf(n * sliceUs)), width = xOf((n + 1) * sliceUs) - x + 0.4;
      const decode = Math.min(1, decodeUs / sliceUs) * inner;
      const prefill = Math.min(inner - decode, (prefillUs / sliceUs) * inner);
      on.pen.fillStyle = versionColour(version);
      on.pen.fillRect(x, y + inner - decode, width, decode);
      on.pen.fillStyle = versionTint(version);
      on.pen.fillRect(x, y + inner - decode - prefill, width, prefill);
    }
  }

  drawMarks(on, { xOf }, marks, y) {
    const inner = ROW_HEIGHT - 2;
    let pausedAt = null;
    for (const [, kind, atUs] of marks) {
      const x = xOf(atUs), isShown = x >= NAMES_WIDTH && x <= on.width;
      if (kind === "paused") pausedAt = x;
      if (kind === "resumed" && pausedAt !== null) {
        this.drawPause(on, pausedAt, x, y);
        pausedAt = null;
      }
      on.pen.fillStyle = on.ink;
      if (kind === "swap" && isShown) on.pen.fillRect(x - 0.5, y, 1.2, inner);
      if (kind === "lost" && isShown) on.pen.fillText("✕", x - 4, y + inner - 2);
    }
    if (pausedAt !== null) this.drawPause(on, pausedAt, on.width, y);
  }

  drawPause(on, from, to, y) {
    const x = Math.max(NAMES_WIDTH, from), end = Math.min(on.width, to);
    if (end <= x) return;
    const { pen } = on, inner = ROW_HEIGHT - 2;
    pen.save();
    pen.beginPath(); pen.rect(x, y, end - x, inner); pen.clip();
    pen.strokeStyle = on.quiet;
    pen.beginPath();
    for (let at = x - inner; at < end; at += 5) { pen.moveTo(at, y + inner); pen.lineTo(at + inner, y); }
    pen.stroke();
    pen.restore();
  }

  drawName(on, text, y) {
    on.pen.fillStyle = on.quiet;
    on.pen.fillText(text.length > 15 ? `…${text.slice(-14)}` : text, 2, y);
  }

  describe(names, { data, startUs, endUs }) {
    const { sliceUs } = data, lengthS = (endUs - startUs) / 1e6;
    const shown = this.range || this.origin === "start" ? duration(lengthS) : `the last ${duration(lengthS)}`;
    const since = this.isResumed ? ", since the last resume" : "";
    byId("timeline-span").textContent = names.length
      ? `${shown}${since}; height: share of each ${duration(sliceUs / 1e6)} in steps` : "";
    const rows = names.slice(0, ROWS_SHOWN).map((name) => {
      let busyUs = 0, version = -1;
      for (const slice of (data.engines.get(name) ?? new Map()).values()) {
        if ((slice[0] + 1) * sliceUs < startUs || slice[0] * sliceUs > endUs) continue;
        busyUs += slice[2] + slice[3];
        version = slice[1];
      }
      return `${name}: in steps ${percent(busyUs / (endUs - startUs))} of the time, last with v${version}`;
    });
    byId("timeline").setAttribute("aria-label",
      `Trainer's activities and all engines' steps over ${duration(lengthS)}`);
    byId("engine-rows").setAttribute("aria-label", `Engines over ${duration(lengthS)}. ${rows.join("; ")}`
      + (names.length > ROWS_SHOWN ? `; and ${names.length - ROWS_SHOWN} more` : ""));
  }

  drawLegend(versions) {
    const shown = [...versions].sort((a, b) => a - b).slice(-6);
    byId("timeline-legend").replaceChildren(
      ...shown.map((version) => key(versionColour(version), `v${version}`)),
      key(versionTint(shown.at(-1) ?? 0), "paler: with prefill"), key(".patch-idle", "idle"),
      key(".patch-paused", "paused"), key(".patch-swap", "swap of weights"),
      key(".patch-lost", "✕ engine lost"), key(".patch-train", "trainer: train or evaluate"),
      key(".patch-idle", "trainer: wait"), key(".patch-publish", "trainer: publish"));
  }
}

/** Return the marks by engine. */
function groupMarks(marks) {
  const grouped = new Map();
  for (const mark of marks) {
    if (!grouped.has(mark[0])) grouped.set(mark[0], []);
    grouped.get(mark[0]).push(mark);
  }
  return grouped;
}
