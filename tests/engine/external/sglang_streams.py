"""SGLang's adapter for tests: streams of requests, compared with the weights, and a double.

Streams work with a real server, too.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.served_app import served
from tidegate.engine.execution.block_cache import cache_argument
from tidegate.engine.external.adapter import Capabilities, GeneratedChunk, GenerationRequest
from tidegate.engine.external.sglang import SglangAdapter, make_adapter
from tidegate.transport.messages import SamplingParams

PROMPT = list(range(1, 25))
LONG = SamplingParams(max_tokens=200)
TOLERANCE = 1e-4
"""Nats, for float32 in chunks of one token or all at once. Other weights are off by nats."""


@dataclass
class Sglang:
    """Adapter of a server, double or real, with test operations."""

    adapter: SglangAdapter
    capabilities: Capabilities

    def stream(
        self, sampling: SamplingParams = LONG, salt: str = "v0", interval_tokens: int = 1
    ) -> "Stream":
        request = GenerationRequest(
            token_ids=PROMPT,
            sampling=sampling,
            salt=salt,
            stream_interval_tokens=interval_tokens,
        )
        chunks: list[GeneratedChunk] = []
        return Stream(asyncio.create_task(self._read(request, chunks)), chunks)

    async def _read(self, request: GenerationRequest, chunks: list[GeneratedChunk]) -> None:
        async with aclosing(self.adapter.generate(request)) as stream:
            async for chunk in stream:
                chunks.append(chunk)


HELD_AT = 100
"""Tokens at which the double holds a request until a test calls the server."""


@dataclass
class SglangAndDouble(Sglang):
    """Test operations, with the server double at hand."""

    double: SglangDouble


@asynccontextmanager
async def sglang(
    model: Path, way: str = "disk", *, run_model: Path | None = None, **how: Any
) -> AsyncIterator[SglangAndDouble]:
    """Open an adapter of a new double, which takes weights in this way."""
    double = SglangDouble(model, **how)
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        adapter = make_adapter(url, run_model or model, weights=way)
        try:
            capabilities = await adapter.open("v0")
            reported = len(double.calls)
            double.holds = lambda prompt, sampled, label: (
                sampled >= HELD_AT and len(double.calls) == reported
            )
            yield SglangAndDouble(adapter, capabilities, double)
        finally:
            await adapter.close()


@dataclass
class Stream:
    """A request in flight, and its chunks so far."""

    task: asyncio.Task[None]
    chunks: list[GeneratedChunk] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def labels(self) -> list[tuple[str, int, int]]:
        return [tuple(label) for label in self.chunks[-1].labels or ()]  # type: ignore[misc]

    async def has(self, tokens: int) -> None:
        """Wait until ``tokens`` tokens have arrived."""
        async with asyncio.timeout(60):
            while len(self.tokens) < tokens and not self.task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.002)  # as they come from another thread
        assert len(self.tokens) >= tokens

    async def end(self) -> "Stream":
        async with asyncio.timeout(60):
            await self.task
        return self


def off_by(models: list[Path], stream: Stream, spans: list[tuple[int, int]]) -> float:
    """Return the largest difference of log-probs from the models in ``spans``: (model, tokens).

    The reference computes KV of a model's tokens, and of all before the first of them, with that
    model: what engines that keep KV are expected to do.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    true: list[float] = []
    cache, computed = transformers.DynamicCache(), 0
    context = PROMPT + stream.tokens
    for number, tokens in spans:
        model = auto.from_pretrained(models[number], dtype=torch.float32).eval()
        end = len(PROMPT) + len(true) + tokens - 1
        with torch.no_grad():
            unread = torch.tensor([context[computed:end]])
            out = model(unread, use_cache=True, **cache_argument(model, cache))
        logprobs = torch.log_softmax(out.logits[0, -tokens:], -1)
        sampled = torch.tensor(stream.tokens[len(true) : len(true) + tokens])
        true += logprobs.gather(1, sampled[:, None])[:, 0].tolist()
        computed = end
    assert len(true) == len(stream.tokens)
    return max(abs(a - b) for a, b in zip(stream.logprobs, true, strict=True))
