"""How are weights published? Waits, with a limit, for what the coordinator wants of every engine.

It waits and times out; which message an engine gets next is the coordinator's to decide. A newer
version takes the place of one that isn't staged everywhere yet: no engine swaps to that any more,
and who waits for it has what it waits for when the newer one is there.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tidegate.errors import EngineLagging, PublishDropped, TidegateError, WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.waiting import Waiting, resolve
from tidegate.orchestrator.weights.content import Change, anew
from tidegate.orchestrator.weights.weights import WeightCoordinator
from tidegate.transport.messages import Message, UpdateWeights

PublishWait = Literal["live", "staged", "none"]
"""Until when a publish waits: until all engines serve the version; until all have it beside their
live weights, so that none can refuse it any more; or only until it is written where they copy it
from, so that the trainer may change its tensors."""


class Shell(Protocol):
    """What publishing needs of the scheduler."""

    def handle(self, events: Iterable[ev.Event]) -> None:
        """Feed events to the core."""

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines."""

    def when_safe(self, action: Callable[[], None]) -> None:
        """Do this once no crash can undo what has been handled so far."""

    def give_up_engine(self, engine: str, why: str) -> None:
        """Strike an engine that doesn't answer."""

    def hold_batches(self, is_held: bool) -> None:
        """Hand over no batch while it is undecided which version the trainer has made."""


@dataclass(slots=True, eq=False)
class _Call:
    """One publish that is not over."""

    version: int
    wait: PublishWait
    done: "asyncio.Future[None]"
    """Resolved when its caller has what it waits for, which may be earlier than its end."""


class Publisher:
    """Publishes versions; the newest wins."""

    def __init__(
        self,
        weights: WeightCoordinator,
        waiting: Waiting,
        shell: Shell,
        *,
        next_version: Callable[[], int],
        may_swap: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """``next_version``: the number after the newest released. ``may_swap``: whether engines
        may be told to."""
        self._weights = weights
        self._waiting = waiting
        self._shell = shell
        self._next_version = next_version
        self._may_swap = may_swap
        self._timeout_s = timeout_s
        self.newest_version = -1
        """Released by this process: engines may serve it; -1: none."""
        self._taken_version = -1
        """The newest number that somebody was told of and that may never be released."""
        self._calls: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None
        self.failure: TidegateError | None = None
        """Of a publish whose caller was gone by then, until somebody is told."""

    # ------------------------------------------------------------ for the trainer

    def raise_failure(self) -> None:
        """Tell of a publish that failed behind its caller's back, once.

        Raises:
            EngineLagging, WeightsRefused, PublishDropped: as :meth:`publish`.
        """
        if (failure := self.take_failure()) is not None:
            raise failure

    def take_failure(self) -> TidegateError | None:
        """The same, for who raises it."""
        failure, self.failure = self.failure, None
        return failure

    @property
    def staging_version(self) -> int | None:
        """The newest published, until every engine has staged it."""
        update = self._weights.update
        return update.version if update is not None and self._weights.is_undecided else None

    @property
    def knows_before(self) -> bool:
        """Whether it is known what a part of a set would be laid over: the model directory's
        weights, or what this process published. Not so in a run that goes on with another's."""
        return self.newest_version >= 0 or self._next_version() <= 1

    async def reserve(self) -> int:
        """Wait until the weight channel's buffer may be overwritten; the version to write there.

        It must be followed by :meth:`publish` or :meth:`release`. A version that is still being
        staged is given up for this one.

        Raises:
            EngineLagging: an engine still read the buffer after ``timeout_s``. It is given up.
            TidegateError: an earlier publish failed after its call had returned.
        """
        self.raise_failure()
        weights = self._weights
        while weights.is_reserved:  # another is written now, which takes no engine's time
            await self._waiting.until(lambda: not weights.is_reserved)
        weights.is_reserved = True
        if weights.is_undecided and weights.update is not None:
            self._taken_version = weights.update.version
            self._stop_watch()
        version = max(self._next_version(), self._taken_version + 1)
        self._shell.send(weights.supersede(version))
        self._note()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._waiting.until(lambda: weights.is_writable)
        except TimeoutError:
            assert weights.update is not None
            error = self._lagging(sorted(weights.update.staging))
            self.release()
            self._give_up(error)
            raise error from None
        except BaseException:
            self.release()
            raise
        return version

    def release(self) -> None:
        """Nothing will be published in the buffer reserved; what it was reserved over is gone."""
        self._weights.unreserve()
        if not self._weights.is_undecided:
            for call in [c for c in self._calls if c.version > self.newest_version]:
                self._end(call, PublishDropped(version=call.version))
        self._shell.send(self._weights.catch_up())
        self._note()

    async def publish(
        self,
        version: int,
        chunks: list[UpdateWeights],
        wait: PublishWait = "live",
        change: Change = anew,
    ) -> None:
        """Bring new weights to every engine; return once they, or newer ones, are there.

        ``change`` makes them of the version before, and of what was written for them.

        If it fails or is cancelled before every engine has staged them, none will swap; unless an
        earlier call waits for them too: then a cancelled one goes on without its caller.

        Raises:
            EngineLagging: some engine did not, within ``timeout_s``. It is given up.
            WeightsRefused: the weights don't fit the model; the old ones serve on.
            PublishDropped: they gave way to newer ones, whose writing failed.
        """
        call = _Call(version, wait, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._shell.send(self._weights.publish(version, chunks, change))
        if wait == "none":
            self._taken_version = version
            resolve(call.done, None)
        self._watch()
        self.advance()
        try:
            await call.done
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    # ------------------------------------------------------------ what engines have said

    def advance(self) -> None:
        """Do what is due; to be called whenever an engine, its weights or a pause has changed."""
        weights = self._weights
        update = weights.update
        if update is not None and weights.is_undecided and not update.staging:
            refusal = next(iter(update.refusals.items()), None)
            if refusal is not None:
                engine, why = refusal
                said = f"engine {engine!r} refused weights v{update.version}: {why}"
                self._fail(WeightsRefused(said))
            else:
                self._release_version(update.version)
        if weights.is_swap_due and self._may_swap():
            # Only then: a crash that forgets the version could give its number to other weights.
            self._shell.when_safe(self._swap)
        if weights.is_settled and not weights.is_undecided:
            self._settle()
        self._note()

    def _release_version(self, version: int) -> None:
        self.newest_version = version
        self._shell.handle([ev.VersionPublished(version)])
        self._weights.release()
        for call in self._calls:
            if call.wait == "staged" and call.version <= version:
                resolve(call.done, None)

    def _swap(self) -> None:
        told = self._weights.swaps() if self._may_swap() else []
        if told:
            self._shell.send(told)
            if self._weights.has_waves and self._timer is not None:
                self._watch()  # each has its own time

    def _settle(self) -> None:
        """All engines serve the newest version released."""
        self._stop_watch()
        for call in [c for c in self._calls if c.version <= self.newest_version]:
            self._end(call, None)

    def _note(self) -> None:
        """Others may wait for what has changed."""
        self._shell.hold_batches(self._weights.is_reserved or self._weights.is_undecided)
        self._waiting.notify()

    # ------------------------------------------------------------ what goes wrong

    def _cancel(self, call: _Call) -> None:
        """Nobody waits for this call any more."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        if call.version <= self.newest_version:
            return  # engines swap to it already
        weights = self._weights
        is_newest = weights.update is not None and weights.update.version == call.version
        if is_newest and not any(c.version > self.newest_version for c in self._calls):
            weights.withdraw()
            self._stop_watch()
            self._shell.send(weights.catch_up())
            self._note()
        else:
            self._taken_version = max(self._taken_version, call.version)

    def _fail(self, error: TidegateError) -> None:
        """The newest version comes to nothing; unless it was released, nobody swaps to it."""
        update = self._weights.update
        is_released = update is not None and update.is_released
        self._weights.withdraw()
        self._stop_watch()
        for call in [c for c in self._calls if is_released or c.version > self.newest_version]:
            self._end(call, error)
        self._shell.send(self._weights.catch_up())

    def _end(self, call: _Call, error: TidegateError | None) -> None:
        self._calls.remove(call)
        if error is not None and call.done.done():
            self.failure = error  # who called it has gone on
        elif error is not None:
            call.done.set_exception(error)
        else:
            resolve(call.done, None)

    def _watch(self) -> None:
        self._stop_watch()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._be_late)

    def _stop_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _be_late(self) -> None:
        """An engine has not taken the newest version in time."""
        self._timer = None
        if not self._weights.holdups:
            self._watch()  # the journal is late, or a pause: no engine is to blame
            return
        error = self._lagging(self._weights.holdups)
        self._fail(error)
        self._give_up(error)
        if not self._weights.is_settled:
            self._watch()  # others go on in their waves
        self._note()

    def _lagging(self, engines: list[str]) -> EngineLagging:
        update = self._weights.update
        return EngineLagging(
            engines=engines,
            wanted_version=update.version if update else 0,
            waited_s=self._timeout_s,
            where="; ".join(map(str, self._weights.laggards)),
        )

    def _give_up(self, error: EngineLagging) -> None:
        for engine in error.engines:
            self._shell.give_up_engine(engine, str(error))
