"""Parts of an HTTP server over a run's engines, and the API keys that its paths need.

``serving/vllm_server.py`` serves the paths of vLLM's and SGLang's APIs with :func:`server_app`.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from tidegate.orchestrator.settings.config import RunSettings
from tidegate.serving.control.pauses import EnginePauses
from tidegate.serving.control.sglang_tensors import UpdateGroups
from tidegate.serving.control.weight_updates import WeightUpdates
from tidegate.serving.http.errors import ApiError, VllmErrors
from tidegate.serving.http.scaffold import Answer, ApiPath, api_app, key_of
from tidegate.serving.http.server import AccessPolicy, Headers
from tidegate.serving.openai.active_requests import ActiveRequests
from tidegate.serving.openai.completions import Completer
from tidegate.serving.openai.model_info import ModelInfo
from tidegate.serving.openai.response_store import ResponseStore

if TYPE_CHECKING:
    from tidegate.orchestrator.core.core import Core
    from tidegate.orchestrator.fleet.fleet import Fleet

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one request's body: prompts of several million tokens, as JSON."""

SGLANG_VERSION = "0.5.23"
"""Version of SGLang whose API the routes of ``serving/sglang/`` are."""


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Parts of the server of one run, which the handlers call."""

    settings: RunSettings
    core: "Core"
    fleet: "Fleet"
    info: ModelInfo
    requests: ActiveRequests
    completer: Completer
    pauses: EnginePauses
    weights: WeightUpdates
    groups: UpdateGroups
    """Process groups that SGLang's routes have joined."""
    paths: Sequence[ApiPath]
    """All paths of the server."""
    weight_backend: str
    """How weights are received: ``disk``, ``gloo``, ``nccl`` or ``ipc``."""
    created_s: int
    """Unix time of the server's start."""
    instance_id: str
    longest_block_s: Callable[[], float]
    """Longest time in seconds for which the run's event loop was blocked."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """Answers that requests of ``/v1/responses`` can continue, of all clients."""

    @property
    def num_sequences_max(self) -> int:
        """Number of requests that all engines together run at once."""
        return self.settings.engine.max_running_turns * self.settings.fleet.engines


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets that requests show as ``Authorization: Bearer``; None where none is needed."""

    api_key: str | None
    """Needed by every path that is not open; by control paths only if there is no control token."""
    control_token: str | None
    """Needed by control paths; opens every other path, too."""

    def are_shown(self, shown: str) -> bool:
        """Whether ``shown`` is one of the secrets."""
        return any(_is_equal(shown, key) for key in (self.api_key, self.control_token) if key)

    def refuse(self, path: ApiPath, shown: str) -> None:
        """Raise ApiError unless ``shown`` opens a path."""
        if self.control_token and _is_equal(shown, self.control_token):
            return
        if path.is_control and self.control_token:
            raise ApiError(
                401,
                f"Unauthorized: {path.path} wants the server's control token, as the header "
                f"Authorization: Bearer TOKEN. For trainers that send none, start the server with "
                f"--no-control-token",
            )
        if self.api_key and not path.is_open and not _is_equal(shown, self.api_key):
            raise ApiError(
                401,
                f"Unauthorized: {path.path} wants the server's API key, as the header "
                f"Authorization: Bearer KEY",
            )


def _is_equal(shown: str, key: str) -> bool:
    return secrets.compare_digest(shown.encode(), key.encode())


def server_app(
    parts: ServerParts,
    keys: Keys,
    *,
    bound_host: str = "127.0.0.1",
    allowed_hosts: frozenset[str] = frozenset(),
) -> ASGIApp:
    """Make the application, behind its access guard."""

    async def call(path: ApiPath, http: HttpRequest) -> Answer:
        keys.refuse(path, key_of(http))
        return await path.handle(parts, http)

    def shows_key(headers: Headers) -> bool:
        return keys.are_shown(headers.bearer)

    policy = AccessPolicy(bound_host, allowed_hosts, shows_key)
    return api_app(parts.paths, call, VllmErrors(), policy, body_bytes_max=BODY_BYTES_MAX)
