"""LoRA adapters of an SGLang server, loaded from files by ``/load_lora_adapter``.

Used by ``SglangAdapter``. SGLang may evict the least recently used adapter and read its files
again, so they must stay until it is unloaded. Unloading waits for the requests that use the
adapter. Calls go through ``http.py``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.engine.external.adapter import LORA_NAMES
from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.engine.weights.lora import RANK_MAX
from tidegate.errors import EngineGone, WeightsRefused

LORA_TIMEOUT_S = 120.0
"""Seconds to read an adapter, or to abort the requests that use it."""

START_HINT = (
    "start it with --enable-lora --max-lora-rank RANK --lora-target-modules all, and leave "
    "#weights= out of its URL, because adapters are files that both must see"
)


def lora_rank_max(settings: Mapping[str, Any]) -> int:
    """Return the largest rank that the server accepts, from ``/server_info``; 0 without LoRA."""
    if not settings.get("enable_lora"):
        return 0
    return int(settings.get("max_lora_rank") or RANK_MAX)


class SglangLoras:
    """Loads and unloads adapters of one server."""

    def __init__(self, http: HttpEngine) -> None:
        self._http = http

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter.

        Raises:
            WeightsRefused: SGLang refuses it; says why.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._call("/load_lora_adapter", body)
        except HttpStatusError as refusal:
            raise WeightsRefused(f"SGLang can't load the adapter: {refusal.why}") from refusal

    async def unload(self, name: str) -> None:
        """Unload an adapter. No request may use it except those that are being aborted."""
        try:
            await self._call("/unload_lora_adapter", {"lora_name": name})
        except HttpStatusError as refusal:
            if name not in await self._names():
                return  # an earlier call unloaded it, and its answer was lost
            raise EngineGone(f"SGLang can't unload an adapter: {refusal}") from refusal

    async def unload_left(self) -> None:
        """Unload the adapters that a dead worker left behind."""
        for name in await self._names():
            if name.startswith(LORA_NAMES):
                await self.unload(name)

    async def _names(self) -> list[str]:
        models = (await self._http.call("GET", "/v1/models"))["data"]
        return [str(model["id"]) for model in models]

    async def _call(self, path: str, body: dict[str, str]) -> None:
        await self._http.call("POST", path, body, timeout_s=LORA_TIMEOUT_S)
