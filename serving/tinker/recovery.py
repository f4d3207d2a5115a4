"""Restores a Tinker server's sessions, samplers and models from its state directory.

The server calls :func:`recover` before it answers anything. Requests that were accepted since a
model's snapshot are carried out again, in their order, so clients can retrieve their results. Built
on :mod:`journal` and :mod:`checkpoints`.
"""

import asyncio
import contextlib
import logging

from tidegate.serving.tinker.checkpoints import SCHEME
from tidegate.serving.tinker.journal import SamplerOpened, read_model
from tidegate.serving.tinker.parts import TinkerParts
from tidegate.serving.tinker.samplers import Sampler, SavedAdapter
from tidegate.serving.tinker.sessions import TinkerSession
from tidegate.serving.tinker.training import UserError
from tidegate.serving.tinker.training_requests import (
    LIVE_NAME,
    MODEL_PATHS,
    begin_model,
    submission,
)

log = logging.getLogger("tidegate")


async def recover(parts: TinkerParts) -> None:
    """Restore what the state directory has, and start the work that was not done."""
    state = parts.state
    if state is None:
        return
    now_s = asyncio.get_running_loop().time()
    opened, samplers = await asyncio.to_thread(state.open_sessions)
    sessions = {
        each.session_id: parts.sessions.restore(each.session_id, each.tenant, now_s)
        for each in opened
    }
    await asyncio.to_thread(parts.checkpoints.remove_leftovers, sessions)
    for sampler in samplers:
        if sampler.session_id in sessions:
            await _restore_sampler(parts, sessions[sampler.session_id], sampler)
    for directory in state.models():
        await _restore_model(parts, sessions, directory.parent.name)
    if sessions:
        models = len(parts.trainer.models)
        log.info("state=%s sessions=%d models=%d restored", state.root, len(sessions), models)


async def _restore_sampler(
    parts: TinkerParts, session: TinkerSession, opened: SamplerOpened
) -> None:
    saved = None
    if opened.path is not None:
        try:
            found = await asyncio.to_thread(parts.checkpoints.find, opened.path, session.tenant)
        except UserError:
            return  # deleted or expired
        saved = SavedAdapter(*found)
    live = "" if opened.live_model_id is None else f"{opened.live_model_id}:inflight"
    sampler_id = session.sampler_id(opened.seq_id)
    sampler = Sampler(sampler_id, session.tenant, saved, live, opened.model_path)
    parts.sessions.add_sampler(session, opened.seq_id, sampler)


async def _restore_model(
    parts: TinkerParts, sessions: dict[str, TinkerSession], model_id: str
) -> None:
    """Begin a model again, and its requests since the snapshot; forget one that has ended."""
    assert parts.state is not None
    directory = parts.state.model_directory(model_id)
    recovered = await asyncio.to_thread(read_model, directory)
    session = None if recovered is None else sessions.get(recovered.start.created.session_id)
    if recovered is None or session is None:
        if recovered is not None:
            await asyncio.to_thread(recovered.journal.remove)
        return
    model = await begin_model(parts, session, recovered.start.created, recovered)
    path = f"{SCHEME}{model_id}/sampler_weights/{LIVE_NAME}"
    with contextlib.suppress(UserError):  # it has no in-flight samplers
        facts, weights = await asyncio.to_thread(parts.checkpoints.find, path, session.tenant)
        await parts.adapters.publish_live(model.live_adapter, weights, facts.steps)
    for record in recovered.requests:
        request = MODEL_PATHS[record.path].decode(record.body)
        parts.trainer.enqueue(model, record, *submission(parts, model, record.path, request))
