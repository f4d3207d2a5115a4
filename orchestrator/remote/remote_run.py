"""What do the async and the sync face of a remote run have in common? All but the waiting.

It says what to ask for and what an answer means; it waits for none, but where a thread may.
"""

import concurrent.futures
import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec

from tidegate.errors import BadFrame, ConfigError, ResumeMismatch, RunLost, TidegateError
from tidegate.orchestrator.feed.left_out_rows import left_out_rows
from tidegate.orchestrator.feed.tasks import NO_MORE
from tidegate.orchestrator.fleet.scores import Asked, Readout, Score, TokenScores
from tidegate.orchestrator.remote.columns import from_frames
from tidegate.orchestrator.remote.link import Answered, MayRetry, TrainerLink
from tidegate.orchestrator.remote.weights_out import WeightsOut
from tidegate.orchestrator.statistics import RunStatistics
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.transport import trainer_messages as wire
from tidegate.transport.security import EngineKeys, read_engine_keys

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.feed.batches import Batch

RETRY_INTERVAL_S = 0.5
"""Between two tries to take a seat that is held."""

JOIN_INTERVAL_S = 5.0
"""Between two that nobody answers."""

Pending = concurrent.futures.Future[Answered]


class RemoteState(msgspec.Struct, frozen=True):
    """What a trainer's checkpoint holds of a remote run."""

    run_id: str
    batches: int
    """The last that the checkpoint's weights were made from."""
    journal: dict[str, Any] | None = None
    """For ``serve(resume=…)``, where the run itself must be started again."""


class RemoteRun:
    """A run in another process, as one rank of a trainer sees it."""

    def __init__(
        self,
        address: str,
        *,
        keys: str | Path | EngineKeys | None,
        rank: int,
        world_size: int,
        resume: Mapping[str, Any] | None,
        connect_timeout_s: float,
        run_timeout_s: float,
    ) -> None:
        self.address = address
        self.rank = rank
        self.world_size = world_size
        self._keys = read_engine_keys(Path(keys)) if isinstance(keys, str | Path) else keys
        self._resume = None if resume is None else _state(resume)
        self._connect_timeout_s = connect_timeout_s
        self._run_timeout_s = run_timeout_s
        self._link_or_none: TrainerLink | None = None
        self._weights = WeightsOut()
        self._welcome: wire.Welcome | None = None
        self._number = 0
        """The batch received last."""
        self._ordinal = 0
        """Weights published since."""
        self._version = 0
        self._journal: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        """The newest weight version that this trainer knows of."""
        return self._version

    @property
    def is_resumed(self) -> bool:
        """Whether to publish the checkpoint's weights first: ``resume`` was given, or the run
        itself goes on with an earlier one."""
        welcome = self._welcomed
        return self._resume is not None or welcome.is_resumed

    def state_dict(self) -> dict[str, Any]:
        """How far this trainer has come, for its checkpoint; ``connect(resume=…)`` takes it.

        Take it when the batch last received is trained. Its ``journal`` is what ``serve(resume=…)``
        takes, should the run itself have to be started again.
        """
        state = RemoteState(self._welcomed.run_id, self._number, self._journal)
        return msgspec.structs.asdict(state)

    # ------------------------------------------------------------ for the two faces

    @property
    def _link(self) -> TrainerLink:
        if self._link_or_none is None:
            raise RuntimeError("not connected; use it in a `with` statement")
        return self._link_or_none

    @property
    def _welcomed(self) -> wire.Welcome:
        if self._welcome is None:
            raise RuntimeError("not connected; use it in a `with` statement")
        return self._welcome

    def _open(self) -> None:
        """Take the rank's seat, waiting for the run and for a dead process before. Blocks.

        Raises:
            RunLost: there is no run, or the seat did not get free.
            ConfigError, ResumeMismatch: it can't be had.
        """
        if self._link_or_none is not None:
            raise RuntimeError("a connection is used once; call connect() again for another")
        if not 0 <= self.rank < self.world_size:  # no run would have it, nor need be asked
            raise ConfigError(
                f"rank={self.rank} of world_size={self.world_size}: ranks count from 0"
            )
        link = TrainerLink(self.address, self._keys, run_timeout_s=self._run_timeout_s)
        self._link_or_none = link
        join = wire.Join(
            protocol=wire.PROTOCOL,
            rank=self.rank,
            world_size=self.world_size,
            run_id="" if self._resume is None else self._resume.run_id,
            batches=None if self._resume is None else self._resume.batches,
            shared_memory=self._weights.init,
        )
        until_s, why = time.monotonic() + self._connect_timeout_s, "nobody answered"
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                answered = link.ask(join).result(min(left_s, JOIN_INTERVAL_S))
            except MayRetry as refusal:
                why = str(refusal)
                time.sleep(min(RETRY_INTERVAL_S, left_s))
                continue
            except TimeoutError:
                continue  # a run that was started anew in between knows of nothing
            link.is_seated = True
            self._take_welcome(answered.answer)
            return
        raise RunLost(
            f"no place at the run at {self.address} within {self._connect_timeout_s:.0f} s: {why}"
        )

    def _take_welcome(self, answer: wire.AnyAnswer) -> None:
        assert isinstance(answer, wire.Welcome)
        self._welcome = answer
        self._number, self._version = answer.batches, answer.version
        self._journal = answer.journal
        self._weights.reads_shared_memory = answer.reads_shared_memory

    def _close(self, *, is_done: bool) -> None:
        if self._link_or_none is not None:
            self._link_or_none.close(is_done=is_done)
        self._weights.close()

    def _batch(self, answered: Answered) -> "Batch | None":
        from tidegate.orchestrator.remote.batch_wire import batch_from_wire  # torch

        if isinstance(answered.answer, wire.NoBatch):
            return None
        assert isinstance(answered.answer, wire.BatchIs)
        batch = batch_from_wire(answered.answer, answered.frames)
        self._number, self._ordinal = batch.number, 0
        self._version = max(self._version, batch.trainer_version)
        self._journal = answered.answer.journal
        return batch

    def _next_batch(self) -> wire.NextBatch:
        return wire.NextBatch(after=self._number)

    def _publish(
        self,
        state_dict: "Mapping[str, torch.Tensor] | None",
        *,
        wait: PublishWait = "live",
        partial: bool = False,
        is_rollback: bool = False,
        first_bad: int | None = None,
    ) -> Pending:
        """Bring the weights to the run, which blocks, and ask for their publish."""
        publish = wire.Publish(
            number=self._number,
            ordinal=self._ordinal,
            wait=wait,
            partial=partial,
            is_rollback=is_rollback,
            first_bad=first_bad,
        )
        if self.rank == 0:
            if state_dict is None:
                raise ConfigError("rank 0 publishes the weights of all ranks; give a state_dict")
            publish = self._weights.send(self._link, state_dict, publish)
        return self._link.ask(publish)

    def _published(self, answered: Answered) -> int:
        assert isinstance(answered.answer, wire.Published)
        self._ordinal += 1
        self._version = max(self._version, answered.answer.version)
        return answered.answer.version

    def _feed(self, tasks: Iterable[Any], episode: str | None) -> "TaskFeeder":
        return TaskFeeder(self._link, tasks, episode)

    def _control(self, wish: Any, **values: Any) -> Pending:
        return self._link.ask(wire.Control(wish=wish, values=values))

    def _ack(self, state: Mapping[str, Any]) -> Pending:
        told = _state(state)
        return self._control("ack", batches=told.batches, journal=told.journal)

    def _discard(self, batch: "Batch | int", rows: Sequence[SupportsIndex], reason: str) -> Pending:
        told = left_out_rows(batch, rows, reason)
        return self._control("discard", batch=told.batch, rows=told.rows, reason=told.reason)

    def _evaluate(self, tasks: Sequence[Any], episode: str | None) -> Pending:
        return self._link.ask(wire.Evaluate(tasks=list(tasks), episode=episode or ""))

    def _score(self, asked: Sequence[Asked]) -> Pending:
        return self._link.ask(wire.Score(asked=[list(astuple(one)) for one in asked]))


class TaskFeeder:
    """Brings a trainer's own tasks to the run, on a thread, as there is room for them."""

    def __init__(self, link: TrainerLink, tasks: Iterable[Any], episode: str | None) -> None:
        self._link = link
        self._tasks = iter(tasks)
        self._offer = uuid.uuid4().hex
        self.offered = link.ask(wire.OfferTasks(offer=self._offer, episode=episode or ""))
        """Done once the run takes them."""
        self.failure: BaseException | None = None
        """What the iterator raised, or that a task can't be sent."""

    def start(self) -> None:
        """Begin; the thread ends with the tasks, the connection, or the next such feeder."""
        threading.Thread(target=self._run, name="tidegate tasks", daemon=True).start()

    def raise_failure(self) -> None:
        """Tell the trainer what its tasks failed of."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        is_end = False
        try:
            while not is_end:
                # One by one: what the iterator waits for may be what the last task leads to.
                task = next(self._tasks, NO_MORE)
                is_end = task is NO_MORE
                is_wanted = self._give([] if is_end else [task], is_end=is_end)
                is_end = is_end or not is_wanted
        except (TidegateError, concurrent.futures.CancelledError) as error:
            if isinstance(error, BadFrame):
                self._end_with(error)
        except Exception as error:  # noqa: BLE001 - the user's iterator's: raised to the user
            self._end_with(error)

    def _give(self, tasks: list[Any], *, is_end: bool) -> bool:
        ask = wire.GiveTasks(offer=self._offer, tasks=tasks, is_end=is_end)
        answer = self._link.ask(ask).result().answer
        return isinstance(answer, wire.Done) and bool(answer.value)

    def _end_with(self, error: Exception) -> None:
        """No more tasks: what has begun is trained, then the trainer is told why."""
        self.failure = error
        with contextlib.suppress(TidegateError):  # the run is gone, too
            self._give([], is_end=True)


def _state(state: Mapping[str, Any]) -> RemoteState:
    try:
        return msgspec.convert(dict(state), RemoteState)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ResumeMismatch(
            f"resume must be what a remote run's state_dict() returned, got {state!r:.200}: {error}"
        ) from None


# ---------------------------------------------------------------- what answers mean


def value_of(answered: Answered) -> Any:
    """What a smaller wish gave."""
    assert isinstance(answered.answer, wire.Done)
    return answered.answer.value


def statistics_of(answered: Answered) -> RunStatistics:
    """A snapshot of the run."""
    return msgspec.convert(value_of(answered), RunStatistics, strict=False)


def rewards_of(answered: Answered) -> list[float | None]:
    """Of an evaluation."""
    assert isinstance(answered.answer, wire.Evaluated)
    return answered.answer.rewards


def scores_of(answered: Answered) -> list[Score]:
    """Of sequences."""
    message = answered.answer
    assert isinstance(message, wire.Scores)
    arrays = iter(from_frames(message.columns, answered.frames))
    names = iter(message.columns)
    scores: list[Score] = []
    for version, engine, number in message.about:
        column = next(names)
        values: Any = next(arrays)
        if column.name == "values":
            shaped = values.reshape(number, -1) if number else values
            scores.append(Readout(version, engine, shaped))
            continue
        next(names), next(names)
        ids: Any = next(arrays)
        tops: Any = next(arrays)
        shape = (len(values), ids.size // max(1, len(values)))
        scores.append(
            TokenScores(version, engine, number, values, ids.reshape(shape), tops.reshape(shape))
        )
    return scores
