"""Table of the requests being answered; every choice of a request is a rollout of the run.

Pauses and clients abort requests through this table. A choice is an evaluation rollout, outside
training: it starts without admission, and the run's ledger counts its tokens separately.
Independent of HTTP and of response bodies.
"""

import asyncio
import contextlib
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate.errors import RunClosed
from tidegate.orchestrator.core import events as ev
from tidegate.serving.openai.requests import Prompt

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.episodes.runner import EpisodeFunction

Scores = TypeVar("Scores")

REWARD = 0.0
"""Reward that these episodes return, because every episode must return one; it is never used."""


LATENCY_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
"""Bounds of the latency histogram: vLLM's own, up to a minute."""

SEED_BITS = 63
"""Bits of a seed that the server draws for a choice."""


def choice_seeds(seed: int | None, choices: int) -> list[int]:
    """Return one prompt's seeds by choice, from the request's seed on, as in vLLM."""
    if seed is None:
        return [secrets.randbits(SEED_BITS) for _ in range(choices)]
    return [seed + number for number in range(choices)]


@dataclass(slots=True, eq=False)
class ActiveChoice:
    """One completion of a request, played as an episode of one turn."""

    index: int
    """Index of the choice among the request's choices."""
    prompt: Prompt
    options: Mapping[str, Any]
    """Keyword arguments of :meth:`Episode.generate` for the choice."""
    ended: "asyncio.Future[None]"
    """Future that the choice resolves when it ends. It never carries an exception; a failed
    choice's exception is in ``error``. Wait for it with ``asyncio.wait``, which doesn't cancel the
    future when the waiter is cancelled."""
    row: "Episode | None" = None
    """The choice's episode; None until it has begun."""
    is_aborted: bool = False
    error: Exception | None = None
    """Why the choice failed; None if it was aborted."""
    _generating: "asyncio.Task[GeneratedTurn] | None" = None
    _new_tokens: asyncio.Event | None = None
    """Event of the stream that sends the choice; None without one."""

    def current_turn(self) -> "GeneratedTurn | None":
        """Return the turn with its tokens up to now; None before it has begun."""
        return None if self.row is None else self.row.current_turn()

    def subscribe(self, event: asyncio.Event) -> None:
        """Set ``event`` at each step with tokens of the choice, and when the choice ends."""
        self._new_tokens = event
        self.ended.add_done_callback(lambda _: event.set())
        if self.row is not None:
            self.row.subscribe(event, self.ended)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens up to now."""
        return 0 if self.row is None else self.row.num_tokens - len(self.prompt.token_ids)

    async def play(self, episode: "Episode") -> float:
        """Play the episode: one turn. Failures are kept in ``error``, and do not reach the run."""
        try:
            episode.append(self.prompt.token_ids, media=self.prompt.media)
            self.row = episode
            if self._new_tokens is not None:
                episode.subscribe(self._new_tokens, self.ended)
            if not self.is_aborted:
                self._generating = asyncio.ensure_future(episode.generate(**self.options))
                await asyncio.wait([self._generating])
                if not self._generating.cancelled():
                    self._record(self._generating.exception())
        except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
            self._record(error)
        finally:
            if self._generating is not None and not self._generating.done():
                self._generating.cancel()
                self._record(RunClosed("the run has ended"))
            self._generating = None  # a failed task keeps its error
            self._end()
        return REWARD

    def abort(self) -> None:
        """End the choice with the tokens that it has; harmless once it has ended."""
        if self.ended.done():
            return
        self.is_aborted = True
        if self._generating is not None:
            self._generating.cancel()

    def take_error(self) -> Exception:
        """Return the error, and keep it no longer: once raised, its traceback refers to frames that
        hold the request, and the two would keep each other until the garbage collector runs."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def _record(self, error: BaseException | None) -> None:
        if error is None or self.is_aborted:
            return
        is_plain = isinstance(error, Exception)
        self.error = error if is_plain else RunClosed("the run has ended")  # type: ignore[assignment]

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is being answered, and all its choices."""

    request_id: str
    """Id in the answer, by which ``/abort_requests`` finds the request."""
    choices: list[ActiveChoice] = field(default_factory=list)
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time, for the answer's ``created``."""
    began_s: float = field(default_factory=time.monotonic)
    """Monotonic time of the request's start, in seconds, for latencies."""
    aborted_before_start: bool = False
    """Whether the request was aborted while its prompts were scored, so that it has no tokens."""

    async def wait(self) -> None:
        """Wait until every choice has ended; raise the first error of a choice, if there is one.

        If the caller is cancelled, the choices run on and their ``ended`` futures stay unresolved.
        So :meth:`abort` can still end those choices.
        """
        if unended := [choice.ended for choice in self.choices if not choice.ended.done()]:
            await asyncio.wait(unended)
        for choice in self.choices:
            if choice.error is not None:
                raise choice.take_error()

    def abort(self) -> None:
        """End all choices with the tokens that they have."""
        for choice in self.choices:
            choice.abort()


@dataclass(slots=True)
class RequestCounts:
    """Counters of the requests that have ended."""

    finished: Counter[str] = field(default_factory=Counter)
    """Number of choices, by finish reason."""
    prompt_tokens: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """Number of requests by latency, in the intervals between LATENCY_BOUNDS_S."""
    latency_total_s: float = 0.0

    def count(self, *, began_s: float, prompt_tokens: int, finish_reasons: Iterable[str]) -> None:
        """Count a request that has ended; ``began_s`` is on the monotonic clock."""
        took_s = time.monotonic() - began_s
        self.prompt_tokens += prompt_tokens
        self.latencies[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1
        self.latency_total_s += took_s
        self.finished.update(finish_reasons)


@dataclass(slots=True, eq=False)
class _ScoredRequest:
    """A request whose prompts are being scored, before its choices begin."""

    request_id: str
    adapter: str
    scoring: "asyncio.Task[Any]"


class ActiveRequests:
    """Begins requests as rollouts of the run, and aborts them by id."""

    def __init__(self, handle: "Callable[[ev.Event, EpisodeFunction], None]") -> None:
        """``handle`` feeds an event to the run, with the function of the event's episode."""
        self._handle = handle
        self.counts = RequestCounts()
        self._requests: dict[ActiveRequest, None] = {}
        self._ids: Counter[str] = Counter()
        """Number of requests of each id in ``_requests``."""
        self._scored: dict[_ScoredRequest, None] = {}
        """Requests whose prompts are being scored; they are not in ``_requests`` yet."""
        self._reserved: set[str] = set()
        """Ids of :meth:`reserve`."""

    def __len__(self) -> int:
        """Number of requests that are answered, those whose prompts are being scored included."""
        return len(self._requests) + len(self._scored)

    def adapters(self) -> set[str]:
        """Return the adapters of the requests being answered, and of prompts being scored."""
        choices = (choice for request in self._requests for choice in request.choices)
        used = {choice.options["adapter"] for choice in choices if "adapter" in choice.options}
        return used.union(scored.adapter for scored in self._scored)

    async def score(
        self, request_id: str, adapter: str, scoring: Coroutine[Any, Any, Scores]
    ) -> Scores | None:
        """Score a request's prompts before it begins; return None if it is aborted meanwhile.

        During the scoring :meth:`adapters` contains ``adapter``, so that the server keeps it
        loaded. Cancelling this call cancels the scoring.
        """
        task = asyncio.get_running_loop().create_task(scoring, name=f"score-{request_id}")
        scored = _ScoredRequest(request_id, adapter, task)
        self._scored[scored] = None
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            task.cancel()
            del self._scored[scored]

    @contextlib.contextmanager
    def reserve(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Reserve ids that callers give their requests, so that no other request takes them
        meanwhile.

        Raises:
            ValueError: an id is taken, or given twice; the message is the id.
        """
        for place, request_id in enumerate(request_ids):
            is_taken = request_id in self._reserved or request_id in self._ids
            if is_taken or request_id in request_ids[:place]:
                raise ValueError(request_id)
        self._reserved.update(request_ids)
        try:
            yield
        finally:
            self._reserved.difference_update(request_ids)

    def begin(
        self,
        request_id: str,
        choices: Sequence[tuple[Prompt, Mapping[str, Any]]],
        *,
        aborted_before_start: bool = False,
    ) -> ActiveRequest:
        """Begin a choice for each prompt with its options of :meth:`Episode.generate`.

        Choices of a request that was ``aborted_before_start`` end without a token.
        """
        loop = asyncio.get_running_loop()
        request = ActiveRequest(request_id, aborted_before_start=aborted_before_start)
        if not choices:
            return request
        self._requests[request] = None
        self._ids[request_id] += 1
        for index, (prompt, options) in enumerate(choices):
            ended = loop.create_future()
            choice = ActiveChoice(index, prompt, options, ended, is_aborted=aborted_before_start)
            request.choices.append(choice)
            choice.ended.add_done_callback(lambda _: self._forget_if_over(request))
        for choice in request.choices:
            self._play(request_id, choice)
        return request

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """End these requests with the tokens that they have; None: all. Ignore unknown ids."""
        ids = None if request_ids is None else set(request_ids)
        for request in list(self._requests):
            if ids is None or request.request_id in ids:
                request.abort()
        for scored in self._scored:
            if ids is None or scored.request_id in ids:
                scored.scoring.cancel()

    async def wait_until_aborted(self) -> None:
        """Wait until every choice that was aborted has ended."""
        aborted = [c.ended for request in self._requests for c in request.choices if c.is_aborted]
        if unended := [future for future in aborted if not future.done()]:
            await asyncio.wait(unended)

    def _play(self, request_id: str, choice: ActiveChoice) -> None:
        async def play(episode: "Episode", task: object) -> float:
            return await choice.play(episode)

        task = {"request_id": request_id, "choice": choice.index}
        self._handle(ev.EvaluationRequested(task, 0), play)

    def _forget_if_over(self, request: ActiveRequest) -> None:
        if request in self._requests and all(choice.ended.done() for choice in request.choices):
            del self._requests[request]
            self._ids[request.request_id] -= 1
            if not self._ids[request.request_id]:
                del self._ids[request.request_id]
