"""REST paths of the Tinker API that list and delete: runs, checkpoints, sessions.

The server imports this module, which registers its paths beside those of :mod:`app`.
"""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.scaffold import Answer, read
from tidegate.serving.tinker import messages
from tidegate.serving.tinker.app import on
from tidegate.serving.tinker.checkpoints import SCHEME, CheckpointFacts
from tidegate.serving.tinker.parts import TinkerParts
from tidegate.serving.tinker.training import UserError

PAGE_MAX = 1000
"""Entries of one answer."""

UNIX_S_MAX = 253_402_300_799
"""End of the year 9999, the last that dates have."""

CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"

TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""The SDK's words for the kinds of checkpoints."""


@on("POST", "weights_info")
async def weights_info(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Describe a checkpoint's adapter."""
    path = (await read(http, messages.WeightsInfoRequest)).tinker_path
    facts, _ = await asyncio.to_thread(parts.checkpoints.find, path, tenant)
    return {
        "base_model": facts.base_model,
        "is_lora": True,
        "lora_rank": facts.rank,
        "train_unembed": False,
        "train_mlp": facts.train_mlp,
        "train_attn": facts.train_attn,
    }


@on("GET", "checkpoints")
async def list_checkpoints(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List a tenant's checkpoints, the newest first."""
    found = await asyncio.to_thread(parts.checkpoints.of, tenant)
    page, cursor = _page(http, found)
    return {"checkpoints": await _checkpoint_fields(parts, page), "cursor": cursor}


@on("GET", "training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List a run's checkpoints, the newest first."""
    run_id = http.path_params["run_id"]
    found = await asyncio.to_thread(parts.checkpoints.of, tenant, run_id)
    if not found:
        parts.model(run_id, tenant)  # or it is unknown
    return {"checkpoints": await _checkpoint_fields(parts, found)}


@on("DELETE", CHECKPOINT)
async def delete_checkpoint(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Delete a checkpoint. Engines serve its samplers until they drop them."""
    facts = await _named(parts, http, tenant)
    await asyncio.to_thread(parts.checkpoints.remove, facts)
    return Response(status_code=204)


@on("PUT", CHECKPOINT + "/ttl")
async def set_checkpoint_ttl(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Set the time after which a checkpoint counts as deleted."""
    request = await read(http, messages.TtlRequest)
    facts = await _named(parts, http, tenant)
    expires_s = None if request.ttl_seconds is None else time.time() + request.ttl_seconds
    await asyncio.to_thread(parts.checkpoints.set_expiry, facts, expires_s)
    return Response(status_code=204)


@on("DELETE", "training_runs/{run_id}/checkpoints/{name}")
async def refuse_untyped(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Refuse to delete by a bare name, which may be of two checkpoints."""
    raise ApiError(400, "name the checkpoint as weights/NAME or sampler_weights/NAME")


@on("GET", "training_runs")
async def list_training_runs(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List a tenant's runs: those in training, and those that have checkpoints."""
    found = await _runs(parts, tenant)
    page, cursor = _page(http, list(found.values()))
    return {"training_runs": page, "cursor": cursor}


@on("GET", "training_runs/{run_id}")
async def get_training_run(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Describe a run."""
    run_id = http.path_params["run_id"]
    found = (await _runs(parts, tenant, run_id)).get(run_id)
    if found is None:
        raise ApiError(
            404,
            f"there is no training run {run_id!r:.200} of yours; list_training_runs names those "
            "that exist",
        )
    return found


@on("GET", "sessions")
async def list_sessions(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List a tenant's sessions that have not ended."""
    page, _ = _page(http, [each.session_id for each in parts.sessions.of(tenant)])
    return {"sessions": page}


@on("GET", "sessions/{session_id}")
async def get_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Name a session's models and samplers."""
    session = parts.session(http.path_params["session_id"], tenant)
    return {
        "training_run_ids": [model.model_id for model in session.models.values()],
        "sampler_ids": [sampler.sampler_id for sampler in session.samplers.values()],
    }


# ---------------------------------------------------------------- parts of answers


async def _named(parts: TinkerParts, http: HttpRequest, tenant: str) -> CheckpointFacts:
    """Return the checkpoint that a path names."""
    named = http.path_params
    path = f"{SCHEME}{named['run_id']}/{named['kind']}/{named['name']}"
    try:
        facts, _ = await asyncio.to_thread(parts.checkpoints.find, path, tenant)
    except UserError as error:
        raise ApiError(404, str(error)) from None
    return facts


async def _checkpoint_fields(
    parts: TinkerParts, checkpoints: Sequence[CheckpointFacts]
) -> list[dict[str, Any]]:
    return await asyncio.to_thread(lambda: [_fields(parts, each) for each in checkpoints])


def _fields(parts: TinkerParts, facts: CheckpointFacts) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{facts.kind}/{facts.name}",
        "checkpoint_type": TYPES[facts.kind],
        "time": _iso(facts.created_s),
        "tinker_path": facts.path,
        "size_bytes": parts.checkpoints.size_bytes(facts),
        "user_metadata": facts.user_metadata,
        "expires_at": None if facts.expires_s is None else _iso(facts.expires_s),
    }


async def _runs(
    parts: TinkerParts, tenant: str, run_id: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return a tenant's runs by id, those in training first."""
    runs: dict[str, dict[str, Any]] = {}
    for model in parts.trainer.models.values():
        if model.tenant == tenant and run_id in (None, model.model_id):
            run = _run_fields(parts, model.model_id, tenant, model.spec.rank, model.requested_s)
            runs[model.model_id] = run | {"user_metadata": _texts(model.created.user_metadata)}
    checkpoints = await asyncio.to_thread(partial(parts.checkpoints.of, tenant, run_id))
    for facts in checkpoints:
        if facts.run_id not in runs:
            at_s = facts.created_s
            runs[facts.run_id] = _run_fields(parts, facts.run_id, tenant, facts.rank, at_s)
        name = "last_checkpoint" if facts.kind == "weights" else "last_sampler_checkpoint"
        runs[facts.run_id].setdefault(name, _fields(parts, facts))
    return runs


def _run_fields(
    parts: TinkerParts, run_id: str, tenant: str, rank: int, requested_s: float
) -> dict[str, Any]:
    return {
        "training_run_id": run_id,
        "base_model": parts.base_model,
        "model_owner": tenant,
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": _iso(requested_s),
    }


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(min(unix_s, UNIX_S_MAX), UTC).isoformat()


def _page(http: HttpRequest, entries: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the entries that the query's ``limit`` and ``offset`` mean, and a cursor."""
    try:
        limit = min(int(http.query_params.get("limit", 100)), PAGE_MAX)
        offset = int(http.query_params.get("offset", 0))
    except ValueError:
        raise ApiError(
            400, "limit and offset must be whole numbers, such as limit=20&offset=0"
        ) from None
    if limit < 1 or offset < 0:
        raise ApiError(400, f"limit must be 1 or more and offset 0 or more, got {limit}, {offset}")
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return list(entries[offset : offset + limit]), cursor
