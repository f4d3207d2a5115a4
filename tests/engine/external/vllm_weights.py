"""Adapters of vLLM's double, and what it samples with a version's weights."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.external.vllm_double import VllmDouble
from tests.engine.orchestra import Models
from tidegate.engine.external.adapter import Capabilities, GeneratedChunk, GenerationRequest
from tidegate.engine.external.vllm import VllmAdapter, make_adapter
from tidegate.errors import ConfigError
from tidegate.transport.messages import SamplingParams

PROMPT = list(range(1, 40))

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@asynccontextmanager
async def vllm(
    model: Path, way: str = "disk", **config: Any
) -> AsyncIterator[tuple[VllmDouble, VllmAdapter, Capabilities]]:
    """Open an adapter of a new double, which takes weights in this way."""
    with VllmDouble(model, **config) as double:
        adapter = make_adapter(double.url, model, weights=way)
        try:
            yield double, adapter, await adapter.open("v0")
        finally:
            await adapter.close()


async def refusal(model: Path, way: str = "disk", **config: Any) -> str:
    """Return why a server started with these settings is refused, and left as it is."""
    with VllmDouble(model, **config) as double:
        adapter = make_adapter(double.url, model, weights=way)
        try:
            with pytest.raises(ConfigError) as error:
                await adapter.open("v0")
        finally:
            await adapter.close()
        assert way == "disk" or double.calls == []
    return str(error.value)


def tensors_of(models: Models, version: int) -> dict[str, torch.Tensor]:
    return load_file(models.directories[version] / "model.safetensors")


async def sampled(adapter: VllmAdapter, salt: str) -> list[GeneratedChunk]:
    request = GenerationRequest(token_ids=PROMPT, sampling=GREEDY, salt=salt)
    async with aclosing(adapter.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


def logprobs(chunks: list[GeneratedChunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


async def by_files(models: Models, version: int) -> list[float]:
    """Return the output with a version's weights, loaded from files."""
    async with vllm(models.directories[version]) as (_, adapter, _):
        return logprobs(await sampled(adapter, "v0"))
