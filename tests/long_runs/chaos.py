"""Crash-restart test: kills a run's processes at random and checks its promises.

``python -m tests.long_runs.chaos [--seconds 180] [--seed 0] [--json]`` trains the demo's model with
real processes: four engines, and one process with trainer and orchestrator. Every 2 to 5 seconds
one of the five, drawn from the seed, is killed with SIGKILL and restarted a little later. At the
end it prints ``name, value, unit, limit, holds`` and exits with 1 if any check fails.

The trainer is forked from a process that has torch and transformers imported, because it would
otherwise spend most of its time importing them. The checks compare the trainer's own record of the
batches it trained with the run's ledger. The seed determines the victims and times, but not what
they are doing then.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from examples.tiny_model import make_model
from tests.long_runs.chaos_trainer import (
    EVENTS_FILE,
    RESULT_FILE,
    STOP_FILE,
    Options,
    TrainedBatch,
    live,
)
from tests.long_runs.checks import Row, show

ENGINES = 4
TRAINER = "trainer"
MAX_STALENESS = 2
KILL_INTERVAL_S = (2.0, 5.0)
DOWN_S = (0.2, 1.5)
"""Range of the delay between a kill and the restart."""
TICK_S = 0.05
FIRST_BATCH_TIMEOUT_S = 180.0
"""Timeout of the first batch: five processes import torch at once, which takes long on two busy
cores."""
STOP_TIMEOUT_S = 180.0
"""Timeout of the last batch, once the kills have stopped."""
ENGINES_END_TIMEOUT_S = 90.0
"""Timeout for the engines to exit; an engine that starts too late to receive the run's end exits
after 60 s."""
REWARD_SHARE = 0.25
"""Share of the batches that make up the initial and the final reward."""


class Process(Protocol):
    """The common part of Popen and a forked process."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Wait for the end and return the exit status."""


class Fork:
    """A process started by a fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.kill = process.kill
        process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


@dataclass(slots=True)
class Member:
    """A process of the run that is restarted whenever it ends."""

    name: str
    launch: Callable[[], "Process"]
    process: "Process | None" = None
    starts_at_s: float = 0.0
    kills: int = 0
    ends: list[int] = field(default_factory=list)
    """Exit statuses of the times when it ended by itself."""

    @property
    def is_up(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        self.process = self.launch()

    def kill(self) -> None:
        """Kill the process; if it has just ended by itself, record its exit status instead."""
        assert self.process is not None
        self.process.kill()
        if (status := self.process.wait()) == -signal.SIGKILL:
            self.kills += 1
        else:
            self.ends.append(status)
        self.process = None

    def notice_end(self) -> bool:
        if self.process is None or (status := self.process.poll()) is None:
            return False
        self.ends.append(status)
        self.process = None
        return True


class Chaos:
    """Restarts the members of a run, and kills them at random."""

    def __init__(self, directory: Path, model: Path, seed: int) -> None:
        self.directory = directory
        self._chance = random.Random(seed)
        options = Options(directory, f"ipc://{directory}/run.sock", model, MAX_STALENESS, seed)
        names = [f"engine-{number}" for number in range(ENGINES)]
        self.engines = [Member(name, partial(start_engine, name, options)) for name in names]
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([live.__module__])
        self.trainer = Member(TRAINER, lambda: Fork(server.Process(target=live, args=(options,))))
        self.members = [self.trainer, *self.engines]

    def run(self, seconds: float) -> None:
        """Start all members; from the first batch on, kill one after the other for this long."""
        self._wait_for_first_batch()
        started_s = now_s = time.monotonic()
        kills_at_s = started_s + self._chance.uniform(*KILL_INTERVAL_S)
        while now_s < started_s + seconds and not self.trainer.ends:
            self._keep_going(now_s)
            if now_s >= kills_at_s:
                self._kill_one(now_s)
                kills_at_s = now_s + self._chance.uniform(*KILL_INTERVAL_S)
            time.sleep(TICK_S)
            now_s = time.monotonic()

    def finish(self) -> bool:
        """Let the run finish its last batch; return whether the trainer and the engines exited
        normally."""
        (self.directory / STOP_FILE).touch()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while not self.trainer.ends and time.monotonic() < deadline_s:
            self._keep_going(time.monotonic(), is_ending=True)
            time.sleep(TICK_S)
        deadline_s = time.monotonic() + ENGINES_END_TIMEOUT_S
        while any(e.is_up for e in self.engines) and time.monotonic() < deadline_s:
            for engine in self.engines:
                engine.notice_end()
            time.sleep(TICK_S)
        return self.trainer.ends == [0] and not any(m.is_up for m in self.members)

    def kill_all(self) -> None:
        for member in self.members:
            if member.is_up:
                member.kill()

    def _keep_going(self, now_s: float, *, is_ending: bool = False) -> None:
        """Restart members that are down, except a trainer that has exited and engines of an ending
        run."""
        for member in self.members:
            if member.notice_end():
                stays_down = is_ending or member is self.trainer
                down_s = float("inf") if stays_down else self._chance.uniform(*DOWN_S)
                member.starts_at_s = now_s + down_s
            if not member.is_up and now_s >= member.starts_at_s:
                member.start()

    def _wait_for_first_batch(self) -> None:
        deadline_s = time.monotonic() + FIRST_BATCH_TIMEOUT_S
        while not self.trainer.ends and time.monotonic() < deadline_s:
            self._keep_going(time.monotonic())
            if any(x["event"] == "received" for x in read_lines(self.directory / EVENTS_FILE)):
                return
            time.sleep(TICK_S)

    def _kill_one(self, now_s: float) -> None:
        up = [member for member in self.members if member.is_up]
        if not up:
            return
        victim = self._chance.choice(up)
        victim.kill()
        victim.starts_at_s = now_s + self._chance.uniform(*DOWN_S)


def start_engine(name: str, options: Options) -> Process:
    """Start an engine with the command line; its output is appended to its log."""
    arguments = {"connect": options.address, "model": options.model, "engine": name}
    command: list[str | Path] = [
        Path(sys.executable).with_name("tidegate"),
        "engine",
        "--max-running-turns=16",
    ]
    command += [f"--{key}={value}" for key, value in arguments.items()]
    with (options.directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


# ------------------------------------------------------------------------- checks


def rows(chaos: Chaos, ended_well: bool) -> list[Row]:
    results = [
        Row("kills", sum(m.kills for m in chaos.members), "processes"),
        Row("kills_of_trainer_and_orchestrator", chaos.trainer.kills, "processes"),
        Row("engines_that_ended_by_themselves", early_ends(chaos), "processes"),
        Row("run_ended_well", float(ended_well), "", "1", ended_well),
    ]
    events = read_lines(chaos.directory / EVENTS_FILE)
    results.append(Row("first_batch_after_a_restart", recovery_s(events), "s, median"))
    path = chaos.directory / RESULT_FILE
    if not path.exists():
        return results
    result = json.loads(path.read_text())
    trained = [TrainedBatch(**batch) for batch in result["trained"]]
    received = sum(line["event"] == "received" for line in events)
    return [
        *results,
        Row("batches", len(trained), "batches"),
        Row(
            "batches_trained_again",
            received - len(trained),
            "batches, by processes that were killed",
        ),
        *check_tasks(trained),
        *check_ledger(trained, result),
        *check_staleness(trained),
        *check_reward(trained),
    ]


def early_ends(chaos: Chaos) -> int:
    return sum(max(0, len(engine.ends) - 1) for engine in chaos.engines)


def recovery_s(events: list[dict[str, Any]]) -> float:
    """Return the median time from a start of the trainer to its first batch, of starts that got so
    far."""
    waits, started_s = [], None
    for line in events:
        if line["event"] == "started":
            started_s = line["at_s"]
        elif line["event"] == "received" and started_s is not None:
            waits.append(line["at_s"] - started_s)
            started_s = None
    return median(waits) if waits else float("nan")


def check_tasks(trained: list[TrainedBatch]) -> list[Row]:
    """Check that each prompt was trained exactly once, without gaps in admission order."""
    times = Counter(number for batch in trained for number in batch.tasks)
    twice = sum(count > 1 for count in times.values())
    skipped = len(set(range(max(times, default=-1) + 1)) - times.keys())
    gaps = sum(batch.number != n for n, batch in enumerate(trained, start=1))
    return [
        Row("prompts_trained", len(times), "prompts", "> 0", bool(times)),
        Row("prompts_trained_twice", twice, "prompts", "0", twice == 0),
        Row("prompts_skipped", skipped, "prompts", "0", skipped == 0),
        Row("batches_misnumbered", gaps, "batches", "0", gaps == 0),
    ]


def check_ledger(trained: list[TrainedBatch], result: dict[str, Any]) -> list[Row]:
    """Check the ledger over all restarts, in itself and against the trainer's record."""
    ledger = result["ledger"]
    error = result["ledger_error"]
    difference = ledger["trained"] - sum(batch.sampled_tokens for batch in trained)
    discarded = sum(ledger["discarded"].values())
    return [
        Row("tokens_generated", ledger["generated"], "tokens"),
        Row("tokens_discarded_share", discarded / max(1, ledger["generated"]), "of generated"),
        Row("ledger_error", error, "tokens", "0", error == 0),
        Row("ledger_trained_minus_trainers_own", difference, "tokens", "0", difference == 0),
    ]


def check_staleness(trained: list[TrainedBatch]) -> list[Row]:
    staleness = [b.trainer_version - v for b in trained for v in b.oldest_versions]
    oldest = max(staleness, default=0)
    backwards = sum(a.trainer_version >= b.trainer_version for a, b in pairwise(trained))
    return [
        Row("staleness_mean", fmean(staleness or [0]), "versions"),
        Row("staleness_max", oldest, "versions", f"<= {MAX_STALENESS}", oldest <= MAX_STALENESS),
        Row("versions_not_rising", backwards, "batches", "0", backwards == 0),
    ]


def check_reward(trained: list[TrainedBatch]) -> list[Row]:
    rewards = [batch.reward for batch in trained]
    count = max(1, round(REWARD_SHARE * len(rewards)))
    first, last = fmean(rewards[:count] or [0]), fmean(rewards[-count:] or [0])
    return [
        Row("reward_first_quarter", first, "mean"),
        Row("reward_last_quarter", last, "mean", "> first", last > first),
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, skipping a line that a kill has truncated."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run's processes, and check its promises.")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0, help="who is killed when")
    parser.add_argument("--model", type=Path, default=Path("runs/model-0"), help="made if missing")
    parser.add_argument("--keep", type=Path, help="leave logs, journal and checkpoint here")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    make_model(options.model)
    with tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as directory:
        chaos = Chaos(Path(directory), options.model.resolve(), options.seed)
        try:
            chaos.run(options.seconds)
            table = rows(chaos, chaos.finish())
        finally:
            chaos.kill_all()
            if options.keep:
                shutil.copytree(directory, options.keep, dirs_exist_ok=True, ignore=sockets)
    if chaos.trainer.ends != [0]:
        sys.stderr.write(f"trainer ended with {chaos.trainer.ends}; --keep keeps its log\n")
    return show(table, as_json=options.json)


def sockets(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


if __name__ == "__main__":
    sys.exit(main())
