"""Client of the Tinker benchmark: loads one server through the SDK, prints a line per window.

Runs in a Python with the SDK of the release that both servers read (0.24.1); ``benchmarks.tinker``
starts it. Each line of standard input is a window, ``WHAT CLIENTS SECONDS``, answered by a line of
JSON. WHAT is ``sample`` (each client samples again and again), ``train`` (each client is a tenant
with a model of its own, which makes one step after another), ``study`` (each samples its model's
in-flight weights again and again, and makes a step every second) or ``publish`` (it also publishes
the weights every second, which needs a newer SDK).
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import tinker
from tinker import types

RANK = 8
PROMPT_TOKENS, SAMPLED_TOKENS = 32, 8
SEQUENCES, SEQUENCE_TOKENS = 8, 64
"""Data of one optimizer step."""

LEARNING_RATE = 1e-4

PUBLISH_INTERVAL_S = 1.0


class Tenant:
    """One client with a session and, once it trains, a model."""

    def __init__(self, url: str, model: str, number: int) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=f"tml-tenant{number}")
        self._model = model
        self._trainer: Any = None  # of the SDK, which is not installed where mypy runs
        self._sampler: Any = None

    async def sample(self) -> None:
        """Sample once from the base model."""
        if self._sampler is None:
            self._sampler = await self._service.create_sampling_client_async(base_model=self._model)
        prompt = types.ModelInput.from_ints([10 + n % 50 for n in range(PROMPT_TOKENS)])
        params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, seed=1)
        result = await self._sampler.sample_async(prompt, 1, params)
        assert result.sequences[0].tokens

    async def train(self) -> None:
        """Make one optimizer step, both of its requests sent before a result is waited for."""
        if self._trainer is None:
            self._trainer = await self._service.create_lora_training_client_async(
                base_model=self._model, rank=RANK, seed=0
            )
        ids = [10 + n % 50 for n in range(SEQUENCE_TOKENS + 1)]
        data = types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=ids[1:], dtype="int64", shape=[SEQUENCE_TOKENS]
                ),
                "weights": types.TensorData(
                    data=[1.0] * SEQUENCE_TOKENS, dtype="float32", shape=[SEQUENCE_TOKENS]
                ),
            },
        )
        passed = await self._trainer.forward_backward_async([data] * SEQUENCES, "cross_entropy")
        stepped = await self._trainer.optim_step_async(
            types.AdamParams(learning_rate=LEARNING_RATE)
        )
        await passed.result_async()
        await stepped.result_async()

    async def publish(self) -> None:
        """Have later samples, and those that run, use the model's present weights."""
        assert self._trainer is not None
        self._sampler = await self._trainer.save_weights_and_get_sampling_client_async(
            kind="inflight"
        )

    async def study(self, end_s: float, *, publishes: bool) -> None:
        """Make a step every second, and with ``publishes`` publish its weights."""
        while (start_s := time.perf_counter()) < end_s:
            await self.train()
            if publishes:
                await self.publish()
            left_s = PUBLISH_INTERVAL_S - (time.perf_counter() - start_s)
            await asyncio.sleep(max(0.0, left_s))


async def window(tenants: list[Tenant], what: str, seconds: float) -> dict[str, object]:
    """Have all tenants repeat one operation; return the number of operations, and the time of
    each."""
    begin = time.perf_counter()
    times_s: list[float] = []

    async def repeat(tenant: Tenant) -> None:
        while (start := time.perf_counter()) < begin + seconds:
            await (tenant.train() if what == "train" else tenant.sample())
            times_s.append(time.perf_counter() - start)

    repeats = list(map(repeat, tenants))
    if what in ("study", "publish"):
        first = tenants[0]  # the one that trains; all sample its weights
        if first._trainer is None:
            await first.train()
            await first.publish()
        for tenant in tenants:
            tenant._sampler = first._sampler
        begin = time.perf_counter()
        repeats.append(first.study(begin + seconds, publishes=what == "publish"))
    await asyncio.gather(*repeats)
    return {"done": len(times_s), "wall_s": time.perf_counter() - begin, "times_s": times_s}


async def main() -> None:
    """Answer windows until the end of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("model")
    options = parser.parse_args()
    tenants: list[Tenant] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, clients, seconds = line.split()
        while len(tenants) < int(clients):
            tenants.append(Tenant(options.url, options.model, len(tenants)))
        result = await window(tenants[: int(clients)], what, float(seconds))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
