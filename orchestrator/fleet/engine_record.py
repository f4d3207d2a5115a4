"""What has one engine said so far? Counts; it knows no other engine, and decides nothing."""

from dataclasses import dataclass

from tidegate.orchestrator.core.events import StepArrived
from tidegate.orchestrator.telemetry.statistics import EngineStatistics
from tidegate.transport.messages import Hello, Step, WeightsLive
from tidegate.transport.streams import ReceiveWindow


@dataclass(slots=True)
class Engine:
    """One engine of the fleet."""

    hello: Hello
    window: ReceiveWindow
    heard_s: float
    """When it last said anything, on the orchestrator's clock."""
    weight_version: int
    tokens: int = 0
    busy_us: int = 0
    steps: int = 0
    rows: int = 0
    rows_squared: int = 0
    rows_busy_us: int = 0
    """Each step's rows times its time, added up."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    running_turns: int = 0
    waiting_turns: int = 0
    out_of_memory_steps: int = 0
    swaps: int = 0
    standstill_us: int = 0
    """In all swaps."""
    stuck_since_s: float | None = None
    """Since when its next step is missing, or is refused whenever it comes."""
    may_return: bool = False
    """It was given up for its silence only, and is welcome again if it says hello."""

    def count(self, step: StepArrived) -> None:
        """Take a new step into its figures."""
        rows = len(step.turns)
        self.tokens += len(step.token_ids)
        self.busy_us += step.busy_us
        self.steps += 1
        self.rows += rows
        self.rows_squared += rows * rows
        self.rows_busy_us += rows * step.busy_us

    def count_drafts(self, step: Step) -> None:
        """Of a new step, what no decision needs, so that no event has it."""
        self.drafted_tokens += step.drafted_tokens
        self.accepted_tokens += step.accepted_tokens

    def count_swap(self, live: WeightsLive) -> None:
        """It serves other weights."""
        self.weight_version = live.version
        self.swaps += 1
        self.standstill_us += live.standstill_us

    def statistics(self, name: str) -> EngineStatistics:
        """A snapshot."""
        return EngineStatistics(
            name=name,
            weight_version=self.weight_version,
            running_turns=self.running_turns,
            waiting_turns=self.waiting_turns,
            out_of_memory_steps=self.out_of_memory_steps,
            tokens=self.tokens,
            busy_s=self.busy_us / 1e6,
            max_running_turns=self.hello.max_running_turns,
            steps=self.steps,
            rows=self.rows,
            rows_squared=self.rows_squared,
            rows_busy_s=self.rows_busy_us / 1e6,
            model_code=self.hello.model_code,
            dtype=self.hello.dtype,
            block_tokens=self.hello.block_tokens,
            speculation=self.hello.speculation,
            is_deterministic=self.hello.is_deterministic,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            ranks=self.hello.ranks,
            quantization=self.hello.quantization,
            swaps=self.swaps,
            standstill_s=self.standstill_us / 1e6,
        )
