"""Scripted engines for users' tests: the test gives their tokens, speed and faults.

Tokens come from a script instead of a model. Messages, steps in virtual time, and reactions to
pauses, weights and faults are those of the simulated engine.
"""

import functools
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.rollout import Turn
from tidegate.orchestrator.episodes.model_files import ModelFiles, read_model_files
from tidegate.simulation.checks.model import HashedContext, Sampled, output_tokens
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.engine import EngineHost
from tidegate.simulation.engine.spec import HASHING_COSTS, SimulatedEngineSpec
from tidegate.simulation.faults.faults import Fault, FaultKind
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

LATENCY_S = 0.0005
"""Mean latency of a message, in virtual seconds."""

LOGPROB = -1.0
"""Log-prob of every token, sampled or scored."""

END = "<end>"
"""Stop token of the byte-level tokenizer."""

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request for one turn, as an engine received it."""

    engine: str
    version: int
    """Weight version that samples the turn's first token on this engine."""
    text: str
    """Prompt of the turn, decoded without special tokens."""
    token_ids: tuple[int, ...]
    """Token ids of the prompt, special tokens included."""
    said: str
    """Text that the turn had sampled before this submission, on this engine or another."""
    max_tokens: int
    """Most tokens that the turn may still sample."""
    media: tuple[Media, ...] = ()
    """Images, audio and video of the context."""


Answer = str | Sequence[int]
"""Output of one turn, as text or token ids. A stop token is appended unless the output ends with
the stop token."""

Says = Callable[[TurnRequest], Answer] | Sequence[Answer] | str | None
"""Script of the model: a sequence of answers, given out in the order in which turns begin; or a
function, called once per turn; or one text, the answer to every turn. None: random letters, drawn
from the turn's seed."""


@dataclass(slots=True, kw_only=True)
class ScriptedEngine:
    """Speed, limits and faults of one simulated engine of a test. Times are virtual seconds."""

    step_s: float = 0.01
    """Duration of a decode step, which gives each running turn one token, in virtual seconds."""
    running_turn_s: float = 0.0
    """Additional duration of a step for each running turn, in virtual seconds."""
    max_running_turns: int = 8
    staging_s: float = 0.05
    """Time that the engine needs to copy new weights, in virtual seconds."""
    joins_at_s: float = 0.0
    """Virtual time at which the engine's first process starts, in seconds."""
    crashes_at_token: int | None = None
    """Number of tokens, over all turns, after which the engine crashes. The tokens still arrive."""
    restart_s: float = 1.0
    """Virtual seconds after which a crashed engine restarts, with the model's own weights; infinity
    if the engine never restarts."""
    aborts_at_token: int | None = None
    """Number of tokens, over all turns, after which the engine aborts its running turns once, to be
    continued elsewhere."""
    refuses_publishes: int = 0
    """Number of published weight versions that the engine's first process refuses because they
    don't fit."""
    sleep_levels: tuple[SleepLevel, ...] = (1, 2)
    """Sleep levels that the engine supports; empty if the engine can't sleep."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media that the engine accepts: ``image``, ``audio``, ``video``."""
    refuses_wakes: int = 0
    """Number of wake requests that the engine's first process refuses for lack of memory."""
    requests: list[TurnRequest] = field(default_factory=list, init=False)
    """Requests that the engine received, in order."""
    tokens: int = field(default=0, init=False)
    """Number of tokens that the engine has sampled so far."""
    _host: "ScriptedHost | None" = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the engine in spans and statistics: ``engine-0``, …"""
        return self._serving.name

    @property
    def weight_version(self) -> int | None:
        """Weight version that the engine serves now; None while its process is not running."""
        engine = self._serving.engine
        return engine.turns.live.version if engine is not None and engine.is_alive else None

    @property
    def asleep(self) -> list[MemoryTag]:
        """Kinds of the engine's memory that are asleep now."""
        engine = self._serving.engine
        return engine.sleep.asleep if engine is not None else []

    def crash(self) -> None:
        """End the process now without a goodbye. Messages already sent still arrive."""
        self._serving.crash_now()

    def leave(self) -> None:
        """Let the engine send a goodbye and end. Another process starts soon after."""
        self._serving.inject(FaultKind.LEAVE)

    def hang(self, seconds: float) -> None:
        """Make the engine neither read, compute nor send for ``seconds`` of virtual time."""
        self._serving.inject(FaultKind.HANG, seconds)

    def slow_down(self, seconds: float) -> None:
        """Make each step take twenty times as long, for ``seconds`` of virtual time."""
        self._serving.inject(FaultKind.SLOW, seconds)

    def cut(self, seconds: float) -> None:
        """Break the engine's connection, and reconnect after ``seconds`` of virtual time."""
        self._serving.inject(FaultKind.CUT, seconds)

    def abort_turns(self) -> None:
        """Abort all running turns, to be continued elsewhere."""
        self._serving.abort_turns()

    @property
    def _serving(self) -> "ScriptedHost":
        if self._host is None:
            raise RuntimeError("this engine has not been started; give it to a run's `engines`")
        return self._host

    def begin(self, host: "ScriptedHost") -> None:
        """Attach the engine to a run that starts now.

        Raises:
            ConfigError: the engine was attached to another run before.
        """
        if self._host is not None:
            raise ConfigError(
                f"{self.name} already belongs to another run; create one engine per run"
            )
        self._host = host


class ScriptedHost(EngineHost):
    """Host that runs a :class:`ScriptedEngine` with the faults of its script."""

    def __init__(
        self,
        plan: ScriptedEngine,
        number: int,
        *,
        context: SimulationContext,
        chance: random.Random,
        on_exit: Callable[[str, str], None],
    ) -> None:
        """Make ``plan`` the engine ``engine-NUMBER`` of the run.

        The other arguments are those of :class:`EngineHost`.
        """
        spec = SimulatedEngineSpec(
            costs=replace(
                HASHING_COSTS,
                slots=plan.max_running_turns,
                step_s=plan.step_s,
                running_turn_s=plan.running_turn_s,
            ),
            staging_s=plan.staging_s,
            sleep_levels=plan.sleep_levels,
            media=plan.media,
        )
        name = f"engine-{number}"
        super().__init__(
            name, spec, context=context, latency_s=LATENCY_S, chance=chance, on_exit=on_exit
        )
        self._plan = plan
        self._is_over = False
        plan.begin(self)
        if plan.joins_at_s:
            self.plan(Fault(kind=FaultKind.LATE, at_s=plan.joins_at_s))

    @property
    def is_gone(self) -> bool:
        """Whether the engine crashed and never restarts."""
        return self._is_over

    def inject(self, kind: FaultKind, lasts_s: float = 0.0) -> None:
        """Inject a fault now."""
        self._inject(Fault(kind=kind, lasts_s=lasts_s))

    def crash_now(self) -> None:
        """Kill the process now, and restart it after the engine's ``restart_s``."""
        self._is_over = math.isinf(self._plan.restart_s)
        self.crash(self._plan.restart_s, is_noticed=True, is_clean=True)

    def abort_turns(self) -> None:
        """Abort all running turns of the process, if there is one."""
        if self.engine is not None and self.engine.is_alive:
            self.engine.turns.abort_running()

    def stepped(self, tokens: int) -> None:
        """Count the tokens of a finished step, and inject the faults that are due at that count."""
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
    """Model of a run whose tokens come from the test's script."""

    def __init__(
        self,
        says: Says,
        files: ModelFiles,
        plans: dict[str, ScriptedEngine],
        turn_of: Callable[[str, int], Turn | None],
    ) -> None:
        """Take the script and the engines by name.

        ``turn_of`` maps an engine and its handle to the turn, so that a turn continued on another
        engine is distinguished from a new turn.
        """
        self._says = says
        self._turn_of = turn_of
        self._next: Iterator[Answer] = iter(())
        if isinstance(says, Sequence):
            self._next = itertools.repeat(says) if isinstance(says, str) else iter(says)
        self._files = files
        self._plans = plans
        self._answers: dict[Turn | None, list[int]] = {}
        """Answer of each turn, kept so that a turn continued on another engine gets the rest.

        The key None is for submissions without a known turn.
        """
        self._begun: dict[tuple[str, int], list[int]] = {}
        """Answer of each submission that has begun, by engine and handle."""

    def next_token(
        self,
        context: HashedContext,
        message: SubmitTurn,
        *,
        content: int,
        version: int,
        engine: str,
    ) -> Sampled:
        """Return the next token of the turn's answer, or the stop token after the answer's end."""
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
        """Return :data:`LOGPROB` for each token from ``start`` on."""
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
            answer: Answer = _random_letters(seed)
        elif callable(self._says):
            answer = self._says(request)
        else:
            try:
                answer = next(self._next)
            except StopIteration:
                raise ConfigError(
                    f"the script has only {len(self._says)} answers, but another turn was "
                    f"requested after {request.text[-200:]!r}; add an answer, or script a function"
                ) from None
        ids = self._encode(answer) if isinstance(answer, str) else list(answer)
        return ids if ids[-1:] == [self._stop] else [*ids, self._stop]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._files.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _random_letters(seed: int) -> str:
    """Return random letters whose number has a long tail: most answers are short."""
    chance = random.Random(seed)
    return "".join(chance.choices(LETTERS, k=output_tokens(seed)))


def files_of(model: Path) -> ModelFiles:
    """Read the tokenizer of a model directory; return a byte-level one if there is no directory."""
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
