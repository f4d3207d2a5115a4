"""Engines under examination: generate, tokenize, load weights, count cache hits, over HTTP.

The probes call :class:`ExaminedEngine`; :mod:`measuring` chooses the kind of server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.cli.engine_doctor.http import LOAD_TIMEOUT_S, Http
from tidegate.cli.engine_doctor.measurements import EngineKind, Identity
from tidegate.errors import EngineLost


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One generation request of a probe, as token ids and sampling options."""

    token_ids: tuple[int, ...]
    tokens_max: int
    temperature: float = 0.0
    top_k: int | None = None
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probs to return."""
    seed: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResponse:
    """Response to a :class:`ProbeRequest`; sequences have one item per output token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]
    """Log-probs of the most likely tokens, by token id; empty if none were requested."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None if the engine does not report them."""
    has_weight_spans: bool
    """Whether the response says which weight version sampled which tokens."""


class ExaminedEngine:
    """An engine under examination. Methods may be called from several threads."""

    def __init__(self, http: Http, identity: Identity) -> None:
        self.identity = identity
        self._http = http

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate.

        Raises:
            EngineLost: the engine does not respond, or refuses.
        """
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids of ``text``, without special tokens; None without such a route."""
        body = {"model": self.identity.model, "prompt": text, "add_special_tokens": False}
        reply = self._http.post("/tokenize", body)
        if not reply.is_ok or not isinstance(reply.body, dict):
            return None
        return [int(token) for token in reply.body["tokens"]]

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Make the engine serve the weights in ``directory``; return None, or why it refuses.

        Raises:
            EngineLost: the engine does not respond.
        """
        raise NotImplementedError

    def cached_tokens_total(self) -> int | None:
        """Return the prompt tokens found in the cache since the start; None without a counter."""
        return None

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's answer to a test request."""
        reply = self._http.post(path, body)
        if not reply.is_ok or not isinstance(reply.body, dict):
            raise EngineLost(
                f"the engine refuses a test request with status {reply.status}: {reply.body}. Its "
                "log has the cause"
            )
        answer: dict[str, Any] = reply.body
        return answer


def _sampling(request: ProbeRequest, *, limit: str, seed: str) -> dict[str, Any]:
    """Return sampling parameters, of which servers name two differently."""
    given = {
        limit: request.tokens_max,
        "temperature": request.temperature,
        "ignore_eos": True,
        "top_k": request.top_k,
        seed: request.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


# ---------------------------------------------------------------- vLLM, and servers with its API

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


class ExaminedVllm(ExaminedEngine):
    """A server with vLLM's API: its token-id route if that is on, else OpenAI's."""

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate with token ids, or with ``/v1/completions``."""
        sampling = _sampling(request, limit="max_tokens", seed="seed")
        sampling["logprobs"] = request.top_logprobs
        body: dict[str, Any] = {"model": self.identity.model}
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if GENERATE in self.identity.paths:
            body |= {"token_ids": list(request.token_ids), "sampling_params": sampling}
            return _from_tokens(self._answer(GENERATE, body))
        body |= {"prompt": list(request.token_ids), **sampling}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return _from_openai(self._answer("/v1/completions", body))

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Reload weights from files during a pause.

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


def _from_tokens(answer: dict[str, Any]) -> ProbeResponse:
    choice = answer["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or []
    return ProbeResponse(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(entry["logprob"] for entry in content),
        top=tuple(
            {top["token_id"]: top["logprob"] for top in entry.get("top_logprobs") or ()}
            for entry in content
        ),
        cached_tokens=_cached(answer),
        has_weight_spans=bool(choice.get("weight_versions")),
    )


def _from_openai(answer: dict[str, Any]) -> ProbeResponse:
    choice = answer["choices"][0]
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
        cached_tokens=_cached(answer),
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


def _cached(answer: Mapping[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


# ---------------------------------------------------------------- SGLang

SETTINGS = (
    "dtype",
    "enable_fp32_lm_head",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "disable_overlap_schedule",
)


def identify_sglang(http: Http) -> Identity | None:
    """Return the server's identity; None if it is no SGLang server."""
    info = http.get("/model_info")
    if info.status == 404:
        info = http.get("/get_model_info")
    if not info.is_ok or not isinstance(info.body, dict) or "is_generation" not in info.body:
        return None
    if not info.body["is_generation"]:
        raise EngineLost(
            f"{http.url} serves {info.body.get('model_path')} for embeddings, and the doctor "
            "examines generation; start SGLang without --is-embedding"
        )
    server = http.get("/server_info")
    body: dict[str, Any] = server.body if isinstance(server.body, dict) else {}
    models = http.get("/v1/models")
    model = models.body["data"][0] if models.is_ok and isinstance(models.body, dict) else {}
    schema = http.get("/openapi.json")
    paths = schema.body.get("paths", ()) if schema.is_ok and isinstance(schema.body, dict) else ()
    return Identity(
        kind="sglang",
        version=body.get("version"),
        model=info.body["model_path"],
        context_tokens_max=model.get("max_model_len"),
        paths=frozenset(paths),
        settings={name: body[name] for name in SETTINGS if name in body},
    )


class ExaminedSglang(ExaminedEngine):
    """An SGLang server: its native routes, with token ids in and out."""

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate with ``/generate``."""
        body: dict[str, Any] = {
            "input_ids": list(request.token_ids),
            "sampling_params": _sampling(request, limit="max_new_tokens", seed="sampling_seed"),
            "return_logprob": True,
            "top_logprobs_num": request.top_logprobs,
        }
        if request.cache_salt is not None:
            # The radix tree's own key: cache_salt is newer, and older servers ignore it.
            body["extra_key"] = request.cache_salt
        answer = self._answer("/generate", body)
        meta = answer["meta_info"]
        return ProbeResponse(
            token_ids=tuple(answer["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            top=tuple(
                {entry[1]: entry[0] for entry in position or ()}
                for position in meta.get("output_top_logprobs") or ()
            ),
            cached_tokens=meta.get("cached_tokens"),
            has_weight_spans=bool(meta.get("weight_versions")),
        )

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Load weights with ``/update_weights_from_disk``."""
        body = {
            "model_path": str(directory),
            "flush_cache": clears_cache,
            "abort_all_requests": False,
        }
        reply = self._http.post("/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)
        reported = reply.body if isinstance(reply.body, dict) else {}
        if reply.is_ok and reported.get("success", True):
            return None
        return str(reported.get("message", reply.body))
