"""Peer benchmark: SkyRL's fully asynchronous loop, with its own simulated trainer.

Runs in a Python that has SkyRL (README.md here says how to make one) and prints one JSON line:
``in_process`` with an engine that answers at once or after a delay; ``http`` with SkyRL's own HTTP
client and ``http_engine.py`` at the other end.
"""

import argparse
import asyncio
import os
import typing
from typing import Any

import typing_extensions
from peer import PROMPT, Stopwatch, http_engine, options

os.environ["TQDM_DISABLE"] = "1"  # its output would be measured too
typing.TypedDict = typing_extensions.TypedDict  # pydantic requires it before Python 3.12

from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.generators.base import GeneratorInterface  # noqa: E402


class NoTokenizer:
    """Tokenizer stub that decodes to empty text, which is not measured."""

    pad_token_id = 0
    eos_token_id = 0

    def decode(self, *_: object, **__: object) -> str:
        """Decode one row."""
        return ""

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        """Decode several rows."""
        return [""] * len(rows)


class NoTracker:
    """Tracker stub that discards metrics."""

    def log(self, *_: object, **__: object) -> None:
        """Discard metrics."""

    def finish(self) -> None:
        """No-op."""


class Prompts(list[dict[str, object]]):
    """A dataset in memory."""

    def collate_fn(self, items: list[dict[str, object]]) -> list[dict[str, object]]:
        """Return the items unchanged."""
        return items


class LocalClient:
    """In-process engine: the same tokens each time, after a configured delay."""

    def __init__(self, work: argparse.Namespace) -> None:
        self._token_ids = list(range(work.tokens))
        self._logprobs = [-1.0] * work.tokens
        self._turn_s = work.turn_s

    async def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Generate one turn for each rollout of a group."""
        await asyncio.sleep(self._turn_s)
        rows = len(batch["prompt_token_ids"])
        return {
            "response_ids": [list(self._token_ids) for _ in range(rows)],
            "response_logprobs": [list(self._logprobs) for _ in range(rows)],
            "stop_reasons": ["length"] * rows,
        }

    async def pause_generation(self) -> None:
        """No-op part of a publish."""

    async def resume_generation(self) -> None:
        """No-op part of a publish."""

    def increment_weight_version(self) -> None:
        """No-op part of a publish."""


class OneTurn(GeneratorInterface):
    """One turn and a reward: the output of SkyRL's gym generator, without tokenizer and gym."""

    def __init__(self, client: Any, tokens: int) -> None:
        self._client = client
        self._sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0}

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        """Generate a group."""
        rows = len(input_batch["prompts"])
        answer = await self._client.generate(
            {
                "prompt_token_ids": [list(PROMPT) for _ in range(rows)],
                "sampling_params": self._sampling,
                "session_ids": [i.to_string() for i in input_batch["trajectory_ids"]],
            }
        )
        return {
            "prompt_token_ids": [list(PROMPT) for _ in range(rows)],
            "response_ids": answer["response_ids"],
            "rewards": [1.0] * rows,
            "loss_masks": [[1] * len(ids) for ids in answer["response_ids"]],
            "stop_reasons": answer["stop_reasons"],
            "rollout_metrics": {},
            "rollout_logprobs": answer["response_logprobs"],
        }


class Trainer(FullyAsyncTrainerSim):
    """SkyRL's simulated trainer, with a stopwatch that starts after the warm-up."""

    warm_up = 0
    steps = 0
    watch = Stopwatch()

    async def _run_training(self, training_input: object) -> object:
        self.steps += 1
        if self.steps == self.warm_up:
            self.watch = Stopwatch()
        return await super()._run_training(training_input)


def config_for(work: argparse.Namespace) -> SkyRLTrainConfig:
    """Configure the requested concurrency, without any model."""
    groups = work.rollouts // work.group_size
    config = SkyRLTrainConfig()
    trainer, generator = config.trainer, config.generator
    trainer.epochs = 1
    trainer.train_batch_size = trainer.policy_mini_batch_size = work.batch
    trainer.eval_interval = trainer.ckpt_interval = trainer.hf_save_interval = -1
    trainer.resume_mode = "none"
    trainer.update_ref_every_epoch = False
    trainer.enable_ray_gpu_monitor = False
    trainer.placement.colocate_all = False
    trainer.algorithm.policy_loss_type = "rollout_is"
    trainer.algorithm.dynamic_sampling.type = None
    trainer.fully_async.enabled = trainer.fully_async.simulate_training = True
    trainer.fully_async.simulate_training_step_seconds = 0.0
    trainer.fully_async.num_parallel_generation_workers = groups
    trainer.fully_async.max_staleness_steps = -(-groups // work.batch) + 1
    generator.n_samples_per_prompt = work.group_size
    generator.batched = False
    generator.inference_engine.enable_ray_prometheus_stats = False
    config.data.dataloader.num_workers = 0
    config.environment.env_class = "none"
    return config


async def train(client: Any, work: argparse.Namespace) -> None:
    """Run one epoch; print the cost of its steps after the warm-up."""
    tasks = work.batch * (work.warm_up + work.batches)
    row = {"prompt": [{"role": "user", "content": ""}], "env_class": "none", "env_extras": {}}
    trainer = Trainer(
        cfg=config_for(work),
        tracker=NoTracker(),
        tokenizer=NoTokenizer(),
        train_dataset=Prompts({**row, "uid": str(number)} for number in range(tasks)),
        inference_engine_client=client,
        generator=OneTurn(client, work.tokens),
    )
    logger.remove()  # not measured; the constructor has set it up
    trainer.warm_up = work.warm_up
    await trainer.train()
    trainer.watch.print_line(work.batch * work.batches * work.group_size)


async def over_http(url: str, work: argparse.Namespace) -> None:
    """Measure the loop with SkyRL's HTTP client."""
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, tokenizer=NoTokenizer()
    )
    await train(client, work)


def main() -> None:
    """Run one measurement."""
    work = options(__doc__)
    if work.what == "http":
        with http_engine(work.tokens) as address:
            asyncio.run(over_http(f"http://{address}", work))
    else:
        asyncio.run(train(LocalClient(work), work))


if __name__ == "__main__":
    main()
