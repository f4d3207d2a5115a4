"""Doctor's adapter for vLLM, and for servers with vLLM's API, such as Tidegate's server.

Implements :class:`ExaminedEngine`. Uses the token-id routes if they are on, else the OpenAI ones.
:mod:`measuring` chooses it by the engine's URL.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.cli.engine_doctor.examined import ProbeRequest, ProbeResponse
from tidegate.cli.engine_doctor.http import LOAD_TIMEOUT_S, Http, HttpReply
from tidegate.cli.engine_doctor.measurements import EngineKind, Identity
from tidegate.errors import EngineLost

GENERATE = "/inference/v1/generate"
RPC = "/collective_rpc"
HTTP_FORBIDDEN = 403

_HITS = re.compile(r"^vllm:prefix_cache_hits_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def identify_vllm(http: Http) -> Identity | None:
    """Return the server's identity; None if it does not have vLLM's API."""
    models = http.get("/v1/models")
    if not models.is_ok or not isinstance(models.body, dict) or not models.body.get("data"):
        return None
    version = http.get("/version")
    reported: dict[str, Any] = version.body if isinstance(version.body, dict) else {}
    model = models.body["data"][0]
    return Identity(
        kind=_kind(reported, model),
        version=reported.get("version") if version.is_ok else None,
        model=model["id"],
        context_tokens_max=model.get("max_model_len"),
        paths=_paths(http),
        settings={},
    )


def _kind(reported: Mapping[str, Any], model: Mapping[str, Any]) -> EngineKind:
    owner = str(model.get("owned_by", ""))
    return "tidegate" if "tidegate" in (owner + str(reported)).lower() else "vllm"


def _paths(http: Http) -> frozenset[str]:
    schema = http.get("/openapi.json")
    paths = schema.body.get("paths", {}) if schema.is_ok and isinstance(schema.body, dict) else {}
    routes = set(paths)
    # Listed even if switched off: only a request shows it. An empty prompt is always refused.
    if GENERATE in routes or not routes:
        refused = http.post(GENERATE, {"token_ids": [], "sampling_params": {}})
        routes.discard(GENERATE)
        if refused.status not in (HTTP_FORBIDDEN, 404, 405):
            routes.add(GENERATE)
    return frozenset(routes)


class ExaminedVllm:
    """A server with vLLM's API; implements :class:`ExaminedEngine`."""

    def __init__(self, http: Http, identity: Identity) -> None:
        self.identity = identity
        self._http = http
        self._by_tokens = GENERATE in identity.paths

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate with token ids or with ``/v1/completions``; see :class:`ExaminedEngine`."""
        if self._by_tokens:
            return _from_tokens(_choice(self._http.post(GENERATE, self._token_body(request))))
        return _from_openai(_choice(self._http.post("/v1/completions", self._openai_body(request))))

    def _token_body(self, request: ProbeRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.identity.model,
            "token_ids": list(request.token_ids),
            "sampling_params": _sampling(request) | {"logprobs": request.top_logprobs},
        }
        return body | _salt(request)

    def _openai_body(self, request: ProbeRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.identity.model,
            "prompt": list(request.token_ids),
            "logprobs": request.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return body | _sampling(request) | _salt(request)

    def tokenize(self, text: str) -> list[int] | None:
        """Tokenize with ``/tokenize``; see :class:`ExaminedEngine`."""
        body = {"model": self.identity.model, "prompt": text, "add_special_tokens": False}
        reply = self._http.post("/tokenize", body)
        if not reply.is_ok or not isinstance(reply.body, dict):
            return None
        return [int(token) for token in reply.body["tokens"]]

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Reload weights from files during a pause; see :class:`ExaminedEngine`.

        Parameters of the pause are in the query, because vLLM ignores that route's body.
        """
        pause = f"/pause?mode=abort&clear_cache={str(clears_cache).lower()}"
        paused = self._http.post(pause, {})
        if not paused.is_ok:  # an update beside running requests would hang the server for ever
            return f"{pause} answers {paused.status}: {paused.body}"
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        try:
            reply = self._http.post(RPC, body, timeout_s=LOAD_TIMEOUT_S)
        finally:
            resumed = self._http.post("/resume", {})
        for path, answer in ((RPC, reply), ("/resume", resumed)):
            if not answer.is_ok:
                return f"{path} answers {answer.status}: {answer.body}"
        return None

    def cached_tokens_total(self) -> int | None:
        """Return the sum of the counter ``vllm:prefix_cache_hits_total`` over its engines."""
        reply = self._http.get("/metrics")
        hits = _HITS.findall(reply.body) if reply.is_ok and isinstance(reply.body, str) else []
        return int(sum(float(count) for count in hits)) if hits else None


def _sampling(request: ProbeRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_tokens": request.tokens_max,
        "temperature": request.temperature,
        "ignore_eos": True,
    }
    if request.top_k is not None:
        sampling["top_k"] = request.top_k
    if request.seed is not None:
        sampling["seed"] = request.seed
    return sampling


def _salt(request: ProbeRequest) -> dict[str, Any]:
    return {} if request.cache_salt is None else {"cache_salt": request.cache_salt}


def _choice(reply: HttpReply) -> dict[str, Any]:
    if not reply.is_ok or not isinstance(reply.body, dict):
        raise EngineLost(
            f"the engine refuses a test request with status {reply.status}: {reply.body}. Its log "
            "has the cause"
        )
    choice: dict[str, Any] = reply.body["choices"][0]
    choice["usage"] = reply.body.get("usage") or {}
    return choice


def _from_tokens(choice: dict[str, Any]) -> ProbeResponse:
    content = (choice.get("logprobs") or {}).get("content") or []
    return ProbeResponse(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(entry["logprob"] for entry in content),
        top=tuple(
            {top["token_id"]: top["logprob"] for top in entry.get("top_logprobs") or ()}
            for entry in content
        ),
        cached_tokens=_cached(choice["usage"]),
        has_weight_spans=bool(choice.get("weight_versions")),
    )


def _from_openai(choice: dict[str, Any]) -> ProbeResponse:
    logprobs = choice.get("logprobs") or {}
    if choice.get("token_ids") is None:
        raise EngineLost(
            "the engine's /v1/completions returns no token ids although return_token_ids=true was "
            "sent, and training needs them; use vLLM 0.21 or newer"
        )
    return ProbeResponse(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs.get("token_logprobs") or ()),
        top=tuple(_by_id(top) for top in logprobs.get("top_logprobs") or ()),
        cached_tokens=_cached(choice["usage"]),
        has_weight_spans=bool(choice.get("weight_versions")),
    )


def _by_id(top: Mapping[str, float] | None) -> dict[int, float]:
    """Return log-probs by token id, from keys such as ``token_id:248``; other keys are texts."""
    found = {}
    for name, logprob in (top or {}).items():
        mark, _, number = name.partition(":")
        if mark == "token_id":
            found[int(number)] = logprob
    return found


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens")
