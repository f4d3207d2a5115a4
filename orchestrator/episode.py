"""What does a user's episode talk to? One rollout's context, and the model that continues it.

    async def solve(episode: Episode, task: Task) -> float:
        episode.append(task.question)
        turn = await episode.generate(max_tokens=32)
        return grade(turn.text, task)

The context only grows: prompts and observations by :meth:`Episode.append`, what the model says by
:meth:`Episode.generate`. So the tokens that are trained are exactly those the engine produced.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from tidegate.errors import ConfigError, RunClosed, TurnRefused
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.rollout import Rollout, Turn, VersionSpan
from tidegate.transport.messages import SamplingParams

AskForTurn = Callable[[Rollout, SamplingParams], Awaitable[Turn]]
"""Has the model continue a rollout's context."""


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """What one call of ``generate`` gave."""

    text: str
    """Decoded, without special tokens."""
    token_ids: list[int]
    logprobs: list[float]
    """One per token: natural log of the probability it was drawn with."""
    finish_reason: str
    """``stop``: a stop token was sampled, and is the last of ``token_ids``; ``length``: cut off."""
    spans: list[VersionSpan]
    """Which weights produced which of the tokens."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What ``generate`` uses where it isn't told."""

    max_tokens: int
    temperature: float
    seed: int
    """Of the run."""


class Episode:
    """One attempt at a task. An episode takes one turn at a time."""

    def __init__(
        self, rollout: Rollout, model: ModelFiles, ask: AskForTurn, defaults: SamplingDefaults
    ) -> None:
        self._rollout = rollout
        self._model = model
        self._ask = ask
        self._defaults = defaults
        self._is_generating = False
        self._is_over = False

    @property
    def token_ids(self) -> list[int]:
        """The context so far, copied."""
        return self._rollout.token_ids.tolist()

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
        self._rollout.extend(list(content))

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> GeneratedTurn:
        """Have the model continue the context, and append what it says.

        Raises:
            TurnRefused: no engine could ever serve this, e.g. the context is too long.
            RuntimeError: a turn of this episode is being generated, or the context is empty.
        """
        self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError("an episode takes one turn at a time; await the first generate()")
        if not self._rollout.token_ids:
            raise RuntimeError("the context is empty; append a prompt first")
        stop = self._model.stop_token_ids if stop_token_ids is None else stop_token_ids
        sampling = SamplingParams(
            max_tokens=self._defaults.max_tokens if max_tokens is None else max_tokens,
            temperature=self._defaults.temperature if temperature is None else temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=list(stop),
            seed=_seed(self._defaults.seed, self._rollout),
        )
        sampling = _checked(sampling)
        self._is_generating = True
        try:
            turn = await self._ask(self._rollout, sampling)
        finally:
            self._is_generating = False
        return self._result(turn)

    def end(self) -> None:
        """The episode has returned: what it left running in the background changes nothing."""
        self._is_over = True

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RunClosed("the episode has returned; its context is settled")

    def _result(self, turn: Turn) -> GeneratedTurn:
        token_ids = turn.token_ids.tolist()
        return GeneratedTurn(
            text=self._model.tokenizer.decode(token_ids, skip_special_tokens=True),
            token_ids=token_ids,
            logprobs=turn.logprobs.tolist(),
            finish_reason=turn.finish_reason or "length",
            spans=turn.spans(),
        )


def _checked(sampling: SamplingParams) -> SamplingParams:
    """What an engine could not even read is refused here, by name."""
    try:
        return msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise TurnRefused(f"generate() was given what no engine can read: {error}") from None


def _seed(run_seed: int, rollout: Rollout) -> int:
    """A 63-bit seed for the rollout's next turn: splitmix64's finaliser over what names it.

    Its name is its group, its place there and the turn: the same in every run with these tasks.
    """
    bits = (1 << 64) - 1
    x = run_seed & bits
    for part in (rollout.group_id, rollout.index, len(rollout.turns)):
        x = (x + 0x9E3779B97F4A7C15 * (part + 2)) & bits
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & bits
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & bits
        x ^= x >> 31
    return x >> 1


def checked_reward(value: object) -> float:
    """A reward must be a finite number.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        reward = float(value)
        if reward - reward == 0.0:
            return reward
    raise ConfigError(f"an episode must return its reward as a finite number, got {value!r}")
