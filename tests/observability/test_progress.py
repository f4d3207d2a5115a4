"""RunProgress on a terminal and in a log."""

import dataclasses
import io

from rich.console import Console

from tests.observability.test_recording import some_statistics
from tidegate.observability.progress import RunProgress
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics


def statistics() -> RunStatistics:
    engines = tuple(
        EngineStatistics(f"engine-{n}", 4 - n, 0, 0, 0, 0.0, is_alive=n < 2) for n in range(3)
    )
    return dataclasses.replace(some_statistics(), engines=engines)


def test_without_a_terminal_each_batch_is_one_plain_line() -> None:
    out = io.StringIO()
    with RunProgress(statistics, batches_total=40, console=Console(file=out)) as progress:
        progress.say("warming up")
        progress.batch({"reward": 0.5})
        progress.batch({"reward": 0.625, "loss": -0.01})
    assert out.getvalue().splitlines() == [
        "warming up",
        "step 1/40  reward 0.500  100 tok/s  staleness 2.00 max 2/2  v4 engines v4 v3 lost  "
        "idle trainer 25% engines 12%",
        "step 2/40  reward 0.625  loss -0.010  100 tok/s  staleness 2.00 max 2/2  "
        "v4 engines v4 v3 lost  idle trainer 25% engines 12%",
    ]


async def test_in_a_terminal_the_last_state_stays_on_the_screen() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    async with RunProgress(statistics, batches_total=2, console=console) as progress:
        progress.batch({"reward": 0.5})
        progress.batch({"reward": 0.75})
    shown = out.getvalue()
    for expected in ("2/2", "reward 0.750", "mean 2.00, max 2, bound 2", "engines v4 v3 lost"):
        assert expected in shown
