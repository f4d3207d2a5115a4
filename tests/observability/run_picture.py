"""SVG picture of recorded runs: engines and trainer over time, coloured by weight version.

    python -m tests.observability.run_picture runs/latest/sync runs/latest/async --picture run.svg

Drawn for README (docs/pictures/run.svg) from two runs of ``tidegate demo``. Bars come from each
run's ``trace.json``, the token strips below them from the last run's ``trajectories.parquet``.
Colours repeat after eight versions.
"""

import argparse
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tidegate.observability.records.trace import TRAINER_TRACK, Interval, read_trace, trace_path
from tidegate.observability.records.trajectories import RecordedRollout, read_trajectories
from tidegate.observability.reports.facts import read_record

COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"),
    *("#e15759", "#76b7b2", "#c8a200", "#9c755f"),
)
"""Colour of a weight version, by its number modulo eight."""

INK, GREY, LIGHT = "#22303c", "#5b6670", "#e6e9ec"
WIDTH, LEFT, RIGHT = 900, 92, 10
"""Width of the picture, of its labels and of its right margin, in pixels."""
ROW, BAR = 24, 19
"""Distance of two rows, and height of a bar, in pixels."""
CHARACTER = 7
"""Width of a character of the labels, in pixels, by which labels that do not fit are omitted."""
GAP = 3.0
"""Gaps between an engine's steps that are narrower than this, in pixels, are not drawn."""
CELL_MAX = 6.0
"""Largest width of a token's cell, in pixels."""
STALENESS_ROOM = 90
"""Space for the text behind the longest strip of tokens, in pixels."""


@dataclass
class Canvas:
    """An SVG picture that grows downwards."""

    y: float = 0
    """Lower end of the picture so far, in pixels."""
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, text: str, *, colour: str = INK, bold: bool = False, anchor: str = "start"
    ) -> None:
        """Write in the current row, at ``x``."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{self.y + 14:.1f}" fill="{colour}" text-anchor="{anchor}"'
            f"{weight}>{html.escape(text)}</text>"
        )

    def bar(self, x: float, width: float, colour: str, label: str = "") -> None:
        """Draw a bar in the current row, with its label if that fits."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{self.y:.1f}" width="{max(width, 0.8):.1f}" height="{BAR}" '
            f'fill="{colour}"/>'
        )
        if label and len(label) * CHARACTER + 2 < width:
            self.text(x + width / 2, label, colour="#fff", anchor="middle")

    def ticks(self, x: float, width: float, distance: float) -> None:
        """Draw white lines through the current row, ``distance`` pixels apart."""
        lines = "".join(
            f"M{x + k * distance:.1f} {self.y:.0f}v{BAR}" for k in range(1, int(width / distance))
        )
        self.parts.append(f'<path d="{lines}" stroke="#fff" stroke-width="0.8"/>')

    def svg(self, description: str) -> str:
        """Return the picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y:.0f}" '
                f'role="img" aria-label="{html.escape(description)}" font-family="sans-serif" '
                f'font-size="12">',
                f'<rect width="{WIDTH}" height="{self.y:.0f}" fill="#fff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def colour_of(version: int) -> str:
    """Return the colour of a weight version."""
    return COLOURS[version % len(COLOURS)]


def title_of(directory: Path) -> str:
    """Return the title of a run, by its staleness bound."""
    bound = read_record(directory)["settings"]["max_staleness"]
    if bound:
        what = "engines keep generating, and take new weights between two steps"
    else:
        what = "engines wait while the trainer trains, and it waits for the longest rollout"
    return f"max_staleness={bound}: {what}"


def draw_run(canvas: Canvas, directory: Path, *, seconds: float, skip: int) -> None:
    """Draw ``seconds`` of a run, from the moment when weights v``skip`` were published."""
    tracks = read_trace(trace_path(directory)).tracks
    trainer = tracks[TRAINER_TRACK]
    begin_us = next(i.started_us for i in trainer if i.name == "train" and i.version >= skip)
    scale = (WIDTH - LEFT - RIGHT) / (seconds * 1e6)

    def place(interval: Interval) -> tuple[float, float]:
        start = max(interval.started_us - begin_us, 0)
        end = min(interval.ended_us - begin_us, seconds * 1e6)
        return LEFT + start * scale, (end - start) * scale

    canvas.text(10, title_of(directory), bold=True)
    canvas.text(WIDTH - RIGHT, f"{seconds:g} s", colour=GREY, anchor="end")
    canvas.y += ROW
    for name in sorted(set(tracks) - {TRAINER_TRACK}):
        canvas.text(10, name)
        for version, same in groupby(tracks[name], key=lambda interval: interval.version):
            bars = joined([(x, width) for x, width in map(place, same) if width > 0])
            widest = max((width for _, width in bars), default=0)
            for x, width in bars:
                canvas.bar(x, width, colour_of(version), f"v{version}" if width == widest else "")
        canvas.y += ROW
    canvas.text(10, "trainer")
    for interval in trainer:
        x, width = place(interval)
        if width > 0 and interval.name == "train":
            canvas.bar(x, width, GREY, "train")
        elif width > 0 and interval.name == "publish":
            canvas.bar(x, width, colour_of(interval.version))
    canvas.y += ROW + 8


def joined(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return bars, as left edges and widths, with those joined that almost touch."""
    found: list[tuple[float, float]] = []
    for x, width in bars:
        if found and x - sum(found[-1]) < GAP:
            found[-1] = (found[-1][0], x + width - found[-1][0])
        else:
            found.append((x, width))
    return found


def versions_of(rollout: RecordedRollout) -> list[int | None]:
    """Return the weight version of each token; None for prompt, tool and template tokens."""
    versions: list[int | None] = [None] * len(rollout.token_ids)
    for turn in rollout.turns:
        for span in turn.spans:
            versions[turn.start + span.start : turn.start + span.end] = [span.version] * (
                span.end - span.start
            )
    return versions


def mixed_rollouts(directory: Path, count: int, *, skip: int) -> Iterator[RecordedRollout]:
    """Yield trained rollouts with tokens of several versions, of one group each."""
    groups: set[int] = set()
    for rollout in read_trajectories(directory):
        versions = {version for version in versions_of(rollout) if version is not None}
        is_new = rollout.group_id not in groups and min(versions, default=-1) >= skip
        if len(groups) < count and is_new and rollout.staleness is not None and len(versions) > 1:
            groups.add(rollout.group_id)
            yield rollout


def draw_rollouts(canvas: Canvas, directory: Path, count: int, *, skip: int) -> None:
    """Draw ``count`` rollouts as strips of tokens."""
    title = "Rollouts during which weights changed: each cell is a token"
    canvas.text(10, title, bold=True)
    canvas.y += ROW
    shown = list(mixed_rollouts(directory, count, skip=skip))
    widest = max(len(rollout.token_ids) for rollout in shown)
    cell = min(CELL_MAX, (WIDTH - LEFT - RIGHT - STALENESS_ROOM) / widest)
    for rollout in shown:
        canvas.text(10, f"rollout {rollout.rollout_id}")
        x = float(LEFT)
        for version, run in groupby(versions_of(rollout)):
            width = len(list(run)) * cell
            canvas.bar(x, width, LIGHT if version is None else colour_of(version))
            x += width
        canvas.ticks(LEFT, x - LEFT, cell)
        canvas.text(x + 8, f"staleness {rollout.staleness}", colour=GREY)
        canvas.y += ROW
    canvas.text(
        10,
        "Each colour is a weight version, above and here. Light cells are prompt and tool output: "
        "context that is not trained on.",
        colour=GREY,
    )
    canvas.y += ROW


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs below each other, then rollouts of the last one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories of recorded runs")
    parser.add_argument("--picture", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the shown time")
    parser.add_argument("--skip", type=int, default=3, help="versions before the shown time")
    parser.add_argument("--rollouts", type=int, default=4, help="number of token strips")
    options = parser.parse_args(arguments)
    canvas = Canvas(y=6)
    for run in options.runs:
        draw_run(canvas, run, seconds=options.seconds, skip=options.skip)
    draw_rollouts(canvas, options.runs[-1], options.rollouts, skip=options.skip)
    names = ", then ".join(run.name for run in options.runs)
    text = canvas.svg(f"Engines and trainer over {options.seconds:g} s: {names}")
    options.picture.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
