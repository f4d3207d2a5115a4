"""LoRA adapters of a vLLM server, loaded from files by ``/v1/load_lora_adapter``.

Used by ``VllmAdapter`` and ``vllm_releases``. vLLM reads an adapter's files again if its cache was
too small, or weights were loaded, so they must stay until it is unloaded. Calls go through
``http.py``.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tidegate.engine.external.adapter import LORA_NAMES
from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.errors import EngineGone, WeightsRefused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

LOAD_TIMEOUT_S = 120.0
"""Seconds to read an adapter, after the current step."""

START_HINT = (
    "start it with --enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
    "in its environment"
)

NOT_FOUND = 404


def lora_rank_max(config: Mapping[str, Any], paths: Collection[str]) -> int:
    """Return the server's largest rank, from ``vllm_config`` and routes; 0 without LoRA."""
    lora = config.get("lora_config")
    return int(lora["max_lora_rank"]) if lora and LOAD in paths and _is_one(config) else 0


def lora_lacks(config: Mapping[str, Any]) -> str:
    """Return how to start the server so that it accepts adapters."""
    return START_HINT if _is_one(config) else "start it with --api-server-count 1"


def _is_one(config: Mapping[str, Any]) -> bool:
    """Whether there is one API server. Of several, only one would load an adapter, while any may
    get its requests."""
    return int(config.get("parallel_config", {}).get("_api_process_count") or 1) == 1


class VllmLoras:
    """Loads and unloads adapters of one server."""

    def __init__(self, http: HttpEngine) -> None:
        self._http = http

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter.

        Raises:
            WeightsRefused: vLLM refuses it; says why.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._http.call("POST", LOAD, body, timeout_s=LOAD_TIMEOUT_S)
        except HttpStatusError as refusal:
            raise WeightsRefused(f"vLLM can't load the adapter: {refusal.why}") from refusal

    async def unload(self, name: str) -> None:
        """Unload an adapter, at once for new requests."""
        try:
            await self._http.call("POST", UNLOAD, {"lora_name": name})
        except HttpStatusError as refusal:
            if refusal.status != NOT_FOUND:
                raise EngineGone(f"vLLM can't unload an adapter: {refusal}") from refusal

    async def unload_left(self, models: Mapping[str, Any]) -> None:
        """Unload the adapters that a dead worker left behind, listed in ``/v1/models``."""
        for model in models["data"]:
            if str(model["id"]).startswith(LORA_NAMES):
                await self.unload(model["id"])
