"""What does a user's episode talk to? One rollout's context, and the model that continues it.

    async def solve(episode: Episode, task: Task) -> float:
        episode.append(task.question)
        turn = await episode.generate(max_tokens=32)
        return grade(turn.text, task)

The context only grows: prompts and observations by :meth:`Episode.append`, what the model says by
:meth:`Episode.generate`. So the tokens that are trained are exactly those the engine produced.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Unpack

import msgspec
from tokenizers import Tokenizer

from tidegate.errors import ConfigError, RunClosed
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.recollection import Recollection
from tidegate.orchestrator.rollout import Rollout, Turn, VersionSpan, token_array
from tidegate.orchestrator.sampling_options import SamplingOptions, sampling_params
from tidegate.transport.messages import SamplingParams

BITS_64 = (1 << 64) - 1

REWARD_TYPES = (float, int)
"""Told apart first, for looking for a method takes longer."""


class Generating(Protocol):
    """Who has the model continue a rollout's context."""

    def ask(self, rollout: Rollout, sampling: SamplingParams) -> Awaitable[Turn]:
        """A new turn, asked for now, once it has ended."""

    def rejoin(self, rollout: Rollout) -> Awaitable[Turn]:
        """The turn that was going on when the run was resumed, once it has ended."""

    def give_up_turn(self, rollout: Rollout) -> None:
        """Nobody waits for what ``ask`` or ``rejoin`` gave any more."""

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Forget what the rollout's context holds beyond so many turns and tokens."""


class GeneratedTurn:
    """What one call of ``generate`` gave. Each is made when it is first looked at."""

    def __init__(self, turn: Turn, tokenizer: Tokenizer) -> None:
        self._turn = turn
        self._tokenizer = tokenizer

    @cached_property
    def text(self) -> str:
        """Decoded, without special tokens."""
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=True)

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens, the stop token included."""
        return self._turn.token_ids.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        """One per token: natural log of the probability it was drawn with."""
        return self._turn.logprobs.tolist()

    @cached_property
    def raw_logprobs(self) -> list[float] | None:
        """One per token: that before every sampling option. None unless ``raw_logprobs=True`` was
        asked for, of an engine that can tell."""
        details = self._turn.details
        return None if details is None else details.raw_of(len(self.token_ids))

    @cached_property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """For each token the likeliest ones, likeliest first, each with the log-prob that it could
        have been drawn with; as many as were asked for, or None."""
        details = self._turn.details
        return None if details is None else details.top_of(len(self.token_ids))

    @property
    def finish_reason(self) -> str:
        """``stop``: the last token is a stop token, or completes a stop string; ``length``: cut
        off."""
        return self._turn.finish_reason or "length"

    @cached_property
    def spans(self) -> list[VersionSpan]:
        """Which weights produced which of the tokens."""
        return self._turn.spans()

    def __repr__(self) -> str:
        return f"GeneratedTurn({self.text!r}, finish_reason={self.finish_reason!r})"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What ``generate`` uses where it isn't told."""

    max_tokens: int
    temperature: float
    seed: int
    """Of the run."""


class Episode:
    """One attempt at a task. An episode takes one turn at a time."""

    __slots__ = (
        "__weakref__",
        "_defaults",
        "_generating",
        "_is_generating",
        "_is_over",
        "_model",
        "_past",
        "_rollout",
    )

    def __init__(
        self,
        rollout: Rollout,
        model: ModelFiles,
        generating: Generating,
        defaults: SamplingDefaults,
    ) -> None:
        self._rollout = rollout
        self._model = model
        self._generating = generating
        self._defaults = defaults
        self._past = Recollection(rollout) if rollout.turns else None
        """After a resume, until what happened before has happened again."""
        self._is_generating = False
        self._is_over = False

    @property
    def token_ids(self) -> list[int]:
        """The context so far, copied."""
        past = self._past
        return (
            self._rollout.token_ids[: past.tokens] if past else self._rollout.token_ids
        ).tolist()

    @property
    def index(self) -> int:
        """Place of this rollout in its group."""
        return self._rollout.index

    def append(self, content: str | Sequence[int]) -> None:
        """Add given text or tokens (a prompt, an observation) to the context; never trained on."""
        self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError("the context can't be appended to while a turn is generated")
        if isinstance(content, str):
            content = self._model.tokenizer.encode(content, add_special_tokens=False).ids
        given = token_array(content)
        if self._past is not None and self._past.follows(given):
            return
        self._forget_the_past()
        self._rollout.extend(given)

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> GeneratedTurn:
        """Have the model continue the context, and append what it says.

        ``options`` are those of :class:`SamplingOptions`: penalties, stop strings, processors and
        more. There is no ``n``: a group is ``group_size`` samples of its prompt already.

        Raises:
            TurnRefused: no engine could ever serve this, e.g. the context is too long.
            RuntimeError: a turn of this episode is being generated, or the context is empty.
        """
        self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError("an episode takes one turn at a time; await the first generate()")
        if not (self._past.tokens if self._past else len(self._rollout.token_ids)):
            raise RuntimeError("the context is empty; append a prompt first")
        sampling = sampling_params(
            self._defaults.max_tokens if max_tokens is None else max_tokens,
            self._defaults.temperature if temperature is None else temperature,
            top_k,
            top_p,
            self._model.stop_token_ids if stop_token_ids is None else stop_token_ids,
            options,
        )
        if "seed" not in options:
            seed = _seed(self._defaults.seed, self._rollout, self._num_turns)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        self._is_generating = True
        try:
            if self._past is not None:
                turn = await self._turn_again(self._past, sampling)
            else:
                turn = await self._generating.ask(self._rollout, sampling)
        except asyncio.CancelledError:
            self._generating.give_up_turn(self._rollout)
            raise
        finally:
            self._is_generating = False
        return GeneratedTurn(turn, self._model.tokenizer)

    def end(self) -> None:
        """The episode has returned: what it left running in the background changes nothing.

        If it did so before it had come to where it was before a crash, the rest is forgotten.
        """
        if not self._is_over:
            self._forget_the_past()
        self._is_over = True

    @property
    def _num_turns(self) -> int:
        return self._past.turns if self._past else len(self._rollout.turns)

    async def _turn_again(self, past: Recollection, sampling: SamplingParams) -> Turn:
        """A turn of the past, if the episode is still there; else a new one."""
        turn = past.next_turn(sampling)
        if turn is None:
            self._forget_the_past()
            return await self._generating.ask(self._rollout, sampling)
        if turn.finish_reason is None:
            turn = await self._generating.rejoin(self._rollout)
        past.lived_through(turn)
        if past.is_over:
            self._past = None
        return turn

    def _forget_the_past(self) -> None:
        past, self._past = self._past, None
        if past is not None:
            self._generating.cut(self._rollout, turns=past.turns, tokens=past.tokens)

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RunClosed("the episode has returned; its context is settled")


def _seed(run_seed: int, rollout: Rollout, turn: int) -> int:
    """A 63-bit seed for a turn of the rollout: splitmix64's finaliser over what names it.

    Its name is its group, its place there and the turn: the same in every run with these tasks.
    Each part has an odd factor of its own (fractions of the golden ratio, sqrt 2 and sqrt 3), so
    that no two small names meet in one number.
    """
    x = run_seed + rollout.group_id * 0x9E3779B97F4A7C15
    x += rollout.index * 0x6A09E667F3BCC909 + turn * 0xBB67AE8584CAA73B
    x &= BITS_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
    return (x ^ (x >> 31)) >> 1


def checked_reward(value: object) -> float:
    """A reward must be a finite number.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, REWARD_TYPES) or hasattr(value, "__float__"):
        reward = float(value)
        if reward - reward == 0.0:
            return reward
    raise ConfigError(f"an episode must return its reward as a finite number, got {value!r}")
