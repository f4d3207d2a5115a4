"""Request bodies of vLLM's paths beside completions: aborts, adapters, weight updates, RPCs.

Unknown fields are ignored, as in vLLM.
"""

from typing import Any

import msgspec


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /abort_requests``; without ids, of all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``; the server reads the directory."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


class UpdateRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weights``: one piece for all, or a list with a piece per rank.

    prime-rl's orchestrator sends ``weight_dir`` alone: a directory of all weights.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class InitRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class FinishRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /finish_weight_update``; its body may be empty."""

    weight_version: str | None = None


class ResetRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /reset_prefix_cache``, as SkyRL sends it; vLLM has the field in the query."""

    reset_running_requests: bool = False


class VersionRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weight_version``: a name for what is served already."""

    new_version: str
    abort_all_requests: bool = False
    """Field of SGLang's API, where it defaults to true; vLLM has no such field."""


class CheckRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /weight_checker``."""

    action: str
    baseline: dict[str, str] | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /collective_rpc``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
