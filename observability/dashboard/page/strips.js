// Timeline of the engines: a strip of time slices per engine, below the trainer's strip.

import { begin, key, versionColour } from "./charts.js";

const SLICES_KEPT = 480, MARKS_KEPT = 2000, NAME_WIDTH = 90;
const TRAINER = { train: "#7d5ba6", wait: "#cfd6dd", publish: "#e0a030" };

export class Strips {
  constructor(canvas, legend, span) {
    Object.assign(this, { canvas, legend, span, engines: new Map(), marks: new Map(),
      trainer: new Map(), sliceUs: 1, newest: 0, drawn: 0 });
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
      }
      for (const number of strip.keys()) {
        if (number > this.newest - SLICES_KEPT) break;
        strip.delete(number);
      }
    }
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

  draw(atUs, isOver) {
    const names = [...this.engines.keys()];
    const height = Math.max(4, Math.min(22, Math.floor(560 / Math.max(1, names.length))));
    const on = begin(this.canvas, 22 + height * Math.max(1, names.length) + 4);
    const end = isOver ? this.newest + 1 : Math.max(this.newest, Math.floor(atUs / this.sliceUs));
    const first = end - SLICES_KEPT, sliceWidth = (on.width - NAME_WIDTH) / SLICES_KEPT;
    const xOf = (us) => NAME_WIDTH + (us / this.sliceUs - first) * sliceWidth;
    this.span.textContent = `the last ${Math.round((SLICES_KEPT * this.sliceUs) / 1e6)} s`;
    this.drawTrainer(on, xOf);
    const versions = new Set();
    names.forEach((name, row) => {
      const y = 24 + row * height, inner = Math.max(2, height - 2);
      on.pen.fillStyle = on.idle;
      on.pen.fillRect(NAME_WIDTH, y, on.width - NAME_WIDTH, inner);
      if (height >= 10) this.drawName(on, name, y + inner - 3);
      for (const [number, version, decodeUs, prefillUs] of this.engines.get(name).values()) {
        if (number < first) continue;
        versions.add(version);
        const x = NAME_WIDTH + (number - first) * sliceWidth;
        const decode = Math.min(1, decodeUs / this.sliceUs) * inner;
        const prefill = Math.min(inner - decode, (prefillUs / this.sliceUs) * inner);
        on.pen.fillStyle = versionColour(version);
        on.pen.fillRect(x, y + inner - decode, sliceWidth + 0.5, decode);
        on.pen.fillStyle = versionColour(version, 80);
        on.pen.fillRect(x, y + inner - decode - prefill, sliceWidth + 0.5, prefill);
      }
      this.drawMarks(on, name, y, inner, xOf);
    });
    this.drawn += 1;
    this.drawLegend(versions, on);
  }

  drawTrainer(on, xOf) {
    this.drawName(on, "trainer", 14);
    for (const [kind, startUs, endUs] of this.trainer.values()) {
      const x = Math.max(NAME_WIDTH, xOf(startUs)), end = Math.min(on.width, xOf(endUs));
      if (end < NAME_WIDTH) continue;
      on.pen.fillStyle = TRAINER[kind] ?? on.quiet;
      on.pen.fillRect(x, 4, Math.max(0.5, end - x), 13);
    }
  }

  drawMarks(on, name, y, height, xOf) {
    let pausedAt = null;
    for (const [engine, kind, atUs] of this.marks.values()) {
      if (engine !== name) continue;
      const x = xOf(atUs);
      if (kind === "paused") pausedAt = x;
      if (kind === "resumed" && pausedAt !== null) {
        this.drawPause(on, pausedAt, x, y, height);
        pausedAt = null;
      }
      if (x < NAME_WIDTH || (kind !== "swap" && kind !== "lost")) continue;
      on.pen.fillStyle = kind === "lost" ? on.bad : on.ink;
      on.pen.fillRect(x - 0.5, y, kind === "lost" ? 3 : 1, height);
    }
    if (pausedAt !== null) this.drawPause(on, pausedAt, on.width, y, height);
  }

  drawPause(on, from, to, y, height) {
    const x = Math.max(NAME_WIDTH, from);
    if (to <= x) return;
    on.pen.globalAlpha = 0.55;
    on.pen.fillStyle = on.quiet;
    on.pen.fillRect(x, y, to - x, height);
    on.pen.globalAlpha = 1;
  }

  drawName(on, text, y) {
    on.pen.fillStyle = on.quiet;
    on.pen.fillText(text.length > 13 ? `…${text.slice(-12)}` : text, 2, y);
  }

  drawLegend(versions, on) {
    const shown = [...versions].sort((a, b) => a - b).slice(-8);
    this.legend.replaceChildren(
      ...shown.map((version) => key(versionColour(version), `v${version}`)),
      key(versionColour(shown.at(-1) ?? 0, 80), "with prefill"), key(on.idle, "idle"),
      key(on.quiet, "paused"), key(on.ink, "swap"), key(on.bad, "lost"),
      ...Object.entries(TRAINER).map(([kind, colour]) => key(colour, `trainer: ${kind}`)),
    );
  }
}
