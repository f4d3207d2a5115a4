"""Sizes of an engine's KV cache, from the memory free at start, and of its blocks.

``--num-kv-blocks`` and ``--block-tokens`` override them. The functions are pure: the caller
measures the memory of the device or the host.
"""

from pathlib import Path

KV_BYTES_MIN = 256 * 1024 * 1024
"""Size if less memory is free, or if the number of processes that share it is not given: 262,144
tokens of a float32 model with 2 layers of 2 KV heads of 32, but only 2,340 of a Qwen3-0.6B in
bfloat16."""

HOST_KV_BYTES_MAX = 4 * 1024**3
"""Default limit on a host, whose memory other processes use too."""

HOST_SHARE = 0.25
"""Share of a host's available memory for all engines and the trainer of a run: small, because the
cache is written once at start and then takes its size whether it is used or not."""

DEVICE_SHARE = 0.9
"""Share of a device's free memory for its engines; the rest is for activations."""

WEIGHT_SETS = 2
"""Sets of weights that an engine holds during an update: the live one, and the staged one."""

BLOCK_TOKENS_MIN = 16
"""Tokens of a KV block of a model of attention only."""

BLOCK_TOKENS_MAX = 256
"""Tokens of a default KV block, however large a model's recurrent state: prompts that are shorter
than a block are not shared."""


def block_tokens_default(*, token_bytes: int, state_bytes: int) -> int:
    """Return the tokens of a block whose keys and values take as much memory as its state.

    Args:
        token_bytes: bytes of one position's keys and values.
        state_bytes: bytes of the recurrent state that a block holds; 0 without any.
    """
    tokens = BLOCK_TOKENS_MIN
    while tokens < BLOCK_TOKENS_MAX and tokens * token_bytes < state_bytes:
        tokens *= 2
    return tokens


def kv_bytes(
    *,
    available_bytes: int,
    sharers: int,
    weights_bytes: int,
    on_host: bool,
    share: float | None = None,
) -> int:
    """Return the bytes of an engine's KV cache.

    Args:
        available_bytes: memory that is free, before this engine has loaded its weights.
        sharers: number of processes that divide it: the engines there, and the trainer.
        weights_bytes: bytes of one set of weights.
        on_host: whether it is host memory, and not device memory.
        share: share of ``available_bytes`` that all of them may take, weights included, in (0, 1];
            None: ``HOST_SHARE`` within ``HOST_KV_BYTES_MAX``, or ``DEVICE_SHARE``.
    """
    is_limited = on_host and share is None
    if share is None:
        share = HOST_SHARE if on_host else DEVICE_SHARE
    left = int(available_bytes * share) // sharers - WEIGHT_SETS * weights_bytes
    return max(KV_BYTES_MIN, min(left, HOST_KV_BYTES_MAX) if is_limited else left)


def stored_bytes(model: Path) -> int:
    """Return the bytes of the weights that a model directory stores."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
