"""Weights sent to SGLang without files, and failures on the way.

Against a double; test_real_sglang.py sends them to a real server.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.external.sglang_double import SglangDouble
from tests.engine.external.sglang_streams import TOLERANCE, Sglang, off_by, sglang
from tidegate.engine.external import sglang as sglang_adapter
from tidegate.engine.external.sglang import make_adapter
from tidegate.engine.external.worker import open_adapter
from tidegate.errors import ConfigError, EngineGone, WeightsRefused
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire

FEW = SamplingParams(max_tokens=6)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def called(double: SglangDouble, path: str) -> list[dict[str, Any]]:
    return [body for where, body in double.calls if where == path]


@pytest.mark.parametrize("way", ["http", "gloo"])
async def test_tensors_change_the_weights_and_the_label_without_a_file(
    directories: list[Path], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_adapter, "BUCKET_BYTES", 20_000)
    async with sglang(directories[0], way) as engine:
        assert engine.capabilities.takes_tensors
        frozen = engine.stream(SamplingParams(max_tokens=60))
        await frozen.has(3)
        await engine.adapter.pause("keep")
        before = len(next(iter(engine.double.running.values())).output)
        await engine.adapter.load_tensors(tensors_of(directories[1]), "v1")
        await engine.adapter.resume()
        await frozen.end()
        fresh = await engine.stream(FEW, salt="v1").end()
    assert frozen.labels == [("v0", 0, before), ("v1", before, 60)]
    assert off_by(directories, frozen, [(0, before), (1, 60 - before)]) < TOLERANCE
    assert off_by(directories, fresh, [(1, 6)]) < TOLERANCE
    assert called(engine.double, "/update_weights_from_disk") == []
    route = {"http": "tensor", "gloo": "distributed"}[way]
    sent = called(engine.double, f"/update_weights_from_{route}")
    assert len(sent) > 4  # more than a bucket, twice
    assert [body["weight_version"] for body in sent if "weight_version" in body] == ["v0", "v1"]


@pytest.mark.parametrize("way", ["http", "gloo"])
async def test_weights_that_fail_halfway_end_the_engine_and_a_new_adapter_mends_it(
    directories: list[Path], way: str
) -> None:
    async with sglang(directories[0], way) as engine:
        await engine.adapter.pause("abort")
        engine.double.sessions.fails_at = "model.norm.weight"
        with pytest.raises(EngineGone, match="partially updated"):
            await engine.adapter.load_tensors(tensors_of(directories[1]), "v1")
        engine.double.sessions.fails_at = None
        again = make_adapter(engine.adapter._http.url, directories[0], weights=way)
        capabilities = await again.open("v2")  # whose update the one before left begun
        stream = await Sglang(again, capabilities).stream(FEW, salt="v2").end()
        await again.close()
    assert stream.labels == [("v2", 0, 6)]
    assert off_by(directories, stream, [(0, 6)]) < TOLERANCE


@pytest.mark.parametrize("way", ["http", "gloo"])
async def test_updates_reported_as_failed_after_changing_the_weights_count_as_done(
    directories: list[Path], way: str
) -> None:
    """Another client's request is paused in place, so SGLang does not flush its cache."""
    async with sglang(directories[0], way) as engine:
        stranger = engine.stream()
        await stranger.has(1)
        await engine.double.pause({"mode": "in_place"})  # not by the adapter
        for label in ("v1", "v2"):
            await engine.adapter.load_tensors(tensors_of(directories[1]), label)
            assert (engine.double.label, engine.double.info_label) == (label, label)
        await engine.adapter.resume()
        await stranger.end()
        fresh = await engine.stream(FEW, salt="v2").end()
    assert off_by(directories, fresh, [(1, 6)]) < TOLERANCE


async def test_an_update_that_does_not_begin_changes_nothing(directories: list[Path]) -> None:
    async with sglang(directories[0], "http") as engine:
        del engine.double.posts["/begin_weight_update"]
        await engine.adapter.pause("abort")
        with pytest.raises(WeightsRefused, match="refuses to begin a weight update"):
            await engine.adapter.load_tensors(tensors_of(directories[1]), "v1")
        await engine.adapter.resume()
        stream = await engine.stream(FEW).end()
    assert stream.labels == [("v0", 0, 6)]
    assert off_by(directories, stream, [(0, 6)]) < TOLERANCE


async def test_a_server_that_refuses_before_a_broadcast_is_not_waited_for(
    directories: list[Path],
) -> None:
    async with sglang(directories[0], "gloo") as engine:
        await engine.adapter.pause("abort")

        async def refused(body: dict[str, Any]) -> Any:
            return await engine.double.sessions.leave({"group_name": "none"})

        engine.double.posts["/update_weights_from_distributed"] = refused
        async with asyncio.timeout(25):  # a broadcast alone waits for 30 s
            with pytest.raises(EngineGone, match="does not exist"):
                await engine.adapter.load_tensors(tensors_of(directories[1]), "v1")


async def test_unknown_transfer_methods_are_refused_by_name(directories: list[Path]) -> None:
    for way, why in (("ipc", "methods are disk, http"), ("nccl", "sees no GPU")):
        if way == "nccl" and torch.cuda.is_available():
            continue
        with pytest.raises(ConfigError, match=why):
            async with sglang(directories[0], way):
                pass
    with pytest.raises(ConfigError, match="is pipeline-parallel"):
        async with sglang(directories[0], "http", settings={"pp_size": 2}):
            pass
    for url in ("vllm+http://host:1#weights=http", "sglang+http://host:1#wights=http"):
        with pytest.raises(ConfigError, match=r"#weights="):
            open_adapter(url, directories[0])
