"""Weights sent to vLLM by CUDA IPC, and the release of the buffer.

Against a double of vLLM; host memory stands in for the GPU's.
"""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch

from tests.engine.external.vllm_double import VllmDouble
from tests.engine.external.vllm_weights import by_files, logprobs, sampled, tensors_of, vllm
from tests.engine.orchestra import Models
from tests.host_gpu import HostGpu
from tidegate.engine.external import tensor_senders
from tidegate.engine.external import vllm as vllm_adapter
from tidegate.engine.external.adapter import Capabilities, VersionLabel
from tidegate.engine.external.vllm import VllmAdapter, make_adapter
from tidegate.errors import ConfigError, EngineGone

pytestmark = pytest.mark.wire

IPC = {"backend": "ipc"}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> HostGpu:
    failure = HostGpu()
    monkeypatch.setattr(vllm_adapter, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(vllm_adapter, "gpu_of", lambda device: failure)
    monkeypatch.setattr(tensor_senders, "PACK_BYTES", 20_000)
    return failure


def opened(
    model: Path,
) -> AbstractAsyncContextManager[tuple[VllmDouble, VllmAdapter, Capabilities]]:
    return vllm(model, "ipc", weight_transfer=IPC)


async def test_tensors_from_a_mapped_buffer_change_the_weights_and_leave_no_memory(
    models: Models, gpu: HostGpu
) -> None:
    async with opened(models.directories[0]) as (double, adapter, capabilities):
        assert capabilities.takes_tensors
        await adapter.pause("keep")
        await adapter.load_tensors(tensors_of(models, 1), "v1")
        await adapter.resume()
        chunks = await sampled(adapter, "v1")
        assert chunks[-1].labels == [VersionLabel("v1", 0, 6)]
        assert logprobs(chunks) == pytest.approx(await by_files(models, 1), abs=1e-5)
    assert double.loads == []
    assert double.transfers.took == [list(tensors_of(models, version)) for version in (0, 1)]
    mapped = double.transfers.gpu.opened
    assert len(mapped) > len({memory.handle for memory in mapped}) > 0  # bufferfuls, one buffer
    assert gpu.rooms_bytes == 0


async def test_what_fails_halfway_ends_the_engine_frees_the_buffer_and_is_mended_by_the_next(
    models: Models, gpu: HostGpu
) -> None:
    async with opened(models.directories[0]) as (double, adapter, _):
        await adapter.pause("abort")
        shared = len(gpu.shared)
        double.transfers.fails_at = "model.norm.weight"
        with pytest.raises(EngineGone, match=r"may have loaded only some.*model\.norm\.weight"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")
        assert len(gpu.shared) == shared
        again = make_adapter(double.url, models.directories[0], weights="ipc")
        await again.open("v2")
        chunks = await sampled(again, "v2")
        assert logprobs(chunks) == pytest.approx(await by_files(models, 0), abs=1e-5)
        await again.close()
    assert gpu.rooms_bytes == 0


async def test_a_server_on_another_gpu_says_so(models: Models, gpu: HostGpu) -> None:
    gpu.uuid = "5f0c7d3a-0000-4000-8000-000000000002"
    with pytest.raises(ConfigError, match="IPC handle not found for GPU UUID"):
        async with opened(models.directories[0]):
            pass


async def test_a_gpu_without_room_for_the_buffer_is_named(models: Models, gpu: HostGpu) -> None:
    async with opened(models.directories[0]) as (_, adapter, _):
        await adapter.pause("abort")
        gpu._free_bytes = 100
        with pytest.raises(EngineGone, match="no room for another"):
            await adapter.load_tensors(tensors_of(models, 1), "v1")


async def test_servers_of_several_workers_or_another_transfer_are_refused_before_weights_go(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.directories[0]

    async def refusal(double: VllmDouble) -> str:
        adapter = make_adapter(double.url, model, weights="ipc")
        with pytest.raises(ConfigError) as error:
            await adapter.open("v0")
        await adapter.close()
        assert double.transfers.took == []
        return str(error.value)

    with VllmDouble(model, weight_transfer={"backend": "nccl"}) as double:
        started_so = (
            """with nccl weight transfer; start it with --weight-transfer-config '{"backend": """
        )
        assert started_so + '"ipc"}' in await refusal(double)
    with VllmDouble(model, weight_transfer=IPC) as double:
        double.transfers.workers = 2
        assert "has 2: start servers of one worker each" in await refusal(double)
        monkeypatch.setattr(vllm_adapter, "own_device", lambda: None)
        assert "by ipc, because this process sees no GPU" in await refusal(double)
