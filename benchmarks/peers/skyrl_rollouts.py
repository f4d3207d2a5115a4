"""What does a rollout cost SkyRL's fully asynchronous loop? Its own, with its simulated trainer.

Runs in a Python that has SkyRL (README.md here says how to make one), told as one JSON line:
``in_process`` with an engine that answers at once, or after a while; ``http`` with SkyRL's own
HTTP client and ``http_engine.py`` at the other end.
"""

import argparse
import asyncio
import os
import typing
from typing import Any

import typing_extensions
from peer import PROMPT, Stopwatch, http_engine, options

os.environ["TQDM_DISABLE"] = "1"  # what it prints would be measured too
typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12

from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.generators.base import GeneratorInterface  # noqa: E402


class NoTokenizer:
    """Decodes to nothing: text is not what is measured."""

    pad_token_id = 0
    eos_token_id = 0

    def decode(self, *_: object, **__: object) -> str:
        """One row."""
        return ""

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        """Several."""
        return [""] * len(rows)


class NoTracker:
    """Takes metrics, keeps none."""

    def log(self, *_: object, **__: object) -> None:
        """Take some."""

    def finish(self) -> None:
        """No more come."""


class Prompts(list[dict[str, object]]):
    """A dataset in memory."""

    def collate_fn(self, items: list[dict[str, object]]) -> list[dict[str, object]]:
        """As they are."""
        return items


class LocalClient:
    """An engine in this process: the same tokens each time, after the time asked for."""

    def __init__(self, work: argparse.Namespace) -> None:
        self._token_ids = list(range(work.tokens))
        self._logprobs = [-1.0] * work.tokens
        self._turn_s = work.turn_s

    async def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One turn of each rollout of a group."""
        await asyncio.sleep(self._turn_s)
        rows = len(batch["prompt_token_ids"])
        return {
            "response_ids": [list(self._token_ids) for _ in range(rows)],
            "response_logprobs": [list(self._logprobs) for _ in range(rows)],
            "stop_reasons": ["length"] * rows,
        }

    async def pause_generation(self) -> None:
        """Part of a publish."""

    async def resume_generation(self) -> None:
        """Part of a publish."""

    def increment_weight_version(self) -> None:
        """Part of a publish."""


class OneTurn(GeneratorInterface):
    """One turn and a reward: what SkyRL's gym generator makes, without tokenizer and gym."""

    def __init__(self, client: Any, tokens: int) -> None:
        self._client = client
        self._sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0}

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        """A group."""
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
    """As many rollouts at once as asked for, and no model anywhere."""
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
    """Run one epoch; tell what its steps after the warm-up cost."""
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
    logger.remove()  # as above; the constructor has set it up
    trainer.warm_up = work.warm_up
    await trainer.train()
    trainer.watch.tell(work.batch * work.batches * work.group_size)


async def over_http(url: str, work: argparse.Namespace) -> None:
    """The loop, and SkyRL's HTTP client."""
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, tokenizer=NoTokenizer()
    )
    await train(client, work)


def main() -> None:
    """Measure one thing."""
    work = options(__doc__)
    if work.what == "http":
        with http_engine(work.tokens) as address:
            asyncio.run(over_http(f"http://{address}", work))
    else:
        asyncio.run(train(LocalClient(work), work))


if __name__ == "__main__":
    main()
