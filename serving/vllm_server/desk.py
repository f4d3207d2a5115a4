"""Which requests are being answered, and how does each end? Every choice is a rollout of the run.

They are rollouts for measuring, outside training: they wait for no place, and the run's ledger
counts their tokens apart. It knows no HTTP and no bodies.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.errors import RunClosed
from tidegate.orchestrator.core import events as ev
from tidegate.serving.vllm_server.protocol import Prompt

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

REWARD = 0.0
"""Episodes return one, and nobody reads these."""


@dataclass(slots=True, eq=False)
class Choice:
    """One completion in the making."""

    index: int
    prompt: Prompt
    options: Mapping[str, Any]
    ended: "asyncio.Future[None]"
    """Resolved by the choice itself, and never failed: what went wrong is in ``error``. Wait for it
    by ``asyncio.wait``, which doesn't cancel it when the waiter is cancelled."""
    row: "Episode | None" = None
    """None until its episode has begun."""
    is_aborted: bool = False
    error: Exception | None = None
    _generating: "asyncio.Task[GeneratedTurn] | None" = None

    def turn_so_far(self) -> "GeneratedTurn | None":
        """Its tokens up to now; None before it has begun to ask for any."""
        return None if self.row is None else self.row.turn_so_far()

    @property
    def num_tokens(self) -> int:
        """Output tokens up to now."""
        return 0 if self.row is None else self.row.num_tokens - len(self.prompt.token_ids)

    async def play(self, episode: "Episode") -> float:
        """Its episode: one turn. Nothing that goes wrong with it is news to the run."""
        try:
            episode.append(self.prompt.token_ids)
            self.row = episode
            if not self.is_aborted:
                self._generating = asyncio.ensure_future(episode.generate(**self.options))
                await asyncio.wait([self._generating])
                if not self._generating.cancelled():
                    self._note(self._generating.exception())
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            self._note(error)
        finally:
            if self._generating is not None and not self._generating.done():
                self._generating.cancel()
                self._note(RunClosed("the run has ended"))
            self._end()
        return REWARD

    def abort(self) -> None:
        """End it with the tokens that it has; harmless once it has ended."""
        if self.ended.done():
            return
        self.is_aborted = True
        if self._generating is not None:
            self._generating.cancel()

    def _note(self, error: BaseException | None) -> None:
        if error is None or self.is_aborted:
            return
        is_plain = isinstance(error, Exception)
        self.error = error if is_plain else RunClosed("the run has ended")  # type: ignore[assignment]

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True, eq=False)
class Asking:
    """A request and all its choices."""

    request_id: str
    """As clients are told it."""
    choices: list[Choice] = field(default_factory=list)
    created_s: int = field(default_factory=lambda: int(time.time()))
    began_s: float = field(default_factory=time.monotonic)

    async def wait(self) -> None:
        """Wait until every choice has ended; raise the first error of a choice, if there is one.

        Cancelling this cancels no choice's ``ended``: only the choice itself resolves that, so
        :meth:`abort` still finds which choices are running.
        """
        if unended := [choice.ended for choice in self.choices if not choice.ended.done()]:
            await asyncio.wait(unended)
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error

    def abort(self) -> None:
        """End all of its choices with the tokens that they have."""
        for choice in self.choices:
            choice.abort()


class RequestDesk:
    """All requests that are being answered."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._askings: dict[Asking, None] = {}

    def __len__(self) -> int:
        return len(self._askings)

    def ask(self, request_id: str, wanted: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> Asking:
        """Begin a choice for each prompt, drawn by these options."""
        loop = asyncio.get_running_loop()
        asking = Asking(request_id)
        self._askings[asking] = None
        for index, (prompt, options) in enumerate(wanted):
            choice = Choice(index, prompt, options, loop.create_future())
            asking.choices.append(choice)
            choice.ended.add_done_callback(lambda _: self._forget_if_over(asking))
        for choice in asking.choices:
            self._begin(request_id, choice)
        return asking

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """End these with the tokens that they have; None: all. Unknown ids are ignored."""
        names = None if request_ids is None else set(request_ids)
        for asking in list(self._askings):
            if names is None or asking.request_id in names:
                asking.abort()

    async def wait_until_aborted(self) -> None:
        """Until what was told to end has ended."""
        aborted = [c.ended for a in self._askings for c in a.choices if c.is_aborted]
        if open_still := [future for future in aborted if not future.done()]:
            await asyncio.wait(open_still)

    def _begin(self, request_id: str, choice: Choice) -> None:
        async def play(episode: "Episode", task: object) -> float:
            return await choice.play(episode)

        task = {"request_id": request_id, "choice": choice.index}
        self._scheduler.handle([ev.EvaluationAsked(task, 0)], play)

    def _forget_if_over(self, asking: Asking) -> None:
        if all(choice.ended.done() for choice in asking.choices):
            self._askings.pop(asking, None)
