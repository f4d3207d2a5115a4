"""Weights sent to vLLM by NCCL, and failures on the way.

Against doubles of vLLM and of NCCL, whose GPU is host memory.
"""

import asyncio
import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.external.vllm_double import VllmDouble
from tests.engine.external.vllm_weights import by_files, logprobs, sampled, tensors_of, vllm
from tests.engine.orchestra import Models
from tests.models import make_model_directory
from tests.nccl_double import built
from tidegate.engine.external import tensor_senders
from tidegate.engine.external import vllm as vllm_adapter
from tidegate.engine.external.adapter import (
    VersionLabel,
)
from tidegate.engine.external.vllm import make_adapter
from tidegate.errors import ConfigError, EngineGone, WeightsRefused

pytestmark = pytest.mark.wire

BACKEND = {"backend": "nccl"}


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(tmp_path_factory.mktemp("nccl"))))


@pytest.fixture(autouse=True)
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vllm_adapter, "own_device", lambda: torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("NCCL_DOUBLE_FOLDER", folder)
        yield


@pytest.mark.parametrize("way", ["nccl", "nccl-unpacked"])
async def test_broadcast_tensors_change_the_weights_and_the_label_without_a_file(
    models: Models, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_senders, "PACK_BYTES", 20_000)
    async with vllm(models.directories[0], way, weight_transfer=BACKEND) as (
        double,
        adapter,
        capabilities,
    ):
        assert capabilities.takes_tensors
        await adapter.pause("keep")
        await adapter.load_tensors(tensors_of(models, 1), "v1")
        await adapter.resume()
        chunks = await sampled(adapter, "v1")
    assert chunks[-1].labels == [VersionLabel("v1", 0, 6)]
    assert logprobs(chunks) == pytest.approx(await by_files(models, 1), abs=1e-5)
    assert double.loads == []
    assert double.transfers.took == [list(tensors_of(models, version)) for version in (0, 1)]


async def test_weights_that_fail_halfway_end_the_engine_and_a_new_adapter_mends_it(
    models: Models,
) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (double, adapter, _):
        await adapter.pause("abort")
        double.transfers.fails_at = "model.norm.weight"
        with pytest.raises(EngineGone, match=r"may have loaded only some.*model\.norm\.weight"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")
        again = make_adapter(double.url, models.directories[0], weights="nccl")
        await again.open("v2")
        chunks = await sampled(again, "v2")
        await again.close()
    assert chunks[-1].labels == [VersionLabel("v2", 0, 6)]
    assert logprobs(chunks) == pytest.approx(await by_files(models, 0), abs=1e-5)


async def test_an_update_that_an_adapter_left_begun_is_ended_by_the_next(models: Models) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (double, adapter, _):
        await adapter.pause("abort")
        await adapter._http.call("POST", "/start_weight_update")
        again = make_adapter(double.url, models.directories[0], weights="nccl")
        await again.open("v1")
        chunks = await sampled(again, "v1")
        await again.close()
    assert logprobs(chunks) == pytest.approx(await by_files(models, 0), abs=1e-5)


async def test_an_update_that_does_not_begin_changes_nothing(models: Models) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (double, adapter, _):
        await adapter.pause("abort")
        double.transfers.refuses_to_start = True
        with pytest.raises(WeightsRefused, match="refuses to begin a weight update"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")
        double.transfers.refuses_to_start = False
        await adapter.resume()
        chunks = await sampled(adapter, "v0")
    assert chunks[-1].labels == [VersionLabel("v0", 0, 6)]


async def test_a_server_that_refuses_before_a_broadcast_is_not_waited_for(models: Models) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (double, adapter, _):
        await adapter.pause("abort")
        double.transfers.refuses_updates = True
        async with asyncio.timeout(25):  # a broadcast alone waits for 60 s
            with pytest.raises(EngineGone, match="CUDA out of memory"):
                await adapter.load_tensors(tensors_of(models, 1), "v1")


async def test_a_server_that_skipped_the_broadcast_is_not_waited_for(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_senders, "LEAVE_TIMEOUT_S", 0.2)
    with VllmDouble(models.directories[0], weight_transfer=BACKEND) as double:
        double.transfers.stays_away = True
        adapter = make_adapter(double.url, models.directories[0], weights="nccl")
        async with asyncio.timeout(30):
            with pytest.raises(
                ConfigError, match="reported success of an NCCL weight update without taking part"
            ):
                await adapter.open("v0")
        await adapter.close()


async def test_tensors_that_this_end_can_not_send_end_the_engine(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_senders, "LEAVE_TIMEOUT_S", 0.2)
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (_, adapter, _):
        await adapter.pause("abort")
        nowhere = {name: tensor.to("meta") for name, tensor in tensors_of(models, 1).items()}
        with pytest.raises(EngineGone, match="its weights are unknown"):
            await adapter.load_tensors(nowhere, "v1")


async def test_a_server_that_has_left_says_so_itself(models: Models) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (_, adapter, _):
        await adapter.pause("abort")
        await adapter._http.call("POST", "/shutdown_weight_transfer_engine")
        with pytest.raises(EngineGone, match="not initialized"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")


async def test_an_update_under_other_labels_than_the_one_given_ends_the_engine(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND) as (double, adapter, _):
        await adapter.pause("abort")

        async def says(*_: object) -> str:
            return "v7"

        monkeypatch.setattr(adapter, "_label", says)
        with pytest.raises(EngineGone, match="labels its weights 'v7', and 'v1' was set"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")
        assert double.label == "v1"


async def refusal(model: Path, **config: Any) -> str:
    with VllmDouble(model, **{"weight_transfer": BACKEND} | config) as double:
        adapter = make_adapter(double.url, model, weights="nccl")
        with pytest.raises(ConfigError) as error:
            await adapter.open("v0")
        await adapter.close()
        assert double.calls == []  # it was left as it is
    return str(error.value)


async def test_a_server_that_takes_no_weights_by_nccl_is_left_alone_and_why_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.directories[0]
    with pytest.raises(ConfigError, match="may name disk, nccl"):
        make_adapter("http://127.0.0.1:8000", model, weights="http")
    assert "use 0.32 or newer" in await refusal(model, version="0.30.1")
    untied = make_model_directory(tmp_path / "untied", tied=False)
    assert "it has no GPU" in await refusal(untied, device="cpu")
    assert "with no weight transfer; start it with" in await refusal(model, weight_transfer=None)
    assert "with ipc weight" in await refusal(model, weight_transfer={"backend": "ipc"})
    monkeypatch.setattr(vllm_adapter, "own_device", lambda: None)
    assert "this process sees no GPU" in await refusal(model)


async def test_adapters_that_are_read_from_files_are_not_taken_beside_tensors(
    models: Models,
) -> None:
    async with vllm(models.directories[0], "nccl", weight_transfer=BACKEND, lora_rank_max=8) as (
        _,
        _,
        capabilities,
    ):
        assert capabilities.lora_rank_max == 0
        assert "#weights=" in capabilities.lora_lacks
