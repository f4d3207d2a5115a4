"""Base classes of a run's client handles, async and sync, local and remote.

:class:`RunHandle` is written once, against :class:`RunRequests`: a run in this process answers them
on its event loop (``batch_handle.py``), a run in another process over ZeroMQ
(``remote/rollouts.py``). :class:`TrainerHandle` is what all trainers' handles have in common, those
of adapters included.

A sync handle holds the async one as ``_handle``. Each of its methods is a line that names the async
method: :func:`blocking` runs a coroutine to its end, :func:`forwarded` calls what does not wait.
"""

import asyncio
import concurrent.futures
import functools
import math
import operator
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

from tidegate.errors import ConfigError, TidegateError
from tidegate.orchestrator.episodes.tracebacks import at_the_call
from tidegate.orchestrator.fleet.scores import (
    Pooling,
    Readout,
    Score,
    ScoreQuery,
    TokenScores,
    embedding_queries,
    logprob_queries,
    reward_queries,
)
from tidegate.orchestrator.telemetry.html_tables import html_table, line
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel
from tidegate.transport.trainer_messages import ControlAction

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

BatchesOfPublish: TypeAlias = "Iterable[Batch | int] | None"
"""Batches that weights were made from, or their numbers; None: those that the trainer holds."""

HELD_OUT = "held_out"
"""Name of an evaluation, unless given; reports and comparisons show it."""

Result = TypeVar("Result")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """Rewards of one episode per task, outside training."""

    rewards: list[float | None]
    """Reward of each task, in the order of the tasks; None where the episode failed."""

    @property
    def mean_reward(self) -> float:
        """Mean over all tasks; failed episodes count as 0."""
        return sum(reward or 0.0 for reward in self.rewards) / max(1, len(self.rewards))

    @property
    def failures(self) -> int:
        """Number of episodes that raised or timed out."""
        return sum(reward is None for reward in self.rewards)

    def __repr__(self) -> str:
        return line("Evaluation", self._figures())

    def _repr_html_(self) -> str:
        return html_table("Evaluation", self._figures())

    def _figures(self) -> dict[str, object]:
        return {
            "mean reward": f"{self.mean_reward:.3f}",
            "tasks": len(self.rewards),
            "failures": self.failures,
        }


class RunRequests(ABC):
    """Requests that a local or remote run answers. Arguments were checked by the handle."""

    @abstractmethod
    async def score(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Have engines score sequences."""

    @abstractmethod
    async def control(self, action: ControlAction, **arguments: Any) -> Any:
        """Do what the method of :class:`RunHandle` with this name does; return its result."""


class RunHandle(ABC):
    """Async handle of a run: scores, pauses and sleep. Use it in ``async with``.

    Subclasses add batches and weights.
    """

    @abstractmethod
    async def _enter(self) -> None:
        """Start the run, or connect to it; return once it is ready."""

    @abstractmethod
    def _exit(self, error: BaseException | None) -> None:
        """End the run, or leave it. ``error`` is what the caller's block or ``_enter`` raised."""

    async def __aenter__(self) -> Self:
        try:
            await self._enter()
        except BaseException as error:
            self._exit(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit(error)

    @property
    @abstractmethod
    def _requests(self) -> RunRequests:
        """The run's request interface.

        Raises:
            RuntimeError: the run has not been entered.
        """

    async def score_queries(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Return the scores of prepared queries, of any kind, in their order."""
        return await self._requests.score(queries)

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> list[TokenScores]:
        """Return the engines' log-probabilities of each sequence's tokens, from ``start`` on.

        A sequence is a list, array or tensor of token ids, without padding; ``start`` is one
        position for all sequences or one for each, at least 1. Log-probs are raw: before every
        sampling option but ``temperature``. All log-probs of a sequence are of one weight version,
        which its result names; sequences scored during a swap may have different versions. Paused
        engines answer once they resume. Scored tokens are not trained on, and are neither in the
        ledger nor in the journal.

        Raises:
            ScoreRefused: no engine can ever answer, e.g. because a sequence is too long.
            EngineLost: no engine is left, or several were lost with the same sequence.
        """
        queries = logprob_queries(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", await self.score_queries(queries))

    async def embed(
        self,
        sequences: Sequence[Any],
        *,
        pooling: Pooling = "last",
        start: int | Sequence[int] = 0,
    ) -> list[Readout]:
        """Return each sequence's normed last hidden state: of its last token, the mean, or all.

        ``start`` is the first position that ``mean`` and ``none`` (all positions) take. Otherwise
        as :meth:`score`.
        """
        queries = embedding_queries(sequences, pooling, start)
        return cast("list[Readout]", await self.score_queries(queries))

    async def reward(self, sequences: Sequence[Any]) -> list[Readout]:
        """Return a classification head's outputs for each sequence; otherwise as :meth:`score`."""
        return cast("list[Readout]", await self.score_queries(reward_queries(sequences)))

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> None:
        """Pause all engines, also those that join later; return once no engine runs a turn.

        ``abort`` ends running turns now; they keep their tokens, and continue from there after the
        pause. ``keep`` freezes running turns, KV intact; ``wait`` lets them finish. A later call's
        mode replaces an earlier one's. Weights can be published during a pause, and episodes'
        timeouts are suspended.

        ``clear_cache`` has engines drop the contexts that they keep for later turns. A publish does
        not need it: KV that old weights computed is never shared with turns of new weights.
        """
        await self._requests.control("pause", mode=checked_mode(mode), clear_cache=clear_cache)

    async def resume(self) -> None:
        """Resume all engines; return once they decode. Harmless if they were not paused."""
        await self._requests.control("resume")

    async def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        mode: PauseMode = "abort",
    ) -> int:
        """Have all engines release memory to the system; return how many bytes they released.

        Engines are paused by ``mode`` first, also those that join later. KV is dropped: turns
        frozen by ``keep`` are computed again. ``level`` 1 writes the weights to a file; level 2
        discards them, and the next publish, or at the latest ``wake()``, sends them again. A
        publish reaches sleeping engines too, and wakes only their weights.

        Raises:
            ConfigError: an engine can't sleep, or an argument is wrong.
            SleepFailed: an engine failed to sleep, for the reason in the message. The others sleep.
        """
        if level not in get_args(SleepLevel):
            raise ConfigError(f"level must be 1 (offload weights) or 2 (discard them), got {level}")
        checked_mode(mode)
        tags = _checked_tags(tags)
        return int(await self._requests.control("sleep", level=level, tags=tags, mode=mode))

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Have all engines allocate the memory of ``tags`` again, by default of all tags.

        Engines that have all their memory again resume, unless they were paused before the sleep.
        Wake ``["weights"]`` first to publish before KV memory is allocated.

        Raises:
            ConfigError: there is no such tag.
            SleepFailed: an engine finds no memory, or has no weights and receives none. All stay
                paused; wake again.
        """
        await self._requests.control("wake", tags=None if tags is None else _checked_tags(tags))

    async def drain(self, engine: str, *, within_s: float = 30.0) -> int:
        """Have an engine leave the run; return the number of its turns that were moved.

        The engine gets no new turns. Its turns have ``within_s`` seconds to end; the others then
        continue on other engines with all their tokens. Then the engine's process ends, with status
        0, and is not started again. The time ends early when weights are released that the engine
        does not have, or when engines pause or sleep, because nothing waits for a draining engine.

        Without another engine, turns wait until one joins. A second call for the same engine waits
        for the same end; the earlier deadline counts. If the call is cancelled, the engine leaves
        all the same.

        Raises:
            ConfigError: there is no such engine, or ``within_s`` is no time.
        """
        if not 0 <= within_s < math.inf:
            raise ConfigError(f"within_s must be at least 0 seconds and finite, got {within_s}")
        return int(await self._requests.control("drain", engine=engine, within_s=within_s))

    async def retire(self, engine: str) -> int:
        """Have an engine leave the run now: :meth:`drain` without time for its turns to end."""
        return await self.drain(engine, within_s=0.0)

    async def scale(self, *, engines: int, within_s: float = 0.0) -> None:
        """Start engines, or have some leave, until the run has ``engines`` of its own.

        Return once new engines have joined; they get the newest weights first, then turns. The
        engines with the highest numbers leave, as by :meth:`drain`. Engines that others have
        started, and workers of ``engine_urls``, are not counted.

        Raises:
            ConfigError: ``engines`` is negative, or this run starts no engines.
            EngineStartFailed: a new engine ended, or did not join within
                ``engine_start_timeout_s``.
        """
        if engines < 0 or not 0 <= within_s < math.inf:
            raise ConfigError(
                f"engines and within_s must be at least 0, got engines={engines}, "
                f"within_s={within_s}"
            )
        await self._requests.control("scale", engines=engines, within_s=within_s)


class TrainerHandle(ABC):
    """Async handle of a trainer, of a run's weights or of an adapter: its position in the run."""

    def __init__(self) -> None:
        self._version = 0
        self._received = 0
        """Number of the batch received last."""
        self._is_ahead = False
        """Whether that batch was requested ahead."""
        self._named = 0
        """Highest number of a batch that a publish has named."""

    @property
    def version(self) -> int:
        """Newest version that the trainer has published or received; 0 is the model directory's."""
        return self._version

    @property
    @abstractmethod
    def is_resumed(self) -> bool:
        """Whether the trainer must publish its checkpoint's weights first."""

    @abstractmethod
    def state_dict(self, *, trained: "Batch | int | None" = None) -> dict[str, Any]:
        """Return the trainer's position in the run, to be saved in its checkpoint."""

    def _batches_of_checkpoint(self, trained: "Batch | int | None") -> int:
        """Return how many batches a checkpoint contains: up to ``trained``, or all received.

        Raises:
            ConfigError: ``trained`` was not received; or it is left out, and the batch received
                last was asked for ahead and is not named by a publish, so it may be untrained.
        """
        if trained is None:
            if self._is_ahead and self._received > self._named:
                raise ConfigError(
                    f"batch {self._received}, received last, was asked for ahead, and state_dict() "
                    f"can't know whether the checkpoint contains it; pass the batch that you "
                    f"trained last: state_dict(trained=batch)"
                )
            return self._received
        number = trained if isinstance(trained, int) else trained.number
        if not 0 <= number <= self._received:
            raise ConfigError(
                f"state_dict(trained={number}) names a batch that was not received; the newest is "
                f"{self._received}"
            )
        return number


def numbers_of(
    batches: "Iterable[Batch | int] | None", default: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return the numbers of batches that a publish names; ``default`` if it names none.

    Raises:
        ConfigError: they are no batches or numbers.
    """
    if batches is None:
        return default
    numbers: list[int] = []
    try:
        for each in batches:
            number: Any = getattr(each, "number", each)
            numbers.append(operator.index(number))
    except TypeError:
        raise ConfigError(
            f"batches must be a list of batches or of their numbers, got {batches!r:.200}; for one "
            f"batch write batches=[batch]"
        ) from None
    return tuple(dict.fromkeys(numbers))


def checked_mode(mode: PauseMode) -> PauseMode:
    """Return a pause mode; raise ConfigError if there is none of this name."""
    if mode not in get_args(PauseMode):
        raise ConfigError(f"mode must be 'abort', 'keep' or 'wait', got {mode!r}")
    return mode


def _checked_tags(tags: Sequence[MemoryTag]) -> Sequence[MemoryTag]:
    if isinstance(tags, str) or not tags or not set(tags) <= set(MEMORY_TAGS):
        raise ConfigError(f"tags must be a list with some of {list(MEMORY_TAGS)}, got {tags!r}")
    return list(tags)


# ---------------------------------------------------------------- waiting, with and without a loop


class _Driver(threading.local):
    """Thread-local flag of what runs this thread's coroutine."""

    is_blocking = False
    """Whether :func:`run_blocking` runs the coroutine; otherwise an event loop does."""


_DRIVER = _Driver()


@types.coroutine
def result_of(future: "concurrent.futures.Future[Result]") -> Generator[Any, Any, Result]:
    """Wait for a future of another thread, whether the caller has an event loop or blocks.

    Handles' coroutines await nothing else, so :func:`run_blocking` needs no event loop.
    """
    if _DRIVER.is_blocking:
        return cast(Result, (yield future))
    return (yield from asyncio.wrap_future(future).__await__())


_POOL = concurrent.futures.ThreadPoolExecutor(max_workers=4, thread_name_prefix="tidegate handle")
"""Threads for work that blocks, such as uploading weights: few, because a process has one run."""


async def in_thread(function: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Result:
    """Call a function that blocks, without blocking the caller's event loop if it has one."""
    if _DRIVER.is_blocking:
        return function(*args, **kwargs)
    return await result_of(_POOL.submit(function, *args, **kwargs))


def run_blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a handle's coroutine to its end on this thread, and return what it returns.

    Blocks in each future that the coroutine waits for. Ctrl-C is raised inside the coroutine, which
    cleans up as it does when it is cancelled. Tracebacks of Tidegate's errors end here, because the
    lines below are none of the caller's.
    """
    value: Any = None
    error: BaseException | None = None
    try:
        while True:
            _DRIVER.is_blocking = True
            try:
                future = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as end:
                return cast(Result, end.value)
            finally:
                _DRIVER.is_blocking = False
            value, error = None, None
            try:
                value = future.result()
            except BaseException as raised:  # noqa: BLE001 - raised where the coroutine waits
                error = raised
    except TidegateError as refused:
        raise at_the_call(refused)  # noqa: B904 - the same error, which keeps its cause
    finally:
        coroutine.close()


HandleT = TypeVar("HandleT", bound=RunHandle)
Owner = TypeVar("Owner")


def blocking(
    method: Callable[Concatenate[Owner, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, P], Result]:
    """Return a sync handle's method that runs the async handle's, of this name, to its end."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> Result:
        coroutine: Coroutine[Any, Any, Result] = getattr(self._handle, method.__name__)(
            *args, **kwargs
        )
        return run_blocking(coroutine)

    return cast("Callable[Concatenate[Any, P], Result]", call)


def forwarded(
    method: Callable[Concatenate[Owner, P], Result],
) -> Callable[Concatenate[Any, P], Result]:
    """Return a sync handle's method that calls the async handle's, of this name."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> Result:
        return cast(Result, getattr(self._handle, method.__name__)(*args, **kwargs))

    return cast("Callable[Concatenate[Any, P], Result]", call)


class SyncHandle(Generic[HandleT]):
    """Sync handle of a run: each call returns once the work is done. Use it in ``with``."""

    def __init__(self, handle: HandleT) -> None:
        self._handle = handle

    def __enter__(self) -> Self:
        run_blocking(self._handle.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle._exit(error)

    score_queries = forwarded(RunHandle.score_queries)  # a coroutine, for code on any event loop
    score = blocking(RunHandle.score)
    embed = blocking(RunHandle.embed)
    reward = blocking(RunHandle.reward)
    pause = blocking(RunHandle.pause)
    resume = blocking(RunHandle.resume)
    sleep = blocking(RunHandle.sleep)
    wake = blocking(RunHandle.wake)
    drain = blocking(RunHandle.drain)
    retire = blocking(RunHandle.retire)
    scale = blocking(RunHandle.scale)


class SyncTrainerHandle:
    """Sync variant of :class:`TrainerHandle`."""

    _handle: TrainerHandle

    @property
    def version(self) -> int:
        """Newest version that the trainer has published or received; 0 is the model directory's."""
        return self._handle.version

    @property
    def is_resumed(self) -> bool:
        """Whether the trainer must publish its checkpoint's weights first."""
        return self._handle.is_resumed

    state_dict = forwarded(TrainerHandle.state_dict)
