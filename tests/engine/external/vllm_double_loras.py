"""LoRA adapters of the vLLM double, as seen in vLLM 0.32.0, around a real tiny model.

Rows with an adapter are computed with it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.weights.lora import Adapter
from tidegate.errors import TidegateError

PEFT_PREFIX = "base_model.model."


class Loras:
    """Adapters of one server: names and directories."""

    def __init__(self, runner: ModelRunner, rank_max: int) -> None:
        """``rank_max`` 0: the server was started without LoRA."""
        self._runner = runner
        self._rank_max = rank_max
        self.paths: dict[str, str] = {}
        self.loads = self.most = 0
        """Number of loads, and the most adapters at a time."""
        self.fails: Callable[[], str] = lambda: ""
        """Error message of the next load; empty for none."""

    @property
    def routes(self) -> dict[str, Any]:
        if not self._rank_max:
            return {}
        return {"/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload}

    @property
    def config(self) -> dict[str, Any] | None:
        return {"max_lora_rank": self._rank_max, "max_loras": 2} if self._rank_max else None

    @property
    def cards(self) -> list[dict[str, Any]]:
        """Return the adapters' entries in ``/v1/models``."""
        return [{"id": name, "root": path, "parent": "tiny"} for name, path in self.paths.items()]

    def refusal(self, body: dict[str, Any]) -> Response | None:
        """Return why a request is refused."""
        salt = body.get("cache_salt", "")
        if len(salt) > 128 or set("@/\\\0") & set(salt):
            return error_body(
                400, "Parameter 'cache_salt' must be at most 128 characters and must …"
            )
        if body["model"] not in ("tiny", *self.paths):
            return error_body(404, f"The model `{body['model']}` does not exist.")
        return None

    def read_again(self) -> None:
        """Forget all adapters after a weight update; their files are read again on use."""
        self._runner.weights.adapters = {
            name: self._read(Path(path)) for name, path in self.paths.items()
        }

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self.paths:
            return error_body(
                400, f"The lora adapter '{name}' has already been loaded. If you want …"
            )
        if why := self.fails():
            return error_body(500, f"Call to add_lora method failed: {why}")
        try:
            adapter = self._read(Path(path))
        except FileNotFoundError:
            return error_body(404, f"Loading lora {name} failed: No adapter found for {path}")
        except TidegateError as error:
            return error_body(500, f"Call to add_lora method failed: {error}")
        self.paths[name] = path
        self.loads, self.most = self.loads + 1, max(self.most, len(self.paths))
        self._runner.weights.adapters = dict(self._runner.weights.adapters) | {name: adapter}
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _read(self, path: Path) -> Adapter:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
        assert all(name.startswith(PEFT_PREFIX) for name in tensors)
        assert {name.split(".")[-3] for name in tensors} == set(config["target_modules"])
        named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        scale = config["lora_alpha"] / config["r"]
        return self._runner.weights.make_adapter(named, scale)

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.paths:
            return error_body(404, f"The lora adapter '{name}' cannot be found.")
        del self.paths[name]  # running requests continue with it
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def error_body(status: int, message: str) -> Response:
    """Return an error's body as vLLM writes it."""
    kind = {403: "PermissionDeniedError", 503: "ServiceUnavailableError"}.get(status, "Bad")
    reported_labels = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": reported_labels}, status)
