"""Capabilities and speeds of simulated engines, and the hello that reports the capabilities."""

from dataclasses import dataclass

from tidegate.simulation.checks.model import VOCAB_SIZE
from tidegate.transport.media import MediaKind
from tidegate.transport.messages import KV_POLICIES, PAUSE_MODES, PROTOCOL, Hello, SubmitTurn
from tidegate.transport.sleep_messages import SleepLevel

CONTEXT_TOKENS_MAX = 1 << 20

TEMPERATURE_MAX = 1e6
"""Largest temperature; a turn with a higher one is refused, as by real engines."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Cost model of an engine: a few figures that predict its step times well enough to plan by."""

    slots: int = 64
    """Most running turns."""
    step_s: float = 0.008
    """Fixed time of a step, in seconds; a step samples one token of each running turn."""
    running_turn_s: float = 0.00012
    """Additional time of a step for each running turn, in seconds."""
    prefill_tokens_per_s: float = 25_000.0
    swap_s: float = 2.0
    """Time for which a weight swap stops the engine, in seconds."""
    prompt_tokens: int = 512
    group_size: int = 16
    """Rollouts per group; their prompt is prefilled once, so each bears 1/``group_size`` of it."""

    def token_s(self, running: int) -> float:
        """Return the duration of one step with ``running`` turns, in seconds."""
        return self.step_s + self.running_turn_s * running

    @property
    def peak_tokens_per_s(self) -> float:
        """Sampled tokens per second with every slot in use."""
        return self.slots / self.token_s(self.slots)


HASHING_COSTS = EngineCosts(slots=8, step_s=0.01, running_turn_s=0.001, prefill_tokens_per_s=5000.0)
"""Costs of a simulated engine, if nothing else is said: a few turns, and slow prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineSpec:
    """Speeds, memory and optional features of one simulated engine while no fault is injected."""

    costs: EngineCosts = HASHING_COSTS
    staging_s: float = 0.05
    """Time to copy one version of the weights, in seconds."""
    chunk_tokens: int = 256
    """Maximum number of tokens prefilled in one step."""
    tokens_per_step: int = 1
    """Number of tokens that one step samples for each running turn."""
    blocks: int | None = None
    """Number of KV blocks; None means unlimited KV memory."""
    block_tokens: int = 8
    sleep_levels: tuple[SleepLevel, ...] = (1, 2)
    media: tuple[MediaKind, ...] = ()
    """Media kinds that the engine accepts beside tokens; the engine ignores their content."""
    reports_prefills: bool = True
    """Whether the engine reports which weight versions computed a context's KV.

    Third-party engines can't report that.
    """
    hands_turns_back: bool = False
    """Whether turns that lack KV blocks end with ``abort``, rather than wait for free blocks."""

    adapters_max: int = 0
    """Number of adapter versions in memory; 0: it serves no adapters of their own versions."""
    preemption_share: float = 0.01
    """Probability per step that one turn's KV is evicted although blocks are free."""
    supports_submit_turns: bool = True

    def rank(self, turn: SubmitTurn) -> int:
        """Return a turn's rank in the queue; the lowest starts first."""
        return turn.priority

    def busy_s(self, running_turns: int, prefilled_tokens: int) -> float:
        """Return the duration of one step, in seconds."""
        costs = self.costs
        return costs.token_s(running_turns) + prefilled_tokens / costs.prefill_tokens_per_s

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks that hold ``tokens`` positions."""
        return -(-tokens // self.block_tokens)


def hello_of(engine: str, epoch: int, spec: SimulatedEngineSpec) -> Hello:
    """Build the hello of an engine process with these capabilities."""
    return Hello(
        protocol=PROTOCOL,
        engine=engine,
        epoch=epoch,
        weight_version=0,
        architecture="Hash",
        vocab_size=VOCAB_SIZE,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        max_running_turns=spec.costs.slots,
        num_kv_blocks=spec.blocks or CONTEXT_TOKENS_MAX,
        block_tokens=spec.block_tokens,
        pause_modes=PAUSE_MODES,
        kv_policies=KV_POLICIES,
        weight_channels=["shm"],
        sleep_levels=list(spec.sleep_levels),
        supports_submit_turns=spec.supports_submit_turns,
        media=list(spec.media),
        adapters_max=spec.adapters_max,
        score_kinds=["logprobs"],
        is_deterministic=True,  # each token is a hash of the tokens before it
    )
