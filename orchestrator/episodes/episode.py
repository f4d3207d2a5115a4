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
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Unpack

import msgspec

from tidegate.errors import TurnTimeout
from tidegate.orchestrator.core.events import TurnsRewarded
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.chat_template import Message
from tidegate.orchestrator.episodes.conversation import Conversation, Tools
from tidegate.orchestrator.episodes.forced_calls import Choice
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.generating import Generating, SamplingDefaults
from tidegate.orchestrator.episodes.media_parts import refuse_too_much
from tidegate.orchestrator.episodes.recollection import Recollection
from tidegate.orchestrator.episodes.sampling_options import SamplingOptions, sampling_params
from tidegate.orchestrator.episodes.scoring import ScoringEpisode
from tidegate.orchestrator.episodes.turn_seeds import mixed, turn_seed
from tidegate.orchestrator.episodes.turn_timeout import within
from tidegate.orchestrator.weights.model_files import ModelFiles
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

_replace = msgspec.structs.replace


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
        ScoringEpisode.__init__(self, rollout, generating)  # super() takes as long as all of it
        self._salt: int = 0 if parent is None else mixed(parent._salt + len(parent.branches) + 1)
        """Tells a branch's random numbers from others'; made of its place, the same in any run."""
        self.branches: list[Episode] = []
        """Forked from this one, in order."""
        self._turns: list[GeneratedTurn] = []
        self._conversation: Conversation | None = None
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
    def conversation(self) -> Conversation:
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
        """
        if self._is_over:  # looked at here too, for the call costs as much again
            self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError("the context can't be appended to while a turn is generated")
        given = self._model.given.of(content)
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
        if self._is_over:
            self._refuse_if_over()
        self._is_reserved = False
        if self._is_generating:
            raise RuntimeError("an episode takes one turn at a time; await the first generate()")
        if not (self._rollout.filed_token_ids if self._past is None else self._past.tokens):
            raise RuntimeError("the context is empty; append a prompt first")

    def _completed(self, sampling: SamplingParams, options: SamplingOptions) -> SamplingParams:
        """With the run's adapter and the turn's own seed, where the episode names none."""
        if self._defaults.adapter and "adapter" not in options:
            sampling = _replace(sampling, adapter=self._defaults.adapter)
        if "seed" not in options:
            sampling = _replace(sampling, seed=self._next_seed())
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
        past, self._past = self._past, None
        if past is not None:
            self._generating.cut(self._rollout, turns=past.turns, tokens=past.tokens)
