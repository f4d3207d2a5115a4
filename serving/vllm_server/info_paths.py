"""What is there? Health, models, configuration and figures, by vLLM's paths.

It changes nothing.
"""

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.vllm_server.metrics import metrics_text
from tidegate.serving.vllm_server.model_info import limits_of
from tidegate.serving.vllm_server.paths import Answer, Paths
from tidegate.serving.vllm_server.server_info import server_info

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

VLLM_VERSION = "0.33.0"
"""Whose API this is."""

PATHS = Paths()


@PATHS.on("GET", "/health")
async def health(desks: "Desks", http: HttpRequest) -> Answer:
    """Empty, while there is an engine."""
    limits_of(desks.scheduler)
    return None


@PATHS.on("GET", "/ping")
async def ping(desks: "Desks", http: HttpRequest) -> Answer:
    """As ``/health``."""
    limits_of(desks.scheduler)
    return None


@PATHS.on("GET", "/version")
async def version(desks: "Desks", http: HttpRequest) -> Answer:
    """Whose API this is."""
    return {"version": VLLM_VERSION}


@PATHS.on("GET", "/v1/models")
async def models(desks: "Desks", http: HttpRequest) -> Answer:
    """The model and its adapters."""
    return desks.info.listed(
        created_s=desks.created_s,
        context_tokens_max=limits_of(desks.scheduler).context_tokens_max,
    )


@PATHS.on("GET", "/server_info")
async def about(desks: "Desks", http: HttpRequest) -> Answer:
    """What clients look for in vLLM's configuration."""
    return server_info(desks, as_json=http.query_params.get("config_format") == "json")


@PATHS.on("GET", "/metrics")
async def metrics(desks: "Desks", http: HttpRequest) -> Answer:
    """Prometheus text."""
    is_sleeping = desks.control.is_sleeping
    text = metrics_text(
        desks.counts,
        desks.scheduler,
        model=desks.info.name,
        is_sleeping=is_sleeping,
        longest_block_s=desks.longest_block_s(),
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@PATHS.on("GET", "/load")
async def load(desks: "Desks", http: HttpRequest) -> Answer:
    """How many requests are being answered."""
    return {"server_load": len(desks.requests)}
