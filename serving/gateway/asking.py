"""What becomes of one request to the gateway? Turns, as many as it wants choices.

It knows rows and turns, and neither HTTP nor the form of an answer.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.episodes.growing_text import GrowingText
from tidegate.orchestrator.episodes.tool_calls import settled_words
from tidegate.serving.gateway.replies import Answered
from tidegate.serving.gateway.requests import Request

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.serving.gateway.sessions import Session


@dataclass(slots=True)
class Choice:
    """One completion in the making."""

    row: "Episode"
    prompt_tokens: int
    turn: "asyncio.Task[GeneratedTurn]"
    sent: str = ""
    """Of a stream."""
    growing: GrowingText = field(init=False)
    """What its turn has said so far, where anybody looks before its end."""

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.row.decode)

    def said_so_far(self, tools: list[str], stops: list[str]) -> str:
        """Of a turn that goes on, what is sure to stay. Of one that has ended, what it was: its row
        may go on meanwhile, for somebody else."""
        so_far = self.row.turn_so_far()
        if self.turn.done() or so_far is None or not so_far.goes_on:
            return self.sent
        self.growing.add(so_far.token_ids_from(self.growing.tokens))
        return settled_words(self.growing.text, tools, stops)


@dataclass(slots=True)
class Asking:
    """A request and all its completions."""

    session: "Session"
    request: Request
    choices: list[Choice] = field(default_factory=list)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Of the answer: the row and turn of its first choice."""
        return f"{self.choices[0].row.rollout_id}-{self.choices[0].prompt_tokens}"

    async def wait(self) -> None:
        """Until every choice has its turn; the first error is raised, and the others cancelled."""
        self.session.requests += 1
        try:
            await asyncio.gather(*(choice.turn for choice in self.choices))
        finally:
            self.session.requests -= 1
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        for choice in self.choices:
            choice.turn.cancel()

    @property
    def answers(self) -> list[Answered]:
        """Once they are there."""
        return [Answered(choice.turn.result(), choice.prompt_tokens) for choice in self.choices]

    def token_text(self, token_id: int) -> str:
        """A token as text of its own."""
        return self.session.episode.decode([token_id])


def choice_of(row: "Episode", turn: "Coroutine[Any, Any, GeneratedTurn]") -> Choice:
    """A row whose turn is to begin from what it has by now."""
    return Choice(row, row.num_tokens, asyncio.ensure_future(turn))


def begin_asking(session: "Session", request: Request, begin: Callable[[], Choice]) -> Asking:
    """Ask for all turns at once."""
    session.refuse_if_busy()
    asking = Asking(session, request)
    try:
        for _ in range(request.choices):
            asking.choices.append(begin())
    except BaseException:
        asking.cancel()
        raise
    return asking
