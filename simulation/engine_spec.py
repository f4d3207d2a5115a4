"""Capabilities of a simulated engine: its memory, its speeds and what its hello says."""

from dataclasses import dataclass

from tidegate.simulation.model import VOCAB_SIZE
from tidegate.transport.media import MediaKind
from tidegate.transport.messages import PROTOCOL, Hello
from tidegate.transport.sleep_messages import SleepLevel

CONTEXT_TOKENS_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineSpec:
    """Capabilities of one engine, as long as nothing is wrong with it."""

    step_s: float = 0.01
    """Of any step: reading the weights once."""
    running_turn_s: float = 0.001
    """More per turn in the step."""
    prefill_tokens_per_s: float = 5000.0
    staging_s: float = 0.05
    """To copy one version of the weights."""
    max_running_turns: int = 8
    chunk_tokens: int = 256
    """Tokens prefilled per step, at most."""
    tokens_per_step: int = 1
    """Sampled per turn."""
    blocks: int | None = None
    """Of KV; None has no end of it."""
    block_tokens: int = 8
    sleep_levels: tuple[SleepLevel, ...] = (1, 2)
    media: tuple[MediaKind, ...] = ()
    """What it reads beside tokens: it looks at none of it."""
    tells_prefills: bool = True
    """Whether it says whose weights computed a context's KV; other people's engines can't."""
    hands_turns_back: bool = False
    """Whether turns without room end with ``abort``, rather than wait for it."""

    def busy_s(self, running_turns: int, prefilled_tokens: int) -> float:
        """What one step takes."""
        prefill_s = prefilled_tokens / self.prefill_tokens_per_s
        return self.step_s + self.running_turn_s * running_turns + prefill_s

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold so many positions."""
        return -(-tokens // self.block_tokens)


def hello_of(engine: str, epoch: int, traits: SimulatedEngineSpec) -> Hello:
    """What an engine like this says of itself."""
    return Hello(
        protocol=PROTOCOL,
        engine=engine,
        epoch=epoch,
        weight_version=0,
        architecture="Hash",
        vocab_size=VOCAB_SIZE,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        max_running_turns=traits.max_running_turns,
        num_blocks=traits.blocks or CONTEXT_TOKENS_MAX,
        block_tokens=traits.block_tokens,
        pause_modes=["abort", "keep", "wait"],
        kv_policies=["keep", "recompute"],
        weight_channels=["shm"],
        sleep_levels=list(traits.sleep_levels),
        takes_turns_together=True,
        media=list(traits.media),
        scores=["logprobs"],
        is_deterministic=True,  # tokens are hashes of what came before them
    )
