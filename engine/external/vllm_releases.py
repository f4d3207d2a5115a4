"""Capabilities of a vLLM server, from its version, routes and start-up settings.

Used by ``VllmAdapter.open``. Version limits were read in the releases, and tried with 0.32.0.
Depends on no connection: the adapter passes what the server answered. ``vllm_weights.py`` reads the
capabilities too. Built on ``vllm_loras.py``.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.engine.external.vllm_loras import lora_lacks, lora_rank_max
from tidegate.engine.external.vllm_patches import EXTENSION
from tidegate.errors import ConfigError

OLDEST_SUPPORTED = (0, 21)
"""First release with pauses over several API servers, and updates that begin and end."""

LABELS_SINCE = (0, 27)
"""First release with ``/weight_info`` and ``/update_weight_version``."""

SPANS_SINCE = (0, 32)
"""First release with ``weight_versions`` in the last event: whose weights sampled which tokens."""

TRANSFER_SINCE = (0, 32)
"""First release in which a trainer passes an NCCL unique id in ``init_info``, and
may leave again."""

PATCHES_SINCE = (0, 29)
"""First release with ``checkpoint_weight_patch.py``, which changes elements by the checkpoint's
names and indices. Before, ``sparse_nccl`` had those of one rank's parameters. To 0.33 no route but
NCCL leads to it, so workers need an extension."""

TRANSFER_ROUTES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
    "/get_world_size",
)

DEV_ROUTES = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/server_info")
GENERATE = "/inference/v1/generate"

START_HINT = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)

RUNNING_TURNS_DEFAULT = 64

SALT_CHARACTERS_MAX = 128
"""Longest salt that 0.32.0 accepts."""
SALT_CHARACTERS_FORBIDDEN = frozenset("@/\\\0")
"""Characters that 0.32.0 refuses in a salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerInfo:
    """Properties of one running server."""

    version: tuple[int, int]
    text: str
    """Version as the server reports it."""
    has_labels: bool
    """Whether weights can be named, and their name read."""
    has_spans: bool
    has_processed_logprobs: bool
    running_turns_max: int
    top_logprobs_max: int
    num_blocks: int
    block_tokens: int
    model: str
    """Path or name that the server was started with."""
    dtype: str
    """Compute dtype, with ``--dtype auto`` resolved; empty if unknown."""
    stream_interval_tokens: int
    """Its --stream-interval, which requests can only raise."""
    can_sleep: bool
    """Whether it was started with --enable-sleep-mode."""
    is_on_cpu: bool
    returns_routed_experts: bool
    """Whether it was started with --enable-return-routed-experts."""
    returns_sampling_mask: bool
    """Whether it was started with --return-sampling-mask."""
    lora_rank_max: int
    """Largest LoRA rank; 0 without LoRA, for the reason in :attr:`lora_lacks`."""
    lora_lacks: str
    applies_patches: bool
    """Whether its workers have :data:`~.vllm_patches.EXTENSION`, and compute with the parameters
    as loaded: on a CPU, with quantization or LoRA they may have other copies."""
    has_transfer_routes: bool
    transfer_backend: str
    """Backend of its --weight-transfer-config; empty without one."""


def read_server_info(text: str, paths: Collection[str], info: Mapping[str, Any]) -> VllmServerInfo:
    """Evaluate ``/version``, the paths of ``/openapi.json``, and ``/server_info``.

    Raises:
        ConfigError: the server is too old, or lacks routes.
    """
    version = _version(text)
    if version < OLDEST_SUPPORTED:
        raise ConfigError(
            f"vLLM {text} is too old: it lacks the pauses and weight updates that a run needs; "
            f"use {OLDEST_SUPPORTED[0]}.{OLDEST_SUPPORTED[1]} or newer"
        )
    check_routes(text, paths)
    config = info.get("vllm_config", {})
    model, cache = config.get("model_config", {}), config.get("cache_config", {})
    scheduler = config.get("scheduler_config", {})
    sequences = scheduler.get("max_num_seqs")
    top = model.get("max_logprobs")
    mode = str(model.get("logprobs_mode", ""))
    if mode.endswith("logits"):
        raise ConfigError(
            f"this vLLM {text} reports logits as log-probs (--logprobs-mode {mode}), on which "
            f"training is impossible; start it with --logprobs-mode processed_logprobs"
        )
    has_labels = version >= LABELS_SINCE and "/weight_info" in paths
    return VllmServerInfo(
        version=version,
        text=text,
        has_labels=has_labels,
        has_spans=has_labels and version >= SPANS_SINCE,
        has_processed_logprobs=mode.endswith("processed_logprobs"),
        running_turns_max=int(sequences or RUNNING_TURNS_DEFAULT),
        top_logprobs_max=20 if top is None else (2**31 if top == -1 else int(top)),
        num_blocks=int(cache.get("num_gpu_blocks") or 0),
        block_tokens=int(cache.get("block_size") or 0),
        model=str(model.get("model", "")),
        dtype=str(model.get("dtype") or "").removeprefix("torch."),
        stream_interval_tokens=int(scheduler.get("stream_interval") or 1),
        can_sleep="/wake_up" in paths and bool(model.get("enable_sleep_mode")),
        is_on_cpu=config.get("device_config", {}).get("device") == "cpu",
        returns_routed_experts=bool(model.get("enable_return_routed_experts")),
        returns_sampling_mask=bool(model.get("return_sampling_mask")),
        lora_rank_max=lora_rank_max(config, paths),
        lora_lacks=lora_lacks(config),
        applies_patches=(
            version >= PATCHES_SINCE
            and config.get("parallel_config", {}).get("worker_extension_cls") == EXTENSION
            and config.get("device_config", {}).get("device") == "cuda"
            and not model.get("quantization")
            and not config.get("lora_config")
        ),
        has_transfer_routes=all(path in paths for path in TRANSFER_ROUTES),
        transfer_backend=str((config.get("weight_transfer_config") or {}).get("backend", "")),
    )


def check_routes(text: str, paths: Collection[str]) -> None:
    """Refuse a server without the routes that every run needs.

    Raises:
        ConfigError: a route is missing; says how to start the server.
    """
    missing = [path for path in (*DEV_ROUTES, GENERATE) if path not in paths]
    if missing:
        raise ConfigError(f"this vLLM {text} has no {', '.join(missing)}; {START_HINT}")


def refuse_transfer(release: VllmServerInfo, url: str, backend: str) -> None:
    """Refuse a server that accepts no weights by ``backend``, ``nccl`` or ``ipc``.

    Raises:
        ConfigError: it does not; says why.
    """
    if release.version < TRANSFER_SINCE or not release.has_transfer_routes:
        reason = f"use {TRANSFER_SINCE[0]}.{TRANSFER_SINCE[1]} or newer"
    elif release.is_on_cpu:
        reason = "it has no GPU"
    elif release.transfer_backend != backend:
        reason = (
            f"it was started with {release.transfer_backend or 'no'} weight transfer; start it "
            f"""with --weight-transfer-config '{{"backend": "{backend}"}}'"""
        )
    else:
        return
    raise ConfigError(
        f"vLLM {release.text} at {url} can't be given weights by {backend}: {reason}. Or leave "
        f"#weights= out to load files"
    )


def accepted_salt(salt: str) -> str:
    """Hash a salt that vLLM would refuse, because it is too long or has forbidden characters."""
    is_valid = len(salt) <= SALT_CHARACTERS_MAX and not SALT_CHARACTERS_FORBIDDEN & set(salt)
    return salt if is_valid else hashlib.sha256(salt.encode()).hexdigest()


def _version(text: str) -> tuple[int, int]:
    match_ = re.match(r"(\d+)\.(\d+)", text)
    if match_ is None:
        raise ConfigError(f"a server that reports version {text!r} is not vLLM")
    return int(match_[1]), int(match_[2])
