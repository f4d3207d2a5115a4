"""What does a trainer ask of its run's loop? Each wish as work that is done there.

It checks what can be checked before, and neither waits nor decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.faces import Work
from tidegate.orchestrator.feed.tasks import Tasks
from tidegate.orchestrator.journal.resuming import resume_token
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.policies.staleness import OffPolicyness
from tidegate.transport.messages import PauseMode


def offer_work(tasks: Tasks, episode: EpisodeFunction) -> Work[None]:
    """Take tasks from here from now on."""

    async def work(scheduler: Scheduler) -> None:
        scheduler.offer(tasks, episode)

    return work


def observe_work(ess: float | None, kl: float | None) -> Work[None]:
    """Tell the policy how far off-policy the last batch was."""
    measured = OffPolicyness(effective_sample_size=ess, mismatch_kl=kl)

    async def work(scheduler: Scheduler) -> None:
        scheduler.handle(
            [ev.OffPolicynessMeasured(measured.effective_sample_size, measured.mismatch_kl)]
        )

    return work


async def next_batch(scheduler: Scheduler) -> ev.HandOver | None:
    """The next batch, or None once the tasks are used up."""
    return await scheduler.next_batch()


def pause_work(mode: PauseMode | None, *, clear_cache: bool = False) -> Work[None]:
    """Have engines stop by this mode; None: go on."""
    if mode is not None and mode not in get_args(PauseMode):
        raise ConfigError(f"a pause's mode is 'abort', 'keep' or 'wait', got {mode!r}")

    async def work(scheduler: Scheduler) -> None:
        await scheduler.control.pause(mode, clear_cache=clear_cache)

    return work


def ack_work(state: Mapping[str, Any]) -> Work[None]:
    """This state is on disk."""
    token = resume_token(state)

    async def work(scheduler: Scheduler) -> None:
        await scheduler.make_safe(token.batches, token.offer)

    return work


def evaluate_work(tasks: Sequence[Any], episode: EpisodeFunction) -> Work[list[float | None]]:
    """One episode per task, outside training; the rewards, in their order."""

    async def work(scheduler: Scheduler) -> list[float | None]:
        rollouts: list[Rollout] = await scheduler.evaluate(list(tasks), episode)
        return [rollout.reward for rollout in rollouts]

    return work
