"""Doctor's adapter for SGLang: its native HTTP routes, with token ids in and out.

Implements :class:`ExaminedEngine`; :mod:`measuring` creates it if the server is SGLang.
"""

from pathlib import Path
from typing import Any

from tidegate.cli.engine_doctor.examined import ProbeRequest, ProbeResponse
from tidegate.cli.engine_doctor.http import LOAD_TIMEOUT_S, Http
from tidegate.cli.engine_doctor.measurements import Identity
from tidegate.errors import EngineLost

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


class ExaminedSglang:
    """An SGLang server; implements :class:`ExaminedEngine`."""

    def __init__(self, http: Http, identity: Identity) -> None:
        self.identity = identity
        self._http = http

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate with ``/generate``; see :class:`ExaminedEngine`."""
        reply = self._http.post("/generate", _body(request))
        if not reply.is_ok or not isinstance(reply.body, dict):
            raise EngineLost(
                f"{self._http.url}/generate refuses a test request with status {reply.status}: "
                f"{reply.body}. Its log has the cause"
            )
        meta = reply.body["meta_info"]
        return ProbeResponse(
            token_ids=tuple(reply.body["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            top=tuple(
                {entry[1]: entry[0] for entry in position or ()}
                for position in meta.get("output_top_logprobs") or ()
            ),
            cached_tokens=meta.get("cached_tokens"),
            has_weight_spans=bool(meta.get("weight_versions")),
        )

    def tokenize(self, text: str) -> list[int] | None:
        """Tokenize with ``/tokenize``; see :class:`ExaminedEngine`."""
        body = {"model": self.identity.model, "prompt": text, "add_special_tokens": False}
        reply = self._http.post("/tokenize", body)
        if not reply.is_ok or not isinstance(reply.body, dict):
            return None
        return [int(token) for token in reply.body["tokens"]]

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Load weights with ``/update_weights_from_disk``; see :class:`ExaminedEngine`."""
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

    def cached_tokens_total(self) -> int | None:
        """Return None: every response reports its own cached tokens."""
        return None


def _body(request: ProbeRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": request.tokens_max,
        "temperature": request.temperature,
        "ignore_eos": True,
    }
    if request.top_k is not None:
        sampling["top_k"] = request.top_k
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    body: dict[str, Any] = {
        "input_ids": list(request.token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": request.top_logprobs,
    }
    if request.cache_salt is not None:
        # The radix tree's own key: cache_salt is newer, and older servers ignore unknown fields.
        body["extra_key"] = request.cache_salt
    return body
