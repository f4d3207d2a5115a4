"""Restores a Tinker server's sessions, samplers and models from its state directory.

The server calls :func:`recover` before it answers anything. Requests that were accepted since a
model's snapshot are carried out again, in their order, so clients can retrieve their results. A
record that can't be restored or repeated does not end the recovery: it is logged, refused to its
client and skipped.
"""

import asyncio
import logging
from functools import partial

from tidegate.errors import TidegateError
from tidegate.serving.tinker.checkpoints import SCHEME
from tidegate.serving.tinker.futures import RequestSuccess, Work
from tidegate.serving.tinker.journal import (
    FailureRecorded,
    RequestAccepted,
    SamplerOpened,
    read_model,
)
from tidegate.serving.tinker.models import TrainedModel
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
    # What can't be restored is one tenant's, and the others' server starts all the same.
    opened, samplers = await asyncio.to_thread(state.open_sessions)
    sessions = {
        each.session_id: parts.sessions.open(each.session_id, each.tenant, now_s) for each in opened
    }
    await asyncio.to_thread(parts.checkpoints.remove_leftovers, sessions)
    for sampler in samplers:
        if sampler.session_id in sessions:
            try:
                await _restore_sampler(parts, sessions[sampler.session_id], sampler)
            except Exception:
                log.exception("%s can't be restored", sampler)
    for directory in state.models():
        try:
            await _restore_model(parts, sessions, directory.parent.name)
        except Exception:
            log.exception("%s can't be restored, and stays as it is", directory)
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
    other = opened.other_model
    if other is not None and other not in parts.other_runners:
        log.error("sampler=%s is not restored: %s is not served now", sampler_id, other)
        return
    sampler = Sampler(sampler_id, session.tenant, saved, live, opened.model_path, other)
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
    try:
        facts, weights = await asyncio.to_thread(parts.checkpoints.find, path, session.tenant)
        await parts.adapters.publish_live(model.live_adapter, weights, facts.steps)
    except UserError:
        pass  # it has no in-flight samplers
    except Exception:
        log.exception("model=%s: its in-flight weights can't be restored", model_id)
    for record in recovered.requests:
        failed = recovered.failures.get(record.seq_id)
        canonical, work = _repetition(parts, model, record)
        if failed is not None:
            work = partial(_fail_again, model, failed)
        parts.trainer.repeat(model, record, canonical, work)


def _repetition(
    parts: TinkerParts, model: TrainedModel, record: RequestAccepted
) -> tuple[bytes, Work]:
    """Return what :func:`submission` does for an accepted request; it fails if it can't be read."""
    try:
        request = MODEL_PATHS[record.path].decode(record.body)
        return submission(parts, model, record.path, request)
    except Exception as error:  # noqa: BLE001 - perhaps another release accepted it
        why = f"the restarted server can't read this request: {error}"
        log.error("model=%s seq_id=%d: %s", model.model_id, record.seq_id, why)

        async def refuse() -> RequestSuccess:
            raise UserError(why)

        return record.body, refuse


async def _fail_again(model: TrainedModel, failed: FailureRecorded) -> RequestSuccess:
    """Fail as the request did before the restart."""
    if failed.loses_gradient:
        model.lost_gradient, model.has_gradient = failed.seq_id, True
    raise TidegateError(failed.message)
