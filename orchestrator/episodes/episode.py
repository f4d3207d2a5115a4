"""What does a user's episode talk to? One rollout's context, and the model that continues it.

    async def solve(episode: Episode, task: Task) -> float:
        episode.append(task.question)
        turn = await episode.generate(max_tokens=32)
        return grade(turn.text, task)

The context only grows: prompts and observations by :meth:`Episode.append`, what the model says by
:meth:`Episode.generate`. So the tokens that are trained are exactly those the engine produced.
Where an episode wants more than one context, it forks: each branch is a row of its own.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Unpack, cast

import msgspec

from tidegate.errors import RunClosed, TurnRefused, TurnTimeout
from tidegate.orchestrator.core.events import TurnsRewarded
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.activities import SCORE
from tidegate.orchestrator.episodes.chat_template import Message
from tidegate.orchestrator.episodes.conversation import Conversation, Tools
from tidegate.orchestrator.episodes.forced_calls import Choice
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.media_parts import refuse_too_much
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.sampling_options import SamplingOptions, sampling_params
from tidegate.orchestrator.fleet.scores import (
    Asked,
    Readout,
    Score,
    TokenScores,
    ask_logprobs,
    ask_rewards,
)
from tidegate.transport.limits import CONTEXT_TOKENS_MAX, TURN_BYTES_MAX
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams, SubmitTurn, encode


class Generating(Protocol):
    """Who has the model continue a rollout's context."""

    def ask(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Awaitable[Turn]:
        """A new turn, asked for now, once it has ended; ``media`` are new in its context."""

    def rejoin(self, rollout: Rollout) -> Awaitable[Turn]:
        """The turn that was going on when the run was resumed, once it has ended."""

    def give_up_turn(self, rollout: Rollout) -> None:
        """Nobody waits for what ``ask`` or ``rejoin`` gave any more."""

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Keep ``turns`` turns of the rollout, and its context up to the last kept turn's end.

        ``tokens``: how much of the context the episode had repeated. Nothing is cut from a rollout
        that was given up.
        """

    def is_over_budget(self, rollout: Rollout) -> bool:
        """Whether its episode is to be parked before its next turn, for it has taken long."""

    async def park(self, rollout: Rollout) -> None:
        """Return once newer weights are live, or the trainer waits for rollouts."""

    def doing(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        """Within it, its episode is at something that has a name, beside generating."""

    def score(self, rollout: Rollout, asked: Sequence[Asked]) -> Awaitable[list[Score]]:
        """What the engines make of given tokens, for this rollout's episode."""

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Another row for this one's episode, with nothing in it yet."""


SMALL_CONTEXT_TOKENS = 64 * 1024
"""A turn with so short a context and no media fits its frame, whatever its options are."""


class AsksScores(Protocol):
    """A run that can be asked from any event loop, such as a :class:`~tidegate.Scorer`."""

    async def ask_scores(self, asked: Sequence[Asked]) -> list[Score]:
        """An answer to each."""


class ScoringEpisode:
    """What of an episode has tokens scored, and knows when that is of no use any more."""

    __slots__ = ("_asking", "_generating", "_is_over", "_rollout")

    def __init__(self, rollout: Rollout, generating: Generating) -> None:
        self._rollout = rollout
        self._generating = generating
        self._is_over = False
        self._asking: tuple[asyncio.Future[list[Score]], ...] = ()
        """Not answered yet."""

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
        by: AsksScores | None = None,
    ) -> list[TokenScores]:
        """How likely the policy's live weights find each sequence's tokens from ``start`` on.

        As :meth:`tidegate.Rollouts.score`, while the episode goes on, and beside its turns too. The
        sequences are whole contexts: ``[episode.token_ids + answer for answer in answers]``.

        ``by``: the scorer to ask in place of the policy's engines, such as one of
        ``tidegate.score_server(model=reference)``, or its twin that is not async.

        Cancelled with the episode, or by ``asyncio.timeout``, engines are told.

        Raises:
            ScoreRefused: no engine can ever answer, e.g. a sequence is too long.
            EngineLost: several engines were lost with the same sequence, or the scorer's last one.
        """
        asked = ask_logprobs(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", await self._ask(asked, by))

    async def reward(
        self, sequences: Sequence[Any], *, by: AsksScores | None = None
    ) -> list[Readout]:
        """What a classification head says of each sequence; as :meth:`score` otherwise."""
        return cast("list[Readout]", await self._ask(ask_rewards(sequences), by))

    async def _ask(self, asked: Sequence[Asked], by: AsksScores | None) -> list[Score]:
        self._refuse_if_over()
        coming: Awaitable[list[Score]]
        if by is None:
            coming = self._generating.score(self._rollout, asked)
        else:
            coming = by.ask_scores(asked)
        asking = asyncio.ensure_future(coming)
        self._asking += (asking,)
        try:
            with self._generating.doing(self._rollout, SCORE):
                return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_over and task is not None and not task.cancelling():
                self._refuse_if_over()
            raise
        finally:
            asking.cancel()
            self._asking = tuple(other for other in self._asking if other is not asking)

    def _take_scores_back(self) -> None:
        """The episode is over: who has it ask in the background is told so."""
        for asking in self._asking:
            asking.cancel()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RunClosed("the episode has returned; its context is settled")


BITS_64 = (1 << 64) - 1


def turn_seed(run_seed: int, rollout: Rollout, turn: int) -> int:
    """A 63-bit seed for a turn of the rollout: splitmix64's finaliser over what names it.

    Its name is its group, its place there and the turn: the same in every run with these tasks.
    Each part has an odd factor of its own (fractions of the golden ratio, sqrt 2 and sqrt 3), so
    that no two small names meet in one number.
    """
    x = run_seed + rollout.group_id * 0x9E3779B97F4A7C15
    x += rollout.index * 0x6A09E667F3BCC909 + turn * 0xBB67AE8584CAA73B
    return mixed(x) >> 1


def mixed(x: int) -> int:
    """splitmix64's finaliser."""
    x &= BITS_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
    return x ^ (x >> 31)


async def within(timeout_s: float, coming: Awaitable[Turn], rollout: Rollout) -> Turn:
    """The turn that ``rollout`` waits for.

    Raises:
        TurnTimeout: it took longer.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return await coming
    except TimeoutError:
        if not clock.expired():
            raise
        raise TurnTimeout(timeout_s=timeout_s, tokens=rollout.turns[-1].length) from None


NOT_REPEATABLE = ("cancelled", "refused")
"""How a turn may have ended that can't be given again: its episode saw an exception."""


class Recollection:
    """A rollout's past, and how far the episode has come in it."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.turns = 0
        """Lived through again."""
        self.tokens = 0
        """Of the context, lived through again."""

    @property
    def is_over(self) -> bool:
        """Whether what comes now is new."""
        return self.turns >= len(self._rollout.turns)

    def follows(self, given: "array[int]") -> bool:
        """Whether the episode appended these then, too; if so, they are in the context already."""
        end = self.tokens + len(given)
        next_turn = self._rollout.turns[self.turns]
        if end > next_turn.start or self._rollout.token_ids[self.tokens : end] != given:
            return False
        self.tokens = end
        return True

    @property
    def next_seed(self) -> int:
        """Of the turn that comes next."""
        return self._rollout.turns[self.turns].sampling.seed

    def next_turn(self, sampling: SamplingParams, media: tuple[Media, ...] = ()) -> Turn | None:
        """The turn that the episode asked for here, then; None if it asks for another."""
        turn = self._rollout.turns[self.turns]
        is_same = self.tokens == turn.start and sampling == turn.sampling and media == turn.media
        if not is_same or turn.finish_reason in NOT_REPEATABLE:
            return None
        return turn

    def lived_through(self, turn: Turn) -> None:
        """The episode has got this turn again, whole."""
        self.turns += 1
        self.tokens = turn.start + turn.length


def too_long(tokens: int) -> TurnRefused:
    """The error for a context that no message to an engine can hold."""
    return TurnRefused(
        f"a context of {tokens} tokens; one may have {CONTEXT_TOKENS_MAX}, for a message to an "
        f"engine holds no more. Shorten the prompt, or what is appended to it"
    )


def refuse_too_large(
    rollout: Rollout,
    sampling: SamplingParams,
    media: Sequence[Media],
    context_tokens_max: int,
) -> None:
    """Refuse a turn that no engine reads, or that does not fit one message.

    ``context_tokens_max``: the longest context that an engine of the run reads; 0 if none is known.

    Raises:
        TurnRefused: its context is too long, or context, options and media are too large together.
    """
    context = rollout.token_ids
    if context_tokens_max and len(context) >= context_tokens_max:
        raise TurnRefused(
            f"a context of {len(context)} tokens, where engines read {context_tokens_max} "
            f"together with what they sample; shorten the prompt"
        )
    if len(context) <= SMALL_CONTEXT_TOKENS and not media and not rollout.may_have_media:
        return
    if len(context) > CONTEXT_TOKENS_MAX:
        raise too_long(len(context))
    turn = SubmitTurn(
        turn=0, token_ids=context.tobytes(), sampling=sampling, media=[*rollout.media, *media]
    )
    try:
        turn_bytes = len(encode(turn))
    except (ValueError, TypeError, OverflowError) as error:  # a text that is no Unicode
        raise TurnRefused(f"this turn can't be sent to an engine: {error}") from None
    if turn_bytes > TURN_BYTES_MAX:
        raise TurnRefused(
            f"a turn of {turn_bytes} bytes, of which {4 * len(context)} are its context; one may "
            f"have {TURN_BYTES_MAX}. Shorten the context, its options or its media"
        )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What ``generate`` uses where it isn't told."""

    max_tokens: int
    temperature: float
    seed: int
    """Of the run."""
    adapter: str = ""


class Episode(ScoringEpisode):
    """One attempt at a task, or a branch of one. It takes one turn at a time; branches, theirs."""

    __slots__ = (
        "__weakref__",
        "_conversation",
        "_defaults",
        "_given_media",
        "_is_generating",
        "_is_reserved",
        "_model",
        "_past",
        "_past_branches",
        "_salt",
        "_turns",
        "branches",
    )

    def __init__(
        self,
        rollout: Rollout,
        model: ModelFiles,
        generating: Generating,
        defaults: SamplingDefaults,
        *,
        parent: "Episode | None" = None,
    ) -> None:
        """``parent``: of a branch, what it was forked from."""
        super().__init__(rollout, generating)
        self._salt: int = 0 if parent is None else mixed(parent._salt + len(parent.branches) + 1)
        """Tells a branch's random numbers from others'; made of its place, the same in any run."""
        self.branches: list[Episode] = []
        """Forked from this one, in order."""
        self._turns: list[GeneratedTurn] = []
        self._conversation: Conversation[Episode] | None = None
        self._given_media: tuple[Media, ...] = ()
        """Since the last turn."""
        self._model = model
        self._defaults = defaults
        self._past = Recollection(rollout) if rollout.turns else None
        """After a resume, until what happened before has happened again."""
        self._past_branches = rollout.branches
        """After a resume: those not forked again yet."""
        self._is_generating = False
        self._is_reserved = False

    @property
    def token_ids(self) -> list[int]:
        """The context so far, copied."""
        past, token_ids = self._past, self._rollout.token_ids
        return (token_ids[: past.tokens] if past else token_ids).tolist()

    @property
    def num_tokens(self) -> int:
        """Of the context so far."""
        return self._past.tokens if self._past else len(self._rollout.token_ids)

    @property
    def media(self) -> list[Media]:
        """What the context has beside tokens, in order."""
        turns = self._rollout.turns[: self._past.turns] if self._past else self._rollout.turns
        return [*(each for turn in turns for each in turn.media), *self._given_media]

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being generated, or about to be."""
        return not self._is_generating and not self._is_reserved

    def reserve(self) -> None:
        """Its next turn is about to be asked for: nobody else is to go on from here."""
        self._is_reserved = True

    @property
    def rollout_id(self) -> int:
        """As in trajectories.parquet; a branch has its own."""
        return self._rollout.rollout_id

    def encoded(self, text: str) -> Awaitable[list[int]]:
        """A text as tokens, none added; those of a long one are found in a thread."""
        return self._model.encoded(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special ones left out."""
        return str(self._model.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def row_from(self, context: Sequence[int]) -> "Episode":
        """A row with exactly this context: the one that it goes on from, or a new branch."""
        context = list(context)
        for row in sorted(self.rows, key=lambda row: -row.num_tokens):
            known = row.num_tokens
            if row.is_idle and known <= len(context) and row.token_ids == context[:known]:
                row.append(context[known:])
                row.reserve()
                return row
        branch = self.branch(context, "new_context: it goes on from no row's end")
        branch.reserve()
        return branch

    @property
    def rows(self) -> "Iterator[Episode]":
        """This one and its branches, and theirs."""
        yield self
        for branch in self.branches:
            yield from branch.rows

    @property
    def conversation(self) -> "Conversation[Episode]":
        """What ``generate(messages=…)`` keeps of them.

        Raises:
            ModelError: the model has no chat template.
        """
        if self._conversation is None:
            self._conversation = Conversation(self, self._model)
        return self._conversation

    @property
    def index(self) -> int:
        """Place of this rollout in its group."""
        return self._rollout.index

    @property
    def group_id(self) -> int:
        """Number of the group, which all attempts at one task share; a resumed run keeps it."""
        return self._rollout.group_id

    def append(self, content: str | Sequence[int], *, media: Sequence[Media] = ()) -> None:
        """Add given text or tokens (a prompt, an observation) to the context; never trained on.

        ``media``: those whose placeholders are in it, in order.

        Raises:
            ConfigError: they are too many, or too large.
            TurnRefused: no turn could ever be asked for after it, so long is the context then.
        """
        self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError("the context can't be appended to while a turn is generated")
        given = self._model.given.of(content)
        if self.num_tokens + len(given) > CONTEXT_TOKENS_MAX:
            raise too_long(self.num_tokens + len(given))
        if media:
            self._give_media(media)
        if self._past is not None:
            if self._past.follows(given):
                return
            self._forget_the_past()
        self._rollout.extend(given)

    def _give_media(self, media: Sequence[Media]) -> None:
        at = self.num_tokens
        given = tuple([msgspec.structs.replace(each, at=each.at or at) for each in media])
        refuse_too_much([*self.media, *given])
        self._given_media += given

    def fork(self) -> "Episode":
        """A branch: it has this context, and from here on goes a way of its own.

        It is for sub-agents, and for trying several ways at once: branches generate side by side.
        Each with a turn is a row in the trainer's batch, with this rollout's reward and advantage.
        What was sampled before the fork is trained once, here: to the branch it was given. Branches
        end with the rollout; an episode waits for those that it wants to hear of.
        """
        if self._is_generating:
            raise RuntimeError("fork before a turn is generated, or when it has ended")
        return self.branch(self.token_ids, "asked", media=self.media)

    def branch(
        self, context: Sequence[int], reason: str, *, media: Sequence[Media] = ()
    ) -> "Episode":
        """As :meth:`fork`, but with another context; ``reason`` is recorded."""
        self._refuse_if_over()
        if self._past_branches:
            row, *later = self._past_branches
            self._past_branches = tuple(later)
        else:
            row = self._generating.fork(self._rollout, reason)
        branch = Episode(row, self._model, self._generating, self._defaults, parent=self)
        self.branches.append(branch)
        branch.append(context, media=media)
        return branch

    async def park(self) -> None:
        """Leave the engines to others, and go on under newer weights, after having taken long.

        Returns once newer weights are live, or the trainer waits for a batch: none come without
        rollouts like this one. At once in an evaluation, and in what is lived through again after a
        resume. Meanwhile its time stands still. ``episode_budget_s`` has it done by itself.
        """
        self._refuse_if_over()
        if self._past is None and self._rollout.group_id >= 0:
            await self._generating.park(self._rollout)

    def doing(self, name: str) -> AbstractContextManager[None]:
        """Have the time spent within counted, and shown on the trace, by this name.

        ``with episode.doing("reward"): …``; nothing else comes of it. Environments, tools called
        from the episode's own coroutine, and scores do so by themselves.
        """
        return self._generating.doing(self._rollout, name)

    def turn_so_far(self) -> GeneratedTurn | None:
        """Its last turn with the tokens that are there by now, whether it goes on or has ended."""
        turns = self._rollout.turns[: self._past.turns] if self._past else self._rollout.turns
        return GeneratedTurn(turns[-1], self._model.tokenizer) if turns else None

    async def generate(
        self,
        *,
        messages: Sequence[Message] | None = None,
        tools: Tools | None = None,
        tool_choice: Choice = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> GeneratedTurn:
        """Have the model continue the context, and append what it says.

        ``options`` are those of :class:`SamplingOptions`: penalties, stop strings, processors and
        more. There is no ``n``: a group is ``group_size`` samples of its prompt already.

        With ``messages`` it is asked as OpenAI's API is: with the whole conversation each time,
        rendered by the model's chat template, and ``turn.message`` to be added to it. What the
        model said before stays the tokens that it was; see :mod:`conversation` for what forks.
        ``tool_choice`` is OpenAI's: ``required`` or a named function hold the turn to a call.

        Cancelled, or after ``timeout_s``, the engine stops; what it has sampled stays in the
        context.

        Raises:
            TurnTimeout: it took longer than ``timeout_s``.
            TurnRefused: no engine could ever serve this, e.g. the context is too long.
            RuntimeError: a turn of this episode is being generated, or the context is empty.
        """
        if messages is not None:
            self._refuse_if_over()
            return await self.conversation.generate(
                messages,
                tools,
                tool_choice,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop_token_ids=stop_token_ids,
                timeout_s=timeout_s,
                **options,
            )
        self._refuse_turn()
        sampling = sampling_params(
            self._defaults.max_tokens if max_tokens is None else max_tokens,
            self._defaults.temperature if temperature is None else temperature,
            top_k,
            top_p,
            self._model.stop_token_ids if stop_token_ids is None else stop_token_ids,
            options,
        )
        sampling = self._completed(sampling, options)
        self._is_generating = True
        try:  # here, for a coroutine of its own would be stepped with each of the turn's steps
            if self._generating.is_over_budget(self._rollout):
                await self.park()
            try:
                turn = await self._asked(sampling, timeout_s)
            except (asyncio.CancelledError, TurnTimeout):
                self._generating.give_up_turn(self._rollout)
                raise
        finally:
            self._is_generating = False
        self._turns.append(GeneratedTurn(turn, self._model.tokenizer))
        return self._turns[-1]

    def _refuse_turn(self) -> None:
        """Unless one can be generated now."""
        self._refuse_if_over()
        self._is_reserved = False
        if self._is_generating:
            raise RuntimeError("an episode takes one turn at a time; await the first generate()")
        if not (self._rollout.filed_token_ids if self._past is None else self._past.tokens):
            raise RuntimeError("the context is empty; append a prompt first")

    def _completed(self, sampling: SamplingParams, options: SamplingOptions) -> SamplingParams:
        """With the run's adapter and the turn's own seed, where the episode names none."""
        if self._defaults.adapter and "adapter" not in options:
            sampling = msgspec.structs.replace(sampling, adapter=self._defaults.adapter)
        if "seed" not in options:
            sampling = msgspec.structs.replace(sampling, seed=self._next_seed())
        return sampling

    def _asked(self, sampling: SamplingParams, timeout_s: float | None) -> Awaitable[Turn]:
        media, self._given_media = self._given_media, ()  # they are the turn's
        coming: Awaitable[Turn]
        if self._past is not None:
            coming = self._turn_again(self._past, sampling, media)
        else:
            coming = self._generating.ask(self._rollout, sampling, media)
        return coming if timeout_s is None else within(timeout_s, coming, self._rollout)

    def end(self) -> None:
        """The episode has returned: what it left running in the background changes nothing.

        If it did so before it had come to where it was before a crash, the rest is forgotten.
        """
        if self._is_over:
            return
        for branch in self.branches:
            branch.end()
        for unforked in self._past_branches:
            for row in unforked.rows:
                self._generating.cut(row, turns=0, tokens=0)
        if self._past is not None:
            self._forget_the_past()
        self._is_over = True
        if self._asking:
            self._take_scores_back()

    def turn_rewards(self) -> list[TurnsRewarded]:
        """What single turns were rewarded with, of this row and its branches."""
        given: list[TurnsRewarded] = []
        rewards: list[tuple[int, float]] = []
        for turn in self._turns:
            if turn.given_reward is not None:
                rewards.append((turn.number, turn.given_reward))
        if rewards:
            given.append(TurnsRewarded(self._rollout.rollout_id, tuple(rewards)))
        for branch in self.branches:
            given += branch.turn_rewards()
        return given

    def _next_seed(self) -> int:
        """A turn of the past keeps its own: its group has another number since, if it was split."""
        if self._past is not None:
            return self._past.next_seed
        rollout = self._rollout
        return turn_seed(self._defaults.seed + self._salt, rollout, len(rollout.turns))

    async def _turn_again(
        self, past: Recollection, sampling: SamplingParams, media: tuple[Media, ...]
    ) -> Turn:
        """A turn of the past, if the episode is still there; else a new one."""
        turn = past.next_turn(sampling, media)
        if turn is None:
            self._forget_the_past()
            return await self._generating.ask(self._rollout, sampling, media)
        if turn.finish_reason is None:
            turn = await self._generating.rejoin(self._rollout)
        past.lived_through(turn)
        if past.is_over:
            self._past = None
        return turn

    def _forget_the_past(self) -> None:
        """Go another way from here: discard the turns that the episode has not repeated.

        The cut removes every token after the last repeated turn. Those that the episode has
        appended again since that turn are put back, as if it had just appended them.
        """
        past, self._past = self._past, None
        if past is None:
            return
        rollout = self._rollout
        repeated = rollout.token_ids[: past.tokens]
        self._generating.cut(rollout, turns=past.turns, tokens=past.tokens)
        rollout.extend(repeated[rollout.sampled_end :])
