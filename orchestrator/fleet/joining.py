"""May an engine that says hello be of this run? If not, why, and what is to be changed.

What it says is believed; whether it is true, its messages show.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.transport.messages import PROTOCOL, Hello, KvPolicy

ENGINE_NAME_BYTES_MAX = 200
"""ZeroMQ identities are at most 255 bytes."""

ENGINES_MAX = 4096
"""More than one process can hear; a peer that joins under ever new names is stopped there."""


@dataclass(frozen=True, slots=True)
class Demands:
    """What a run wants of each of its engines."""

    is_deterministic: bool
    quantization: str
    """What weights are rounded to; empty: nothing."""
    kv_policy: KvPolicy | None
    """None: any."""
    weight_channel: str | None
    """None: any."""


def objection(
    peer: bytes,
    hello: Hello,
    demands: Demands,
    engines: Mapping[str, Engine],
    newest_version: int,
) -> str | None:
    """Why this engine can't join those that are there; None if it can.

    ``newest_version``: of the weights that this run has published.
    """
    return (
        _of_its_name(peer, hello, engines)
        or _of_what_it_can(hello, demands)
        or _of_its_weights(hello, demands, engines, newest_version)
    )


def _of_its_name(peer: bytes, hello: Hello, engines: Mapping[str, Engine]) -> str | None:
    if hello.protocol != PROTOCOL:
        return (
            f"engine {hello.engine!r} speaks protocol {hello.protocol}, this run {PROTOCOL}; "
            f"run the same version of Tidegate on both ends"
        )
    if not 0 < len(hello.engine.encode()) <= ENGINE_NAME_BYTES_MAX:
        return f"engine names have 1 to {ENGINE_NAME_BYTES_MAX} bytes, got {hello.engine!r}"
    if not hello.engine.isprintable():
        return f"engine names are printable, got {hello.engine!r}"
    if len(engines) >= ENGINES_MAX and hello.engine not in engines:
        return f"this run has {len(engines)} engines, and takes no more"
    if hello.engine.encode() != peer:
        return f"engine {hello.engine!r} must connect under its own name, not {peer!r}"
    return None


def _of_what_it_can(hello: Hello, demands: Demands) -> str | None:
    if hello.max_running_turns < 1:
        return f"max_running_turns must be >= 1, got {hello.max_running_turns}"
    if demands.is_deterministic and not hello.is_deterministic:
        return (
            f"engine {hello.engine!r} gives a turn other bits in other batches, and this run "
            f"is deterministic; start the engine with --deterministic"
        )
    if hello.quantization != demands.quantization:
        return (
            f"engine {hello.engine!r} rounds weights to {hello.quantization or 'nothing'!r}, "
            f"and this run's are to be rounded to {demands.quantization or 'nothing'!r}; start "
            f"both with the same quantize"
        )
    if demands.kv_policy is not None and demands.kv_policy not in hello.kv_policies:
        can = ", ".join(map(repr, hello.kv_policies)) or "nothing"
        return (
            f"engine {hello.engine!r} ({hello.model_code or hello.architecture}) can't do "
            f"kv_policy={demands.kv_policy!r} and be right about whose weights sampled what; it "
            f"can do {can}: set that"
        )
    return None


def _of_its_weights(
    hello: Hello, demands: Demands, engines: Mapping[str, Engine], newest_version: int
) -> str | None:
    if demands.weight_channel not in (None, *hello.weight_channels):
        return (
            f"engine {hello.engine!r} has no weight channel {demands.weight_channel!r}, and "
            f"could never serve what this run publishes; it has "
            f"{', '.join(hello.weight_channels) or 'none'}: set weight_channel to one of these"
        )
    if hello.weight_version > newest_version:
        return (
            f"engine {hello.engine!r} serves weights v{hello.weight_version}, but this run has "
            f"published no newer ones than v{newest_version}; start the engine anew"
        )
    for other in engines.values():
        if other.hello.engine != hello.engine and other.hello.vocab_size != hello.vocab_size:
            return (
                f"engine {hello.engine!r} serves a vocabulary of {hello.vocab_size} tokens, "
                f"{other.hello.engine!r} one of {other.hello.vocab_size}; all must serve the "
                f"same model"
            )
    return None
