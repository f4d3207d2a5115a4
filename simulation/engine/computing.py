"""Engines in virtual time that compute their tokens: Tidegate's own engine with modelled times.

Each is an :class:`EngineLoop` with the real scheduler, runner, KV cache, staging and link, over the
simulated wire. The computation takes no virtual time; a step, a prefill and a swap take what
:class:`EngineCosts` says. So a run depends on its seed alone, not on the machine's load, and small
models can be trained as if they were large ones.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate.engine.execution.runner import Row, Runner, StepOutput, WrappedRunner
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.loop import EngineLoop
from tidegate.engine.memory.kv_size import block_tokens_default
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.processors import ProcessorRegistry
from tidegate.engine.scheduling.adapter_versions import AdapterVersions
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.engine.worker import hello_of
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.simulation.engine.wire import SimulatedLink
from tidegate.transport.messages import (
    FromOrchestrator,
    Message,
    decode_from_orchestrator,
)
from tidegate.transport.zeromq import encode_frame

LATENCY_S = 0.0005
"""Mean latency of a message, in virtual seconds; as that of scripted engines."""

STEP_TOKENS_MAX = 1024
"""Tokens computed per step, unless there are more slots; as in ``engine/worker.py``."""

IDLE_S_MIN = 0.001
"""Shortest virtual time between two rounds without a step, so that time advances."""


@dataclass(slots=True, kw_only=True)
class ComputingEngine:
    """Speed of one computing engine of a simulated run, and what the engine did."""

    costs: EngineCosts
    """Slots and times of the modelled hardware; the fields about prompts are not used."""
    tokens: int = field(default=0, init=False)
    """Number of tokens that the engine has sampled so far."""
    steps: int = field(default=0, init=False)
    swaps: int = field(default=0, init=False)
    busy_s: float = field(default=0.0, init=False)
    """Virtual seconds spent in steps and swaps."""


class EngineClock:
    """Virtual clock of one engine. It runs ahead of the event loop's while the engine is busy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now_s = loop.time()

    def catch_up(self) -> None:
        """Advance to the event loop's time, unless the engine is busy beyond it."""
        self.now_s = max(self.now_s, self._loop.time())

    def monotonic(self) -> float:
        """Return the engine's virtual time in seconds."""
        return self.now_s

    def monotonic_ns(self) -> int:
        """Return the engine's virtual time in nanoseconds."""
        return round(self.now_s * 1e9)

    def sleep(self, seconds: float, /) -> None:
        """Let virtual time pass for this engine alone."""
        self.now_s += seconds


class SimulatedSocket:
    """Engine's end of a simulated link, with the methods of a DEALER socket.

    A frame leaves at the engine's own time, so what a step sends leaves when the step ends.
    """

    def __init__(
        self,
        link: SimulatedLink,
        clock: EngineClock,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[[], None],
    ) -> None:
        self._link = link
        self._clock = clock
        self._loop = loop
        self._on_frame = on_frame
        self._arrived: deque[bytes] = deque()

    def open(self) -> None:
        """Connect the engine to the orchestrator."""
        self._link.open(self._receive)

    def _receive(self, frame: bytes) -> None:
        self._arrived.append(frame)
        self._on_frame()

    def send(self, message: Message) -> bytes:
        """Send one message at the engine's time; return its frame."""
        frame = encode_frame(message)
        self.send_again(frame)
        return frame

    def send_again(self, frame: bytes) -> None:
        """Send a frame at the engine's time."""
        self._loop.call_at(self._clock.now_s, self._link.send, frame)

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """Return the messages that have arrived; never waits, because the event loop does."""
        frames, self._arrived = self._arrived, deque()
        return [decode_from_orchestrator(frame) for frame in frames]

    def connection(self) -> int | None:
        """Return 1: computing engines have no faults, so the first connection lasts."""
        return 1

    def refusal(self) -> str | None:
        """Return None: there are no keys."""
        return None

    def fileno(self) -> int:
        """Refuse: there is no socket."""
        raise OSError("a simulated socket has no file descriptor")


class TimedRunner(WrappedRunner):
    """Runner of a model whose steps and swaps take modelled time on the engine's clock."""

    def __init__(self, runner: Runner, engine: ComputingEngine, clock: EngineClock) -> None:
        super().__init__(runner)
        self._engine = engine
        self._clock = clock

    def swap(self, weights: WeightStore) -> None:
        """Swap weights, in the time of a swap."""
        self._runner.swap(weights)
        self._engine.swaps += 1
        self._pass(self._engine.costs.swap_s)

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run a step, in the time of its rows and prefilled tokens.

        Each row's last token counts as decoded, and the tokens before it as prefilled.
        """
        output = self._runner.step(rows)
        costs, prefilled = self._engine.costs, sum(len(row.token_ids) - 1 for row in rows)
        self._engine.steps += 1
        self._engine.tokens += sum(row.sampling is not None for row in rows)
        self._pass(costs.token_s(len(rows)) + prefilled / costs.prefill_tokens_per_s)
        return output

    def _pass(self, seconds: float) -> None:
        self._engine.busy_s += seconds
        self._clock.sleep(seconds)


class ComputingHost:
    """Process of one computing engine: builds its parts, and runs its rounds on the event loop."""

    is_gone = False
    """Always false: computing engines do not crash."""

    def __init__(
        self,
        engine: ComputingEngine,
        number: int,
        *,
        context: SimulationContext,
        settings: RunSettings,
    ) -> None:
        """Make ``engine`` the engine ``engine-NUMBER`` of a run with these settings."""
        self.name = f"engine-{number}"
        self._loop = context.loop
        self._clock = EngineClock(context.loop)
        chance = random.Random(f"{settings.sampling.seed}/{number}")
        self._link = context.router.link(self.name, latency_s=LATENCY_S, chance=chance)
        self._socket = SimulatedSocket(self._link, self._clock, context.loop, self._on_frame)
        self._timer: asyncio.TimerHandle | None = None
        self._build(engine, settings)

    def _build(self, engine: ComputingEngine, settings: RunSettings) -> None:
        model = open_model(settings.model, "auto", is_deterministic=settings.engine.deterministic)
        block_tokens = block_tokens_default(
            token_bytes=model.kv_token_bytes(), state_bytes=model.state_bytes()
        )
        slots = engine.costs.slots
        limits = EngineLimits(
            max_running_turns=slots,
            max_step_tokens=max(STEP_TOKENS_MAX, slots),
            num_blocks=slots * -(-model.context_tokens_max // block_tokens),
            block_tokens=block_tokens,
            context_tokens_max=model.context_tokens_max,
            vocab_size=model.vocab_size,
        )
        self._options = OptionReader(
            vocab_size=model.vocab_size,
            max_running_turns=slots,
            tokenizer=ModelTokenizer(settings.model),
            registry=ProcessorRegistry([]),
        )
        blocks = limits.num_blocks
        runner = TimedRunner(
            model.make_runner(num_blocks=blocks, block_tokens=block_tokens), engine, self._clock
        )
        scheduler = EngineScheduler(
            limits, options=self._options, scoring=model.scoring, adapters=AdapterVersions(0)
        )
        self._staging = Staging(model.allocate, clock=self._clock, is_threaded=False)
        hello = hello_of(self.name, model, limits, epoch=0, weight_channels=["shm"])
        self._engine_loop = EngineLoop(
            OrchestratorLink(self._socket, hello, clock=self._clock),
            runner=runner,
            scheduler=scheduler,
            staging=self._staging,
            sleep_controller=SleepController(runner, self._staging, scheduler, reload=model.reload),
            clock=self._clock,
        )

    def start(self) -> None:
        """Connect, and run the first round."""
        self._socket.open()
        self._run_at(self._loop.time())

    def stop(self) -> None:
        """End the engine. Harmless if repeated."""
        if self._timer is not None:
            self._timer.cancel()
        self._link.hang_up(is_clean=True)
        self._staging.close()
        self._options.close()

    def __str__(self) -> str:
        return f"{self.name}: computing, at {self._clock.now_s:.4f} s of its time"

    def _on_frame(self) -> None:
        """Run a round now, unless a step is under way: then the next round reads the frame."""
        if self._clock.now_s <= self._loop.time():
            self._run_at(self._loop.time())

    def _run_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._run_round)

    def _run_round(self) -> None:
        """Run one round of the engine's loop, and schedule the next for when this one is over."""
        self._timer = None
        self._clock.catch_up()
        stepped = self._engine_loop.run_round(0.0)
        if self._engine_loop.end_reason is None:
            idle_s = 0.0 if stepped else max(IDLE_S_MIN, self._engine_loop.idle_s())
            self._run_at(self._clock.now_s + idle_s)
