"""Version, settings and model routes of the vLLM double, as seen in vLLM 0.32.0."""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

if TYPE_CHECKING:
    from tests.engine.external.vllm_double import VllmDouble

BLOCK_TOKENS, BLOCKS_EACH, REQUESTS_MAX = 16, 16, 8
CONTEXT_TOKENS_MAX = BLOCK_TOKENS * BLOCKS_EACH


class About:
    """One server's answers."""

    def __init__(self, double: "VllmDouble") -> None:
        self._double = double

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._double.version})

    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE vllm:num_preemptions_total counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="tiny"} '
            f"{self._double.preemptions}.0\n"
        )

    async def openapi(self, request: Request) -> Response:
        body: list[str] = self._double.config["body"]
        schemas: dict[str, Any] = {"GenerateRequest": {"properties": {name: {} for name in body}}}
        paths: dict[str, Any] = {path: {} for path in self._double.paths}
        return JSONResponse({"paths": paths, "components": {"schemas": schemas}})

    async def models(self, request: Request) -> Response:
        failure = {"id": "tiny", "max_model_len": CONTEXT_TOKENS_MAX}
        return JSONResponse({"data": [failure, *self._double.loras.cards]})

    async def server_info(self, request: Request) -> Response:
        if why := self._double.config.get("server_info_error"):
            body = {"error": {"message": why, "type": "InternalServerError", "code": 500}}
            return JSONResponse(body, status_code=500)
        return JSONResponse(
            {
                "vllm_config": {
                    "model_config": {
                        "model": self._double.config["model"],
                        "logprobs_mode": self._double.config["logprobs_mode"],
                        "max_logprobs": 20,
                        "quantization": self._double.config["quantization"],
                        "dtype": self._double.config["dtype"],
                        **self._double.attachment_flags,
                        "enable_sleep_mode": self._double.config["enable_sleep_mode"],
                    },
                    "scheduler_config": {
                        "max_num_seqs": REQUESTS_MAX,
                        "stream_interval": self._double.config["stream_interval"],
                    },
                    "cache_config": {"block_size": BLOCK_TOKENS, "num_gpu_blocks": 128},
                    "parallel_config": {
                        "worker_extension_cls": self._double.config["worker_extension_cls"]
                    },
                    "device_config": {"device": self._double.config["device"]},
                    "lora_config": self._double.loras.config,
                    "weight_transfer_config": self._double.config["weight_transfer"],
                }
            }
        )
