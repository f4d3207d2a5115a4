"""Breakdown of an engine step's CPU time, and the stall that a weight update causes.

``python -m benchmarks.engine.steps MODEL REQUESTS`` prints one JSON object, from rounds of equally
long answers: in every other round weights are published, staged and swapped. It observes a
:mod:`benchmarks.engine.watched_worker` from each step's start to the next one's, only in steps in
which every turn decodes. Values are medians.

    overhead_share: share of the stepping thread's CPU time outside of kernels, that is planning,
        dispatch, columns and messages. Kernels are compiled functions (less the cost of an empty
        call) and torch's products; they are timed in every other step, the total in the others
    update_stall_steps: by how many usual steps the longest step of a round with an update exceeds
        one, without the time that its runnable thread waited for a core: so neither other processes
        count, nor a copy that takes their turn
    without_update_stall_steps: the same for the rounds without an update

``--patches`` publishes patches of 1.3 % of the elements (``weight_deltas="elements"``) in place of
whole sets. A step of Adam at a learning rate of 1e-6 changes as many.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.engine.ours import FULL_TOKENS, Driver, driven, parse
from benchmarks.engine.shapes import Request
from benchmarks.engine.watched_worker import Mark
from benchmarks.table import Figures
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.orchestrator.weight_sync.deltas import WrittenElements
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import (
    BaseVersions,
    FinishWeightUpdate,
    Shutdown,
    StartWeightUpdate,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.weight_channels import NamedBuffer, sender

ROUNDS_MAX = 24
"""Maximum number of rounds; half of them have an update."""

ROUNDS_MIN = 6

ENOUGH_S = 120.0
"""After this time no further round starts, once there are ``ROUNDS_MIN``."""

PATCHED_SHARE = 0.013
"""Share of the elements that ``--patches`` changes in each update."""

WATCHED = "benchmarks.engine.watched_worker"


class Round(NamedTuple):
    """A round of equally long answers to all requests; times of the monotonic clock, in ns."""

    began: int
    ended: int
    is_updated: bool


class Step(NamedTuple):
    """Time from one step's start to the next one's, in ns."""

    served: int
    """Wall time without the time that the thread was runnable and waited for a core."""
    cpu: int
    """CPU time of the stepping thread."""
    kernels: int | None
    """Part of ``cpu`` spent in kernels; None in steps whose kernels were not timed."""


class Updates:
    """Sets of weights to publish, one after another: all tensors, or patches of them."""

    def __init__(self, model: Path, *, has_patches: bool) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in read_tensors(model)}
        self._written = WrittenElements() if has_patches else None
        self._chance = torch.Generator().manual_seed(0)
        self._version: int | None = None

    def make(self, version: int) -> tuple[Sequence[NamedBuffer], int | None]:
        """Return the tensors of a version, and the version that they patch; None for whole sets."""
        before, self._version = self._version, version
        if self._written is None:
            return named_buffers(self._tensors), None
        for tensor in self._tensors.values():
            bits = tensor.view(-1).view(torch.int16)
            count = max(1, round(PATCHED_SHARE * len(bits)))
            bits[torch.randint(len(bits), (count,), generator=self._chance)] ^= 1
        whole = named_buffers(self._tensors)
        patches = self._written.changed(version, whole, before=-1 if before is None else before)
        return (whole, None) if patches is None else (patches, before)


def measure(
    model: Path, requests: Sequence[Request], device: str, *, has_patches: bool = False
) -> Figures:
    """Start a worker, run the rounds, and evaluate its marks."""
    with tempfile.TemporaryDirectory() as directory:
        noted = Path(directory) / "marks.json"
        with driven(model, len(requests), device, str(noted), program=WATCHED) as driver:
            rounds = _rounds(driver, requests, Updates(model, has_patches=has_patches))
            driver.send(Shutdown())
            driver.exit_status()
        marks = [Mark(*mark) for mark in json.loads(noted.read_text())]
    return reported([(one, full_steps(marks, one, len(requests))) for one in rounds])


def _rounds(driver: Driver, requests: Sequence[Request], updates: Updates) -> list[Round]:
    """Run the rounds after one to warm up; every other one has an update."""
    for version in (1, 2):  # patches follow a whole set, and bring two buffers up to date
        _publish(driver, version, *updates.make(version))
    rounds: list[Round] = []
    enough_at_s = time.monotonic() + ENOUGH_S
    for number in range(ROUNDS_MAX + 1):
        if number > ROUNDS_MIN and number % 2 and time.monotonic() > enough_at_s:
            break
        is_updated = number > 0 and number % 2 == 0
        update = updates.make(2 + number) if is_updated else None
        began_ns = time.monotonic_ns()
        driver.ask([Request(one.prompt, FULL_TOKENS) for one in requests], seed=1000 * number)
        if update is not None:
            _publish(driver, 2 + number, *update)
        is_in_time = driver.open_turns > 0  # otherwise the update came after the answers
        driver.read_answers()
        if number > 0 and is_in_time:
            rounds.append(Round(began_ns, time.monotonic_ns(), is_updated))
    return rounds


def _publish(
    driver: Driver, version: int, tensors: Sequence[NamedBuffer], base_version: int | None
) -> None:
    """Run all phases of a weight update through shared memory, and wait until it is live.

    ``base_version``: the live version that the tensors' patches apply to; None for whole sets.
    """
    bases = None if base_version is None else BaseVersions(base_version, base_version)
    with closing(sender("shm", None)) as channel:
        driver.send(channel.init())
        driver.send(StartWeightUpdate(version=version))
        for update in channel.write(version, tensors):
            driver.send(msgspec.structs.replace(update, base_versions=bases))
        driver.await_one(WeightsStaged)
        driver.send(FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="keep"))
        driver.await_one(WeightsLive)


def full_steps(marks: Sequence[Mark], one: Round, turns: int) -> list[Step]:
    """Return the steps of a round in which every turn decodes, and so does the next step."""
    return [
        Step(
            after.at - mark.at - (after.unserved - mark.unserved),
            after.cpu - mark.cpu,
            after.kernels - mark.kernels if mark.is_timed else None,
        )
        for mark, after in pairwise(marks)
        if mark.rows == mark.tokens == after.rows == after.tokens == turns
        and one.began <= mark.at
        and after.at <= one.ended
    ]


def reported(rounds: Sequence[tuple[Round, Sequence[Step]]]) -> Figures:
    """Compute the figures that the module's docstring describes."""
    still = [steps for one, steps in rounds if steps and not one.is_updated]
    updated = [steps for one, steps in rounds if steps and one.is_updated]
    kernels = [step.kernels for steps in still for step in steps if step.kernels is not None]
    untimed = [step.cpu for steps in still for step in steps if step.kernels is None]
    return {
        "overhead_share": 1 - statistics.median(kernels) / statistics.median(untimed),
        "update_stall_steps": _stall(updated),
        "without_update_stall_steps": _stall(still),
        "updates": float(len(updated)),
    }


def _stall(rounds: Sequence[Sequence[Step]]) -> float:
    """Return by how many usual steps the longest step of a round exceeds one, as a median."""
    if not rounds:
        return float("nan")  # no update completed before the answers ended
    served_ns = [[step.served for step in steps] for steps in rounds]
    return statistics.median(max(steps) / statistics.median(steps) - 1 for steps in served_ns)


if __name__ == "__main__":
    options = parse(__doc__, "--patches")
    arguments = (options.model, options.requests, options.device)
    print(json.dumps(measure(*arguments, has_patches=options.patches)))
