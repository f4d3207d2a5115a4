"""Engines of a user's test: they say and suffer what the test's author has written down.

An engine's tokens come from a script instead of a model; all else about it is as in the simulation:
its messages, its steps in virtual time, what pauses, weights and faults do to it.
"""

import functools
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.rollout import Turn
from tidegate.orchestrator.episodes.model_files import ModelFiles, read_model_files
from tidegate.simulation.context import SimulationContext
from tidegate.simulation.engine_spec import SimulatedEngineSpec
from tidegate.simulation.faults import Fault, FaultKind
from tidegate.simulation.host import EngineHost
from tidegate.simulation.model import HashedContext, Sampled, output_tokens
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

LATENCY_S = 0.0005
"""Of a message, on the mean."""

LOGPROB = -1.0
"""Of every token, scripted or given."""

END = "<end>"
"""The stop token of text that is spelled in bytes."""

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request that an engine was sent: what to continue, and how."""

    engine: str
    version: int
    """The weights it begins with."""
    text: str
    """The context, decoded; special tokens are left out."""
    token_ids: tuple[int, ...]
    """The same, with all."""
    said: str
    """What the turn had said before, here or on another engine, when it came to this one."""
    max_tokens: int
    """Left to say."""
    media: tuple[Media, ...] = ()
    """What the context has beside tokens."""


Answer = str | Sequence[int]
"""Text, or token ids. A stop token follows, unless it ends with one."""

Says = Callable[[TurnRequest], Answer] | Sequence[Answer] | str | None
"""What the model says: one answer after another, in the order in which turns begin; or what a
function returns, which is called once per turn; or always the same text. None: some letters."""


@dataclass(slots=True, kw_only=True)
class ScriptedEngine:
    """One engine of a test: how fast it is, and what becomes of it. Times are virtual seconds."""

    step_s: float = 0.01
    """Per decode step, which gives each running turn one token."""
    max_running_turns: int = 8
    staging_s: float = 0.05
    """To copy new weights."""
    joins_at_s: float = 0.0
    crashes_at_token: int | None = None
    """Once it has sampled so many, over all its turns; they arrive."""
    restart_s: float = 1.0
    """A crashed engine is started again after so long, with the model's own weights; infinity:
    never."""
    aborts_at_token: int | None = None
    """Once it has sampled so many, it ends its running turns, to be continued elsewhere."""
    refuses_publishes: int = 0
    """So many of the first new weights don't fit."""
    sleep_levels: tuple[SleepLevel, ...] = (1, 2)
    """Those it can sleep at; none: it can't."""
    media: tuple[MediaKind, ...] = ()
    """What it reads beside tokens: ``image``, ``audio``, ``video``."""
    refuses_wakes: int = 0
    """So many times it finds no memory to wake in."""
    requests: list[TurnRequest] = field(default_factory=list, init=False)
    """What it was asked, in order."""
    tokens: int = field(default=0, init=False)
    """Sampled so far."""
    _host: "ScriptedHost | None" = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """As in spans and statistics: ``engine-0``, …"""
        return self._serving.name

    @property
    def weight_version(self) -> int | None:
        """What it serves now; None while it isn't there."""
        engine = self._serving.engine
        return engine.turns.version if engine is not None and engine.is_alive else None

    @property
    def asleep(self) -> list[MemoryTag]:
        """Which of its memory sleeps now."""
        engine = self._serving.engine
        return engine.sleep.asleep if engine is not None else []

    def crash(self) -> None:
        """End the process now, without a word; what it has said arrives."""
        self._serving.crash_now()

    def leave(self) -> None:
        """Say goodbye; another process is started soon."""
        self._serving.suffer(FaultKind.LEAVE)

    def hang(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._serving.suffer(FaultKind.HANG, seconds)

    def slow_down(self, seconds: float) -> None:
        """Take twenty times as long for each step, for a while."""
        self._serving.suffer(FaultKind.SLOW, seconds)

    def cut(self, seconds: float) -> None:
        """Break its connection; it is made anew after a while."""
        self._serving.suffer(FaultKind.CUT, seconds)

    def abort_turns(self) -> None:
        """End all running turns, to be continued elsewhere."""
        self._serving.abort_turns()

    @property
    def _serving(self) -> "ScriptedHost":
        if self._host is None:
            raise RuntimeError("this engine has not been started; give it to a run's `engines`")
        return self._host

    def begin(self, host: "ScriptedHost") -> None:
        """Be the engine of a run that starts now.

        Raises:
            ConfigError: it was that of another.
        """
        if self._host is not None:
            raise ConfigError(f"{self.name} is of another run already; make one engine for each")
        self._host = host


class ScriptedHost(EngineHost):
    """Runs an engine as its author wants it."""

    def __init__(
        self,
        plan: ScriptedEngine,
        number: int,
        *,
        world: SimulationContext,
        chance: random.Random,
        on_exit: Callable[[str, str], None],
    ) -> None:
        """``plan`` is ``engine-NUMBER`` of the run from now on; the rest is as for any host."""
        traits = SimulatedEngineSpec(
            step_s=plan.step_s,
            running_turn_s=0.0,
            staging_s=plan.staging_s,
            max_running_turns=plan.max_running_turns,
            sleep_levels=plan.sleep_levels,
            media=plan.media,
        )
        name = f"engine-{number}"
        super().__init__(
            name, traits, world=world, latency_s=LATENCY_S, chance=chance, on_exit=on_exit
        )
        self._plan = plan
        self._is_over = False
        plan.begin(self)
        if plan.joins_at_s:
            self.plan(Fault(kind=FaultKind.LATE, at_s=plan.joins_at_s))

    @property
    def is_gone(self) -> bool:
        """Whether it crashed, and will never be started again."""
        return self._is_over

    def suffer(self, kind: FaultKind, lasts_s: float = 0.0) -> None:
        """Let something go wrong now."""
        self._suffer(Fault(kind=kind, lasts_s=lasts_s))

    def crash_now(self) -> None:
        """Kill the process as its author wants it."""
        self._is_over = math.isinf(self._plan.restart_s)
        self.crash(self._plan.restart_s, is_noticed=True, is_clean=True)

    def abort_turns(self) -> None:
        """Hand all running turns back."""
        if self.engine is not None and self.engine.is_alive:
            self.engine.turns.abort_running()

    def stepped(self, tokens: int) -> None:
        """It has sampled so many tokens, and said so."""
        plan, before = self._plan, self._plan.tokens
        plan.tokens += tokens
        if plan.aborts_at_token is not None and before < plan.aborts_at_token <= plan.tokens:
            self.abort_turns()
        if plan.crashes_at_token is not None and before < plan.crashes_at_token <= plan.tokens:
            self.crash_now()

    def _restart(self) -> None:
        super()._restart()
        if self.engine is not None and self._epoch == 1:
            self.engine.staging.refusals_due = self._plan.refuses_publishes
            self.engine.sleep.refusals_due = self._plan.refuses_wakes


class ScriptedModel:
    """Says what it was told to."""

    def __init__(
        self,
        says: Says,
        files: ModelFiles,
        plans: dict[str, ScriptedEngine],
        turn_of: Callable[[str, int], Turn | None],
    ) -> None:
        """``turn_of`` an engine's handle tells a turn that goes on elsewhere from a new one."""
        self._says = says
        self._turn_of = turn_of
        self._next: Iterator[Answer] = iter(())
        if isinstance(says, Sequence):
            self._next = itertools.repeat(says) if isinstance(says, str) else iter(says)
        self._files = files
        self._plans = plans
        self._answers: dict[Turn | None, list[int]] = {}
        """A turn that goes on elsewhere says the rest. None: of those that nobody waits for."""
        self._begun: dict[tuple[str, int], list[int]] = {}
        """(engine, handle) -> its answer, of the submissions that have begun."""

    def next_token(
        self,
        context: HashedContext,
        message: SubmitTurn,
        *,
        content: int,
        version: int,
        engine: str,
    ) -> Sampled:
        """The next token of the turn's answer, and its stop token after that."""
        submitted = len(message.token_ids) // 4
        index = message.sampled_before + len(context.tokens) - submitted
        prompt_tokens = submitted - message.sampled_before
        answer = self._begun.get((engine, message.turn))
        if answer is None:
            request = self._request(message, prompt_tokens, version, engine)
            self._plans[engine].requests.append(request)
            turn = self._turn_of(engine, message.turn)
            if turn not in self._answers:
                self._answers[turn] = self._answer(request, message.sampling.seed)
            answer = self._begun[engine, message.turn] = self._answers[turn]
        return Sampled(answer[index] if index < len(answer) else self._stop, LOGPROB)

    def logprobs(self, tokens: "array[int]", start: int, *, content: int) -> list[float]:
        """As of what it says itself."""
        return [LOGPROB] * (len(tokens) - start)

    @property
    def _stop(self) -> int:
        return self._files.stop_token_ids[0] if self._files.stop_token_ids else 0

    def _request(
        self, message: SubmitTurn, prompt_tokens: int, version: int, engine: str
    ) -> TurnRequest:
        tokens = array("i", message.token_ids)
        decode = self._files.tokenizer.decode
        return TurnRequest(
            engine=engine,
            version=version,
            text=decode(tokens[:prompt_tokens].tolist()),
            token_ids=tuple(tokens[:prompt_tokens]),
            said=decode(tokens[prompt_tokens:].tolist()),
            max_tokens=message.sampling.max_tokens,
            media=tuple(message.media),
        )

    def _answer(self, request: TurnRequest, seed: int) -> list[int]:
        if self._says is None:
            said: Answer = _babble(seed)
        elif callable(self._says):
            said = self._says(request)
        else:
            try:
                said = next(self._next)
            except StopIteration:
                raise ConfigError(
                    f"the script has {len(self._says)} answers, and all are given; another turn "
                    f"was asked for after {request.text[-200:]!r}"
                ) from None
        ids = self._encode(said) if isinstance(said, str) else list(said)
        return ids if ids[-1:] == [self._stop] else [*ids, self._stop]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._files.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _babble(seed: int) -> str:
    """Many answers are short, and few are very long."""
    chance = random.Random(seed)
    return "".join(chance.choices(LETTERS, k=output_tokens(seed)))


def files_of(model: Path) -> ModelFiles:
    """The tokenizer of a model directory; of a model that isn't there, one that spells in bytes."""
    return read_model_files(model) if model.is_dir() else _bytes()


@functools.cache
def _bytes() -> ModelFiles:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return ModelFiles(Path("bytes"), tokenizer, (len(vocabulary),))
