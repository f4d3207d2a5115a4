"""How does vLLM get LoRA adapters, and forget them? By ``/v1/load_lora_adapter``, from files.

Knows nothing of turns or versions. vLLM reads an adapter's files again whenever its cache of them
was too small, or weights were loaded: so they stay until it is unloaded.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tidegate.engine.external.adapter import LORA_NAMES
from tidegate.engine.external.http import HttpEngine, Refusal
from tidegate.errors import EngineGone, WeightsRefused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

LOAD_TIMEOUT_S = 120.0
"""To read an adapter; it waits for the step that runs."""

START_IT_SO = (
    "start it with --enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
    "in its environment"
)

NOT_FOUND = 404


def lora_rank_max(config: Mapping[str, Any], paths: Collection[str]) -> int:
    """Of adapters that this server takes, by its ``vllm_config`` and routes; 0: none."""
    lora = config.get("lora_config")
    return int(lora["max_lora_rank"]) if lora and LOAD in paths and _is_one(config) else 0


def lora_lacks(config: Mapping[str, Any]) -> str:
    """What else it would take, if it takes none."""
    return START_IT_SO if _is_one(config) else "start it with --api-server-count 1"


def _is_one(config: Mapping[str, Any]) -> bool:
    """Of several API servers one alone hears of an adapter, and any may get a request for it."""
    return int(config.get("parallel_config", {}).get("_api_process_count") or 1) == 1


class VllmLoras:
    """One server's."""

    def __init__(self, http: HttpEngine) -> None:
        self._http = http

    async def load(self, name: str, directory: Path) -> None:
        """Have it read one.

        Raises:
            WeightsRefused: it says why.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._http.call("POST", LOAD, body, timeout_s=LOAD_TIMEOUT_S)
        except Refusal as refusal:
            raise WeightsRefused(f"vLLM can't load it: {refusal.why}") from refusal

    async def unload(self, name: str) -> None:
        """Have it forget one, at once for new requests."""
        try:
            await self._http.call("POST", UNLOAD, {"lora_name": name})
        except Refusal as refusal:
            if refusal.status != NOT_FOUND:
                raise EngineGone(f"vLLM keeps an adapter: {refusal}") from refusal

    async def unload_left(self, models: Mapping[str, Any]) -> None:
        """Those of an adapter worker that died, as ``/v1/models`` has them."""
        for model in models["data"]:
            if str(model["id"]).startswith(LORA_NAMES):
                await self.unload(model["id"])
