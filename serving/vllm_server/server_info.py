"""What does the server say of itself? The parts of vLLM's configuration that clients look for.

It changes nothing.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidegate.serving.vllm_server.model_info import limits_of

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

LORA_RANK_MAX = 512
"""What an engine refuses beyond."""

LORAS_MAX = 1024
"""Adapters served side by side. They are limited by memory alone; some number must be said."""


def server_info(desks: "Desks", *, as_json: bool) -> dict[str, Any]:
    """The body of ``/server_info``."""
    config = _config(desks)
    return {
        "vllm_config": config if as_json else repr(config),
        "vllm_env": {},
        "system_env": {"tidegate": importlib.metadata.version("tidegate")},
    }


def _config(desks: "Desks") -> dict[str, Any]:
    limits, settings = limits_of(desks.scheduler), desks.settings
    return {
        "model_config": {
            "model": str(desks.info.path),
            "served_model_name": desks.info.name,
            "dtype": f"torch.{desks.info.dtype}",
            "max_model_len": limits.context_tokens_max,
            "logprobs_mode": "processed_logprobs",
        },
        # One server that answers for all engines, so what reaches it reaches them all.
        "parallel_config": {
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "world_size": 1,
        },
        "lora_config": {"max_lora_rank": LORA_RANK_MAX, "max_loras": LORAS_MAX},
        "scheduler_config": {
            "max_num_seqs": settings.engine.max_running_turns * settings.fleet.engines
        },
        "cache_config": {"enable_prefix_caching": True},
        "weight_transfer_config": {"backend": desks.weight_backend},
        "instance_id": desks.instance_id,
    }


def openapi(paths: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """The body of ``/openapi.json``: ``paths`` are methods, paths and what they do."""
    about = {"title": "Tidegate, vLLM's API", "version": importlib.metadata.version("tidegate")}
    listed: dict[str, Any] = {}
    for method, path, summary in paths:
        entry = {"summary": summary, "responses": {"200": {"description": "Done"}}}
        listed.setdefault(path, {})[method.lower()] = entry
    return {"openapi": "3.1.0", "info": about, "paths": listed}
