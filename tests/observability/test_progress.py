"""Progress of a run on a terminal and in a log, and its summary."""

import dataclasses
import io
import sys

import pytest
from rich.console import Console

from tests.observability.recorded import some_statistics
from tidegate.observability.progress import ProgressDisplay
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics
from tidegate.orchestrator.telemetry.watchdog import Stuck

FIGURES = {
    "version": 1,
    "reward": 0.5,
    "tokens_per_s": 100.0,
    "staleness_mean": 0.5,
    "staleness_max": 1.0,
    "trainer_idle_share": 0.25,
    "engine_idle_share": 0.125,
}

EVALUATION = {
    "name": "held_out",
    "version": 0,
    "reward": 0.25,
    "tasks": 4,
    "failures": 0,
    "seconds": 0.5,
}


def statistics() -> RunStatistics:
    engines = tuple(
        EngineStatistics(f"engine-{n}", 4 - n // 2, 0, 0, 0, 0.0, is_alive=n < 3) for n in range(4)
    )
    engines += (EngineStatistics("engine-4", 4, 0, 0, 0, 0.0, state="draining"),)
    return dataclasses.replace(some_statistics(), engines=engines)


def display(*, is_terminal: bool) -> tuple[ProgressDisplay, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=120)
    return ProgressDisplay(groups_per_batch=4, console=console), out


def test_without_a_terminal_each_batch_is_one_plain_line_and_the_end_a_summary() -> None:
    progress, out = display(is_terminal=False)
    progress.show("model: m", statistics)
    progress.offered(9)
    progress.evaluation(EVALUATION)
    progress.batch(FIGURES)
    progress.batch({**FIGURES, "version": 2, "reward": 0.75})
    progress.hide()
    progress.evaluation({**EVALUATION, "version": 2, "reward": 0.5, "failures": 1})
    progress.finish(statistics(), mode="async")
    progress.close()
    progress.close()
    assert out.getvalue().splitlines() == [
        "model: m",
        "evaluation held_out  reward 0.250  v0  4 tasks  0.5 s",
        "batch 1/3  reward 0.500  v1  100 tok/s  staleness mean 0.50 max 1  "
        "idle trainer 25% engines 12%",
        "batch 2/3  reward 0.750  v2  100 tok/s  staleness mean 0.50 max 1  "
        "idle trainer 25% engines 12%",
        "evaluation held_out  reward 0.500  v2  4 tasks, 1 failed  0.5 s",
        "ended: 4 batches, v4, 2 s; 1 rollouts trained, 2 discarded; reward 0.500 in the first "
        "batch, 0.750 in the last; held_out 0.250 at v0, 0.500 at v2; staleness max 2 of "
        "bound 2; 100 tok/s; idle: trainer 25%, engines 12%",
    ]


STUCK = Stuck("learning", "the batches", "batch.advantages is 0", 3.0)


def test_what_is_stuck_is_named_in_the_batchs_line_in_the_table_and_in_the_summary() -> None:
    seen = dataclasses.replace(statistics(), stuck=(STUCK,))
    progress, out = display(is_terminal=False)
    progress.batch(FIGURES)
    progress.statistics(seen)
    progress.batch(FIGURES)
    progress.finish(seen)
    progress.close()
    first, second, summary = out.getvalue().splitlines()
    assert "stuck" not in first
    assert second.endswith("engines 12%  stuck: the batches")
    assert summary.endswith(f"; {STUCK}")
    progress, out = display(is_terminal=True)
    progress.show("model: m", lambda: seen)
    progress.hide()
    assert str(STUCK) in out.getvalue()


def test_an_endless_iterator_has_no_total_and_a_resumed_run_counts_on() -> None:
    out = io.StringIO()
    progress = ProgressDisplay(groups_per_batch=4, batches=7, console=Console(file=out))
    progress.offered(None)
    progress.batch(FIGURES)
    assert out.getvalue().startswith("batch 8  reward")


def test_a_run_that_trained_nothing_says_so() -> None:
    progress, out = display(is_terminal=False)
    progress.finish(dataclasses.replace(statistics(), batches=0))
    progress.close()
    assert out.getvalue().startswith("ended before the first batch; rollouts discarded: ")


def test_in_a_terminal_the_last_state_stays_on_the_screen() -> None:
    progress, out = display(is_terminal=True)
    progress.show("model: m", statistics)
    progress.offered(8)
    progress.batch(FIGURES)
    progress.batch({**FIGURES, "reward": 0.75})
    progress.hide()
    last = out.getvalue().rpartition("batch")[2]
    for expected in (
        "2/2",
        "0.750",
        "mean 2.00, max 2, bound 2",
        "2 at v4, 1 at v3, 1 lost, 1 draining",
    ):
        assert expected in last
    assert "batch 1/2" not in out.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress, out = display(is_terminal=True)
    progress.show("model: m", statistics)
    progress.batch(FIGURES)
    assert out.getvalue().splitlines()[1].startswith("batch 1  reward 0.500")


def test_what_the_trainer_prints_into_a_file_stays_out_of_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress, out = display(is_terminal=True)
    progress.show("model: m", statistics)
    sys.stdout.write("a result\n")
    progress.hide()
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in out.getvalue()


def test_a_run_that_cannot_be_read_keeps_its_last_state_on_the_screen() -> None:
    progress, out = display(is_terminal=True)
    snapshots = [statistics()]
    progress.show("model: m", lambda: snapshots.pop())
    progress.hide()  # redraws once more, and finds no snapshot
    assert "2 at v4, 1 at v3, 1 lost, 1 draining" in out.getvalue()
