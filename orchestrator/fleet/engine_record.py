"""Counters of one engine, updated from its steps and messages.

``statistics().engines`` and the watchdog read them.
"""

from dataclasses import dataclass

from tidegate.orchestrator.core.events import StepArrived
from tidegate.orchestrator.telemetry.statistics import EngineStatistics
from tidegate.transport.messages import Hello, Step, WeightsLive
from tidegate.transport.streams import ReceiveWindow


@dataclass(slots=True)
class Engine:
    """State and counters of one engine of the fleet."""

    hello: Hello
    window: ReceiveWindow
    last_message_s: float
    """Time of its last message, on the orchestrator's clock."""
    weight_version: int
    tokens: int = 0
    busy_us: int = 0
    steps: int = 0
    rows: int = 0
    rows_squared: int = 0
    rows_busy_us: int = 0
    """Sum over steps of rows times time, in microseconds."""
    full_steps: int = 0
    """Number of steps beside which turns waited."""
    full_rows: int = 0
    full_busy_us: int = 0
    waiting_us: int = 0
    """Sum over steps of waiting turns times time, in microseconds."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    running_turns: int = 0
    waiting_turns: int = 0
    out_of_memory_steps: int = 0
    weight_swaps: int = 0
    weight_swap_stall_us: int = 0
    """Time without decoding in all weight swaps, in microseconds."""
    stuck_since_s: float | None = None
    """Time since which the next step is missing or always refused; None if neither."""
    is_draining: bool = False
    """Whether the engine is about to leave, and gets no more work."""
    may_return: bool = False
    """Whether the engine was removed only for its silence, so that it may rejoin by a hello."""

    def count(self, step: StepArrived) -> None:
        """Add a new step to the counters."""
        rows = len(step.turns)
        self.tokens += len(step.token_ids)
        self.busy_us += step.busy_us
        self.steps += 1
        self.rows += rows
        self.rows_squared += rows * rows
        self.rows_busy_us += rows * step.busy_us

    def count_load(self, step: Step) -> None:
        """Add a step's figures that the event lacks because no decision needs them."""
        if step.queued_turns:
            self.waiting_us += step.queued_turns * step.busy_us
            self.full_steps += 1
            self.full_rows += len(step.turns) // 4
            self.full_busy_us += step.busy_us
        self.draft_tokens += step.drafted_tokens
        self.accepted_draft_tokens += step.accepted_tokens

    def count_swap(self, live: WeightsLive) -> None:
        """Count a swap to other weights."""
        self.weight_version = live.version
        self.weight_swaps += 1
        self.weight_swap_stall_us += live.stall_us

    def statistics(self, name: str) -> EngineStatistics:
        """Return a snapshot."""
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
            full_steps=self.full_steps,
            full_rows=self.full_rows,
            full_busy_s=self.full_busy_us / 1e6,
            waiting_turns_s=self.waiting_us / 1e6,
            model_code=self.hello.model_code,
            dtype=self.hello.dtype,
            block_tokens=self.hello.block_tokens,
            speculative_method=self.hello.speculative_method,
            is_deterministic=self.hello.is_deterministic,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            tensor_parallel_size=self.hello.tensor_parallel_size,
            quantization=self.hello.quantization,
            weight_swaps=self.weight_swaps,
            weight_swap_stall_s=self.weight_swap_stall_us / 1e6,
            state="draining" if self.is_draining else "serving",
            device=self.hello.device,
        )
