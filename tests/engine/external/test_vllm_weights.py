"""Weights sent to vLLM by NCCL or CUDA IPC, and failures on the way.

Against doubles of vLLM and of NCCL; host memory stands in for GPUs'.
"""

import asyncio
import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.external.vllm_double import VllmDouble
from tests.engine.external.vllm_weights import (
    by_files,
    logprobs,
    refusal,
    sampled,
    tensors_of,
    vllm,
)
from tests.engine.orchestra import Models
from tests.host_gpu import HostGpu
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
IPC = {"backend": "ipc"}


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(tmp_path_factory.mktemp("nccl"))))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostGpu]:
    gpu = HostGpu()
    monkeypatch.setattr(vllm_adapter, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(vllm_adapter, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(tensor_senders, "PACK_BYTES", 20_000)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("NCCL_DOUBLE_FOLDER", folder)
        yield gpu


@pytest.mark.parametrize("way", ["nccl", "nccl-unpacked", "ipc"])
async def test_tensors_change_the_weights_and_the_label_without_a_file_and_leave_no_memory(
    models: Models, way: str, gpu: HostGpu
) -> None:
    backend = {"backend": way.removesuffix("-unpacked")}
    async with vllm(models.directories[0], way, weight_transfer=backend) as (
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
    mapped = double.transfers.gpu.opened  # bufferfuls, one buffer
    assert way != "ipc" or len(mapped) > len({memory.handle for memory in mapped}) > 0
    assert gpu.rooms_bytes == 0


@pytest.mark.parametrize("way", ["nccl", "ipc"])
async def test_what_fails_halfway_ends_the_engine_frees_memory_and_is_mended_by_the_next(
    models: Models, way: str, gpu: HostGpu
) -> None:
    async with vllm(models.directories[0], way, weight_transfer={"backend": way}) as (
        double,
        adapter,
        _,
    ):
        await adapter.pause("abort")
        shared = len(gpu.shared)
        double.transfers.fails_at = "model.norm.weight"
        with pytest.raises(EngineGone, match=r"may have loaded only some.*model\.norm\.weight"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")
        assert len(gpu.shared) == shared
        again = make_adapter(double.url, models.directories[0], weights=way)
        await again.open("v2")
        chunks = await sampled(again, "v2")
        await again.close()
    assert chunks[-1].labels == [VersionLabel("v2", 0, 6)]
    assert logprobs(chunks) == pytest.approx(await by_files(models, 0), abs=1e-5)
    assert gpu.rooms_bytes == 0


async def test_a_server_on_another_gpu_says_so(models: Models, gpu: HostGpu) -> None:
    gpu.uuid = "5f0c7d3a-0000-4000-8000-000000000002"
    with pytest.raises(ConfigError, match="IPC handle not found for GPU UUID"):
        async with vllm(models.directories[0], "ipc", weight_transfer=IPC):
            pass


async def test_a_gpu_without_room_for_the_buffer_is_named(models: Models, gpu: HostGpu) -> None:
    async with vllm(models.directories[0], "ipc", weight_transfer=IPC) as (_, adapter, _):
        await adapter.pause("abort")
        gpu._free_bytes = 100
        with pytest.raises(EngineGone, match="no room for another"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")


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


async def test_a_server_that_takes_no_weights_so_is_left_alone_and_why_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.directories[0]
    with pytest.raises(ConfigError, match="may name disk, nccl"):
        make_adapter("http://127.0.0.1:8000", model, weights="http")
    untied = make_model_directory(tmp_path / "untied", tied=False)
    for settings, why in (
        ({"version": "0.30.1"}, "use 0.32 or newer"),
        ({"weight_transfer": None}, "with no weight transfer; start it with"),
        ({"weight_transfer": IPC}, "with ipc weight"),
    ):
        assert why in await refusal(model, "nccl", **{"weight_transfer": BACKEND} | settings)
    assert "it has no GPU" in await refusal(untied, "nccl", device="cpu", weight_transfer=BACKEND)
    why = await refusal(model, "ipc", weight_transfer=BACKEND)
    assert "with nccl weight transfer; start it with --weight-transfer-config" in why
    assert """'{"backend": "ipc"}'""" in why
    monkeypatch.setattr(vllm_adapter, "own_device", lambda: None)
    for way, transfer in (("nccl", BACKEND), ("ipc", IPC)):
        why = await refusal(model, way, weight_transfer=transfer)
        assert f"by {way}, because this process sees no GPU" in why


async def test_ipc_is_refused_for_several_workers_before_weights_go(models: Models) -> None:
    with VllmDouble(models.directories[0], weight_transfer=IPC) as double:
        double.transfers.workers = 2
        adapter = make_adapter(double.url, models.directories[0], weights="ipc")
        with pytest.raises(ConfigError, match="has 2: start servers of one worker each"):
            await adapter.open("v0")
        await adapter.close()
        assert double.transfers.took == []


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
