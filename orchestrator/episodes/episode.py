"""The object that a user's episode gets: one rollout's context, and the model that continues it.

    async def solve(episode: Episode, task: Task) -> float:
        episode.append(task.question)
        turn = await episode.generate(max_tokens=32)
        return grade(turn.text, task)

The episode runner makes one :class:`Episode` per rollout and sends its turns to the core. The
context only grows: prompts and observations by :meth:`Episode.append`, the model's tokens by
:meth:`Episode.generate`. So the tokens that are trained are exactly those that the engine sampled.
An episode that needs more than one context forks: each branch is a row of its own. After a resume
the episode function runs again from its start, and a :class:`ReplayCursor` returns the turns that
the rollout has already.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Unpack, cast

import msgspec

from tidegate.errors import ConfigError, ContextFull, RunClosed, TurnRefused, TurnTimeout
from tidegate.orchestrator.core.events import TurnsRewarded, TurnsScored
from tidegate.orchestrator.core.rollout import Rollout, Turn, token_array
from tidegate.orchestrator.episodes.activities import SCORE
from tidegate.orchestrator.episodes.chat_template import Message
from tidegate.orchestrator.episodes.conversation import Conversation, Tools
from tidegate.orchestrator.episodes.forced_calls import Choice
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.media_parts import check_media_size
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.sampling_options import SamplingOptions, sampling_params
from tidegate.orchestrator.fleet.scores import (
    Readout,
    Score,
    ScoreQuery,
    TokenScores,
    logprob_queries,
    reward_queries,
)
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.transport.attachments import Attachment
from tidegate.transport.limits import CONTEXT_TOKENS_MAX, TURN_BYTES_MAX
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams, SubmitTurn, encode


class EpisodeBackend(Protocol):
    """Methods of :class:`EpisodeRunner` that an episode calls."""

    def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Awaitable[Turn]:
        """Request a new turn now; the result is its end. ``media`` are new in the context."""

    def rejoin(self, rollout: Rollout) -> Awaitable[Turn]:
        """Await the end of the turn that was running when the run was resumed."""

    def subscribe(
        self, rollout: Rollout, event: asyncio.Event, turn: "asyncio.Future[Any]"
    ) -> None:
        """Set ``event`` at each step with tokens of this rollout, until its ``turn`` is done."""

    def give_up_turn(self, rollout: Rollout) -> None:
        """Cancel the turn of ``generate`` or ``rejoin``."""

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Keep ``turns`` turns of the rollout, and its context up to the last kept turn's end.

        Called when an episode, run again after a resume, diverges from the turns that the rollout
        has. ``tokens``: length of the context up to which the replay matched. Does nothing to a
        discarded rollout.
        """

    def context_tokens_max(self) -> int:
        """Return the longest context that engines of the run read; 0 if unknown."""

    def is_over_budget(self, rollout: Rollout) -> bool:
        """Whether the episode has used its time budget, so that it parks before its next turn."""

    async def park(self, rollout: Rollout) -> None:
        """Return once newer weights are live, or the trainer waits for rollouts."""

    def activity(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        """Count the time within as a named activity of the episode."""

    def score(self, rollout: Rollout, queries: Sequence[ScoreQuery]) -> Awaitable[list[Score]]:
        """Have engines score the queries' tokens for this rollout's episode."""

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Make another row for this row's episode, with an empty context."""


SMALL_CONTEXT_TOKENS = 64 * 1024
"""Number of context tokens up to which a turn without media is not measured against
``TURN_BYTES_MAX``: 256 KiB of tokens, and any sampling options, always fit."""


class ScoringClient(Protocol):
    """A scorer that can be called from any event loop, such as a :class:`~tidegate.Scorer`."""

    async def score_queries(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Return one score per sequence."""


BITS_64 = (1 << 64) - 1


def turn_seed(run_seed: int, rollout: Rollout, turn: int) -> int:
    """Return a 63-bit sampling seed for a turn, by splitmix64's finaliser.

    The seed depends on the run's seed, the group, the index in the group and the turn, so it is the
    same in every run with these tasks. Each part has its own odd factor (fractions of the golden
    ratio, sqrt 2 and sqrt 3), so that small numbers do not collide.
    """
    x = run_seed + rollout.group_id * 0x9E3779B97F4A7C15
    x += rollout.index * 0x6A09E667F3BCC909 + turn * 0xBB67AE8584CAA73B
    return mixed(x) >> 1


def mixed(x: int) -> int:
    """Return splitmix64's finaliser of ``x``."""
    x &= BITS_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
    return x ^ (x >> 31)


async def with_timeout(timeout_s: float, answer: Awaitable[Turn], rollout: Rollout) -> Turn:
    """Await the turn of ``rollout`` for at most ``timeout_s``.

    Raises:
        TurnTimeout: the turn took longer.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return await answer
    except TimeoutError:
        if not clock.expired():
            raise
        raise TurnTimeout(timeout_s=timeout_s, tokens=rollout.turns[-1].length) from None


NOT_REPLAYABLE = ("cancelled", "refused")
"""Finish reasons of turns that can't be replayed, because their episode got an exception."""


class ReplayCursor:
    """Replay of a rollout's turns, for an episode that runs again after a resume."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.turns = 0
        """Number of turns replayed so far."""
        self.tokens = 0
        """Number of context tokens replayed."""

    @property
    def is_over(self) -> bool:
        """Whether all turns are replayed, so that the next one is new."""
        return self.turns >= len(self._rollout.turns)

    def follows(self, appended: "array[int]") -> bool:
        """Whether the recorded context continues with these tokens; if so, skip them."""
        end = self.tokens + len(appended)
        next_turn = self._rollout.turns[self.turns]
        if end > next_turn.start or self._rollout.token_ids[self.tokens : end] != appended:
            return False
        self.tokens = end
        return True

    @property
    def next_seed(self) -> int:
        """Seed of the next turn to replay."""
        return self._rollout.turns[self.turns].sampling.seed

    def next_turn(self, sampling: SamplingParams, media: tuple[Media, ...] = ()) -> Turn | None:
        """Return the next turn to replay, if the episode requests the same; None if it diverges."""
        turn = self._rollout.turns[self.turns]
        is_same = self.tokens == turn.start and sampling == turn.sampling and media == turn.media
        if not is_same or turn.finish_reason in NOT_REPLAYABLE:
            return None
        return turn

    def advance(self, turn: Turn) -> None:
        """Record that a turn was replayed to its end."""
        self.turns += 1
        self.tokens = turn.start + turn.length


def refuse_too_large(
    rollout: Rollout,
    sampling: SamplingParams,
    media: Sequence[Media],
    context_tokens_max: int,
) -> None:
    """Refuse a turn that no engine reads, or that does not fit one message.

    ``context_tokens_max``: longest context that engines of the run read; 0 if unknown.

    Raises:
        ContextFull: its context is too long.
        TurnRefused: context, options and media together are too large.
    """
    context = rollout.token_ids
    tokens = len(context)
    if context_tokens_max and tokens >= context_tokens_max:
        raise ContextFull(tokens=tokens, tokens_max=context_tokens_max)
    if tokens <= SMALL_CONTEXT_TOKENS and not media and not rollout.may_have_media:
        return
    if tokens > CONTEXT_TOKENS_MAX:
        raise ContextFull(tokens=tokens, tokens_max=CONTEXT_TOKENS_MAX)
    turn = SubmitTurn(
        turn=0, token_ids=context.tobytes(), sampling=sampling, media=[*rollout.media, *media]
    )
    try:
        turn_bytes = len(encode(turn))
    except (ValueError, TypeError, OverflowError) as error:  # a text that is not valid Unicode
        raise TurnRefused(f"this turn can't be sent to an engine: {error}") from None
    if turn_bytes > TURN_BYTES_MAX:
        raise TurnRefused(
            f"a turn of {turn_bytes} bytes, of which {4 * tokens} are its context; one may "
            f"have {TURN_BYTES_MAX}. Shorten the context, its options or its media"
        )


class Episode:
    """One attempt at a task, or a branch of one. It generates one turn at a time; branches generate
    theirs side by side."""

    __slots__ = (
        "__weakref__",
        "_backend",
        "_conversation",
        "_defaults",
        "_is_generating",
        "_is_over",
        "_is_reserved",
        "_model",
        "_new_media",
        "_pending_scores",
        "_replay",
        "_replay_branches",
        "_rollout",
        "_salt",
        "_turns",
        "agents",
        "branches",
    )

    def __init__(
        self,
        rollout: Rollout,
        model: ModelFiles,
        backend: EpisodeBackend,
        defaults: SamplingSettings,
        *,
        parent: "Episode | None" = None,
    ) -> None:
        """``parent``: for a branch, the episode that it was forked from."""
        self._rollout = rollout
        self._backend = backend
        self._is_over = False
        self._pending_scores: tuple[asyncio.Future[list[Score]], ...] = ()
        """Scoring calls without an answer."""
        self._salt: int = 0 if parent is None else mixed(parent._salt + len(parent.branches) + 1)
        """Separates a branch's sampling seeds from those of other rows; the same in every run."""
        self.branches: list[Episode] = []
        """Branches forked from this episode, in order."""
        self.agents: dict[str, Episode] = {}
        """Agents that :meth:`agent` has returned, by name."""
        self._turns: list[GeneratedTurn] = []
        self._conversation: Conversation[Episode] | None = None
        self._new_media: tuple[Media, ...] = ()
        """Media appended since the last turn."""
        self._model = model
        self._defaults = defaults
        self._replay = ReplayCursor(rollout) if rollout.turns else None
        """After a resume: replay of earlier turns, until all have been replayed; else None."""
        self._replay_branches = rollout.branches
        """After a resume: branches not forked again yet."""
        self._is_generating = False
        self._is_reserved = False

    @property
    def token_ids(self) -> list[int]:
        """Copy of the context's token ids so far."""
        replay, token_ids = self._replay, self._rollout.token_ids
        return (token_ids[: replay.tokens] if replay else token_ids).tolist()

    @property
    def num_tokens(self) -> int:
        """Length of the context so far, in tokens."""
        return self._replay.tokens if self._replay else len(self._rollout.token_ids)

    @property
    def turns(self) -> tuple[GeneratedTurn, ...]:
        """Turns of this row that have ended, in order; not those of its branches."""
        return tuple(self._turns)

    @property
    def retries(self) -> int:
        """Number of times that this episode was begun again after a failure of infrastructure."""
        return self._rollout.root.retries

    @property
    def media(self) -> list[Media]:
        """Media of the context, in order."""
        turns = self._rollout.turns[: self._replay.turns] if self._replay else self._rollout.turns
        return [*(each for turn in turns for each in turn.media), *self._new_media]

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being generated, and none is reserved."""
        return not self._is_generating and not self._is_reserved

    def reserve(self) -> None:
        """Reserve this row for a turn about to be generated; other callers must not continue it."""
        self._is_reserved = True

    @property
    def rollout_id(self) -> int:
        """Number of the row in its run, as in trajectories.parquet; a branch has its own."""
        return self._rollout.rollout_id

    @property
    def context_tokens_max(self) -> int:
        """Length that no context of a turn may reach."""
        return self._backend.context_tokens_max() or CONTEXT_TOKENS_MAX

    def encode(self, text: str, *, tokens_max: int | None = None) -> Awaitable[list[int]]:
        """Return a text as tokens, without special tokens; long texts are encoded in a thread.

        Raises:
            ContextFull: the text surely has ``tokens_max`` tokens or more.
        """
        return self._model.encoded(text, tokens_max)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, without special tokens."""
        return str(self._model.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return a reply's tokens as text, as :meth:`ModelFiles.reply_text`."""
        return self._model.reply_text(token_ids)

    def row_from(self, context: Sequence[int]) -> "Episode":
        """Return a row whose context is exactly ``context``. An idle row whose context is a prefix
        of ``context`` is extended; if no row is one, a new branch is made."""
        context = list(context)
        for row in sorted(self.rows, key=lambda row: -row.num_tokens):
            known = row.num_tokens
            if row.is_idle and known <= len(context) and row.token_ids == context[:known]:
                row.append(context[known:])
                row.reserve()
                return row
        branch = self.branch(context, "new_context: it continues no row")
        branch.reserve()
        return branch

    @property
    def rows(self) -> "Iterator[Episode]":
        """This episode and all episodes forked from it."""
        yield self
        for branch in self.branches:
            yield from branch.rows

    @property
    def conversation(self) -> "Conversation[Episode]":
        """State of ``generate(messages=…)`` for this episode.

        Raises:
            ModelError: the model has no chat template.
        """
        if self._conversation is None:
            self._conversation = Conversation(self, self._model)
        return self._conversation

    @property
    def index(self) -> int:
        """Index of this rollout in its group, 0 <= index < group_size."""
        return self._rollout.index

    @property
    def group_id(self) -> int:
        """Number of the group, shared by all attempts at one task; a resumed run keeps it."""
        return self._rollout.group_id

    def append(self, content: str | Sequence[int], *, media: Sequence[Media] = ()) -> None:
        """Append text or tokens (a prompt, an observation) to the context. They are never trained
        on.

        ``media``: images, audio or video whose placeholders are in ``content``, in order. The
        placeholder of an image that Tidegate reads is repeated for each of its tokens.

        Raises:
            ConfigError: the media are too many, or too large.
            ImageRefused: an image can't be read.
            ContextFull: the context is too long for any turn after it.
        """
        if self._is_over:
            self._refuse_if_over()
        if self._is_generating:
            raise RuntimeError(
                "the context can't be appended to while a turn is generated; await generate() first"
            )
        before, cache = self.num_tokens, self._model.token_cache
        if isinstance(content, str):
            limit = self.context_tokens_max
            appended = cache.of(content, tokens_before=before, tokens_max=limit)
        else:
            appended = cache.of(content)
        if media and self._model.images is not None:
            expanded, media = self._model.images.expand(appended, media, before)
            appended = token_array(expanded)
        if (tokens := before + len(appended)) > CONTEXT_TOKENS_MAX:
            raise ContextFull(tokens=tokens, tokens_max=CONTEXT_TOKENS_MAX)
        if media:
            self._add_media(media)
        if self._replay is not None:
            if self._replay.follows(appended):
                return
            self._stop_replay()
        self._rollout.extend(appended)

    def _add_media(self, media: Sequence[Media]) -> None:
        at = self.num_tokens
        appended = tuple(
            [
                each if each.position else msgspec.structs.replace(each, position=at)
                for each in media
            ]
        )
        check_media_size([*self.media, *appended])
        self._new_media += appended

    def fork(self) -> "Episode":
        """Return a branch, which has a copy of this context and continues on its own.

        Use it for sub-agents, or to try several continuations: branches generate side by side. Each
        branch with a turn is a row in the trainer's batch, with this rollout's reward and
        advantage. Tokens sampled before the fork are trained once, here; in the branch they count
        as given. Branches end with the rollout, so an episode must await those whose results it
        needs.
        """
        if self._is_generating:
            raise RuntimeError(
                "the context can't fork while a turn is generated; fork before generate(), or "
                "await it first"
            )
        return self.branch(self.token_ids, "asked", media=self.media)

    def agent(self, name: str) -> "Episode":
        """Return the episode of another trained adapter within this episode; each name has one.

        It begins empty. Its turns are sampled by that adapter, and its row goes to that adapter's
        trainer with a reward of its own: the episode returns ``{"solver": 1.0, "critic": 0.5}``, or
        one number for all. Agents may generate side by side.

        Raises:
            ConfigError: the tasks were not offered with this agent; evaluations have none.
        """
        self._refuse_if_over()
        if name not in self.agents:
            own = self._rollout.agents.get(name)
            if own is None:
                known = ", ".join(sorted(self._rollout.agents)) or "none"
                raise ConfigError(
                    f"this episode has no agent {name!r}, its agents are: {known}; offer the tasks "
                    f"with agents=[{name!r}] (in evaluations use generate(adapter={name!r}))"
                )
            self.agents[name] = Episode(own, self._model, self._backend, self._defaults)
        return self.agents[name]

    def branch(
        self, context: Sequence[int], reason: str, *, media: Sequence[Media] = ()
    ) -> "Episode":
        """Return a branch with another context; ``reason`` is recorded."""
        self._refuse_if_over()
        if self._replay_branches:
            row, *later = self._replay_branches
            self._replay_branches = tuple(later)
        else:
            row = self._backend.fork(self._rollout, reason)
        branch = Episode(row, self._model, self._backend, self._defaults, parent=self)
        self.branches.append(branch)
        branch.append(context, media=media)
        return branch

    async def park(self) -> None:
        """Wait for newer weights, and leave the engines to other rollouts meanwhile.

        Returns once newer weights are live, or the trainer waits for a batch, because no weights
        come without rollouts. Returns at once in an evaluation, and for turns replayed after a
        resume. The episode's timeout does not run meanwhile. With ``episode_park_after_s``,
        ``generate`` parks by itself.
        """
        self._refuse_if_over()
        if self._replay is None and self._rollout.group_id >= 0:
            await self._backend.park(self._rollout)

    def activity(self, name: str) -> AbstractContextManager[None]:
        """Count the time within as a named activity, and show it on the trace.

        ``with episode.activity("reward"): …`` has no other effect. Environments, tools called from
        the episode's own coroutine, and scoring count their time by themselves.
        """
        return self._backend.activity(self._rollout, name)

    def current_turn(self) -> GeneratedTurn | None:
        """Return the last turn with its tokens so far, running or ended; None before the first."""
        turns = self._rollout.turns[: self._replay.turns] if self._replay else self._rollout.turns
        return GeneratedTurn(turns[-1], self._model.tokenizer) if turns else None

    def subscribe(self, event: asyncio.Event, turn: "asyncio.Future[Any]") -> None:
        """Set ``event`` at each step with tokens of this row, until its ``turn`` is done; read them
        by :meth:`current_turn`."""
        self._backend.subscribe(self._rollout, event, turn)

    async def generate(
        self,
        *,
        messages: Sequence[Message] | None = None,
        tools: Tools | None = None,
        tool_choice: Choice = None,
        parallel_tool_calls: bool = True,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> GeneratedTurn:
        """Have the model continue the context, and append the tokens that it samples.

        ``options`` are those of :class:`SamplingOptions`: penalties, stop strings, processors and
        more. There is no ``n``, because a group is ``group_size`` samples of its prompt already.

        With ``messages`` it works as OpenAI's API: pass the whole conversation each time, which is
        rendered by the model's chat template, and add ``turn.message`` to it. Turns generated
        before keep their tokens; see :mod:`conversation` for when the context forks.
        ``tool_choice`` is OpenAI's: ``required`` or a named function constrains the turn to a tool
        call. So is ``parallel_tool_calls``: False stops the turn at the end of its first call.

        If it is cancelled, or after ``timeout_s``, the engine stops; tokens sampled so far stay in
        the context.

        Raises:
            TurnTimeout: it took longer than ``timeout_s``.
            ContextFull: the context is as long as engines read. Before that, ``max_tokens`` ends at
                the end of the engines' context, and the turn by its length.
            TurnRefused: no engine could ever serve this.
            RuntimeError: a turn of this episode is being generated, or the context is empty.
        """
        if messages is not None:
            self._refuse_if_over()
            return await self.conversation.generate(
                messages,
                tools,
                tool_choice,
                parallel_tool_calls=parallel_tool_calls,
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
        try:  # inline: a nested coroutine would be stepped with each of the turn's steps
            if self._backend.is_over_budget(self._rollout):
                await self.park()
            try:
                turn = await self._start_turn(sampling, timeout_s)
            except (asyncio.CancelledError, TurnTimeout):
                self._backend.give_up_turn(self._rollout)
                raise
        finally:
            self._is_generating = False
        self._turns.append(GeneratedTurn(turn, self._model.tokenizer))
        return self._turns[-1]

    def _refuse_turn(self) -> None:
        if self._is_over:
            self._refuse_if_over()
        self._is_reserved = False
        if self._is_generating:
            raise RuntimeError("an episode takes one turn at a time; await the first generate()")
        if not (self._rollout.filed_token_ids if self._replay is None else self._replay.tokens):
            raise RuntimeError("the context is empty; append a prompt first")

    def _completed(self, sampling: SamplingParams, options: SamplingOptions) -> SamplingParams:
        """Add the run's adapter and attachments, and the turn's seed, unless the episode gave its
        own."""
        defaults = self._defaults
        adapter = self._rollout.adapter or defaults.adapter
        added: dict[str, Any] = {}
        if adapter and "adapter" not in options:
            added["adapter"] = adapter
        for option in defaults.attachments:
            if option not in options:
                added[option] = True
        if "seed" not in options:
            added["seed"] = self._next_seed()
        return msgspec.structs.replace(sampling, **added) if added else sampling

    def _start_turn(self, sampling: SamplingParams, timeout_s: float | None) -> Awaitable[Turn]:
        media, self._new_media = self._new_media, ()  # the turn has them now
        answer: Awaitable[Turn]
        if self._replay is not None:
            answer = self._replay_turn(self._replay, sampling, media)
        else:
            answer = self._backend.generate(self._rollout, sampling, media)
        return answer if timeout_s is None else with_timeout(timeout_s, answer, self._rollout)

    def end(self, *, keeps_unrepeated: bool = False) -> None:
        """Close the context: background tasks of a returned episode can't change it any more.

        Turns that the episode had not replayed are discarded, unless ``keeps_unrepeated``: then
        another attempt may replay them.
        """
        if self._is_over:
            return
        if self.branches or self.agents:
            for branch in (*self.branches, *self.agents.values()):
                branch.end(keeps_unrepeated=keeps_unrepeated)
        if not keeps_unrepeated:
            for unforked in self._replay_branches:
                for row in unforked.rows:
                    self._backend.cut(row, turns=0, tokens=0)
            if self._replay is not None:
                self._stop_replay()
        self._is_over = True
        self._conversation = None  # it refers to this episode: a cycle
        if self._pending_scores:
            self._cancel_scores()

    def turn_events(self) -> list[TurnsRewarded | TurnsScored]:
        """Return the rewards and teacher's scores of turns, of this row, its branches and its
        agents."""
        events: list[TurnsRewarded | TurnsScored] = []
        rewards: list[tuple[int, float]] = []
        scored: list[Attachment] = []
        for turn in self._turns:
            if turn.given_reward is not None:
                rewards.append((turn.number, turn.given_reward))
            if turn.teacher_scores is not None:
                scored += turn.teacher_scores.attachments(turn.number)
        if rewards:
            events.append(TurnsRewarded(self._rollout.rollout_id, tuple(rewards)))
        if scored:
            events.append(TurnsScored(self._rollout.rollout_id, scored))
        if self.branches or self.agents:
            for branch in (*self.branches, *self.agents.values()):
                events += branch.turn_events()
        return events

    async def attach_teacher(
        self,
        by: ScoringClient | None = None,
        *,
        messages: Sequence[Message] | None = None,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> None:
        """Score the tokens of all turns so far with another model, and attach the log-probs.

        The trainer finds them as ``Batch.teacher_logprobs``, and with ``top_logprobs`` the
        teacher's most likely tokens as ``teacher_top_ids`` and ``teacher_top_logprobs``. Call it
        when the rollout is complete, before the episode returns; turns of branches are scored too.
        A later call replaces an earlier one's scores.

        ``by``: a scorer, such as ``tidegate.score_server(model=teacher)`` or its sync variant; None
        for the policy's own live weights. ``messages``: a conversation that the teacher reads in
        place of what precedes the first turn, such as one with examples (context distillation).

        Raises:
            ConfigError: ``messages`` are given, and the rollout has branches; or as :meth:`score`.
            ScoreRefused, EngineLost: as :meth:`score`.
        """
        rows = [row for row in self.rows if row._turns]
        firsts = [row._turns[0].start for row in rows]
        prompts = [row.token_ids[:first] for row, first in zip(rows, firsts, strict=True)]
        if messages is not None:
            if len(rows) > 1:
                raise ConfigError(
                    "attach_teacher(messages=…) replaces what precedes the first turn, but this "
                    "rollout has branches, which begin with turns; leave messages out"
                )
            prompts = [await self.conversation.prompt_tokens(messages, None) for _ in rows]
        contexts = [
            [*prompt, *row.token_ids[first:]]
            for row, first, prompt in zip(rows, firsts, prompts, strict=True)
        ]
        starts = [max(1, len(prompt)) for prompt in prompts]
        scores = await self.score(
            contexts, start=starts, top_logprobs=top_logprobs, temperature=temperature, by=by
        )
        for row, of_row, first, prompt in zip(rows, scores, firsts, prompts, strict=True):
            for turn in row._turns:
                start = turn.start - first + len(prompt)
                turn.teacher_scores = of_row.part(start, len(turn.token_ids))

    def _next_seed(self) -> int:
        """Return the sampling seed of the next turn.

        A turn that is replayed after a resume keeps its recorded seed. A new seed would be derived
        from the group's number, and that changes when a group is split, which trains some of its
        rollouts first and moves the rest to a new group.
        """
        if self._replay is not None:
            return self._replay.next_seed
        rollout = self._rollout
        return turn_seed(self._defaults.seed + self._salt, rollout, len(rollout.turns))

    async def _replay_turn(
        self, replay: ReplayCursor, sampling: SamplingParams, media: tuple[Media, ...]
    ) -> Turn:
        """Replay the next turn, or request a new turn if the episode has diverged."""
        turn = replay.next_turn(sampling, media)
        if turn is None:
            self._stop_replay()
            return await self._backend.generate(self._rollout, sampling, media)
        if turn.finish_reason is None:
            turn = await self._backend.rejoin(self._rollout)
        replay.advance(turn)
        if replay.is_over:
            self._replay = None
        return turn

    def _stop_replay(self) -> None:
        """Stop replaying: discard the turns that the episode has not repeated.

        The cut removes every token after the last repeated turn. Tokens that the episode has
        appended again since that turn are put back.
        """
        replay, self._replay = self._replay, None
        if replay is None:
            return
        rollout = self._rollout
        repeated = rollout.token_ids[: replay.tokens]
        self._backend.cut(rollout, turns=replay.turns, tokens=replay.tokens)
        rollout.extend(repeated[rollout.sampled_end :])

    # ------------------------------------------------------------ scoring

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
        by: ScoringClient | None = None,
    ) -> list[TokenScores]:
        """Return the log-probs of each sequence's tokens from ``start`` on, under the policy's live
        weights.

        As :meth:`tidegate.Rollouts.score`, while the episode runs, also beside its turns. The
        sequences are whole contexts: ``[episode.token_ids + answer for answer in answers]``.

        ``by``: scorer to use in place of the policy's engines, such as one of
        ``tidegate.score_server(model=reference)``, or its sync variant.

        If the call is cancelled, with the episode or by ``asyncio.timeout``, engines stop scoring.

        Raises:
            ScoreRefused: no engine can ever answer, e.g. a sequence is too long.
            EngineLost: several engines were lost with the same sequence, or the scorer's last one.
        """
        queries = logprob_queries(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", await self._score(queries, by))

    async def reward(
        self, sequences: Sequence[Any], *, by: ScoringClient | None = None
    ) -> list[Readout]:
        """Return a classification head's outputs for each sequence; otherwise as :meth:`score`."""
        return cast("list[Readout]", await self._score(reward_queries(sequences), by))

    async def _score(self, queries: Sequence[ScoreQuery], by: ScoringClient | None) -> list[Score]:
        self._refuse_if_over()
        answer: Awaitable[list[Score]]
        if by is None:
            answer = self._backend.score(self._rollout, queries)
        else:
            answer = by.score_queries(queries)
        scores = asyncio.ensure_future(answer)
        self._pending_scores += (scores,)
        try:
            with self._backend.activity(self._rollout, SCORE):
                return await scores
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_over and task is not None and not task.cancelling():
                self._refuse_if_over()
            raise
        finally:
            scores.cancel()
            self._pending_scores = tuple(p for p in self._pending_scores if p is not scores)

    @property
    def awaits_scores(self) -> bool:
        """Whether this episode, a branch or an agent of it awaits scores."""
        rows = [row for each in (self, *self.agents.values()) for row in each.rows]
        return any(row._pending_scores for row in rows)

    def _cancel_scores(self) -> None:
        """Cancel scoring calls that background tasks of the episode still await."""
        for scores in self._pending_scores:
            scores.cancel()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RunClosed(
                "the episode has returned, so its context can't change any more; end its "
                "background tasks before it returns"
            )
