"""Peer benchmark: AReaL's rollout executor, with a trainer that takes no time.

Runs in a Python that has AReaL (README.md here says how to make one) and prints one JSON line:
``in_process`` with an engine that answers at once or after a delay; ``http`` with AReaL's own HTTP
client and ``http_engine.py`` at the other end.
"""

import argparse
import asyncio
import logging
from typing import Any

import torch
from areal.api import ModelRequest, ModelResponse, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import SGLangBackend
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from areal.infra.workflow_executor import WorkflowExecutor
from peer import PROMPT, Stopwatch, http_engine, options
from torchdata.stateful_dataloader import StatefulDataLoader


class LocalEngine:
    """In-process engine: the same tokens each time, after a configured delay."""

    def __init__(self, work: argparse.Namespace) -> None:
        self._tokens = list(range(work.tokens))
        self._logprobs = [-1.0] * work.tokens
        self._turn_s = work.turn_s
        self._version = 0

    def get_version(self) -> int:
        """Return the weight version, for AReaL's staleness manager."""
        return self._version

    def set_version(self, version: int) -> None:
        """Set the weight version, as a publish does."""
        self._version = version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Run one turn."""
        await asyncio.sleep(self._turn_s)
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=list(self._tokens),
            output_logprobs=list(self._logprobs),
            output_versions=[self._version] * len(self._tokens),
            stop_reason="length",
        )


class OneTurn(RolloutWorkflow):
    """One turn and a reward, as tensors: the output of AReaL's RLVRWorkflow, without a
    tokenizer."""

    def __init__(self, tokens: int) -> None:
        self._sampling = GenerationHyperparameters(n_samples=1, max_new_tokens=tokens)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run one rollout."""
        sampling = self._sampling.new(n_samples=1)
        request = ModelRequest(rid=str(data["id"]), input_ids=list(PROMPT), gconfig=sampling)
        answer = await engine.agenerate(request)
        given, sampled = answer.input_len, answer.output_len
        columns = {
            "input_ids": torch.tensor(answer.input_tokens + answer.output_tokens),
            "loss_mask": torch.tensor([0] * given + [1] * sampled, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * given + answer.output_logprobs),
            "versions": torch.tensor([-1] * given + answer.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(given + sampled, dtype=torch.bool),
            "rewards": torch.tensor(1.0),
        }
        return {name: column.unsqueeze(0) for name, column in columns.items()}


def config_for(work: argparse.Namespace) -> InferenceEngineConfig:
    """Configure the requested concurrency, and a staleness bound that never holds a rollout back.

    AReaL counts a group as one rollout, and allows one batch more than its bound. So two batches
    more than run at once may be outstanding: one is gathered, and one is in training.
    """
    groups = work.rollouts // work.group_size
    return InferenceEngineConfig(
        experiment_name="benchmark",
        trial_name="benchmark",
        consumer_batch_size=work.batch,
        max_concurrent_rollouts=groups,
        max_head_offpolicyness=-(-groups // work.batch) + 1,
        setup_timeout=30,
    )


def train(executor: Any, engine: Any, work: argparse.Namespace) -> None:
    """Take batches and advance the version; print the cost after the warm-up."""
    dataloader = StatefulDataLoader(
        [{"id": number} for number in range(65_536)],
        batch_size=work.batch,
        collate_fn=lambda items: items,
    )
    workflow = OneTurn(work.tokens)
    if work.group_size > 1:
        workflow = GroupedRolloutWorkflow(workflow, work.group_size, logging.getLogger())
    watch = Stopwatch()
    for number in range(work.warm_up + work.batches):
        if number == work.warm_up:
            watch = Stopwatch()
        batch = executor.prepare_batch(dataloader, workflow=workflow)
        assert len(batch) == work.batch
        engine.set_version(number + 1)
    watch.print_line(work.batches * work.batch * work.group_size)


def in_process(work: argparse.Namespace) -> None:
    """Measure the executor alone."""
    engine = LocalEngine(work)
    executor = WorkflowExecutor(config_for(work), engine)
    executor.initialize(train_data_parallel_size=1)
    try:
        train(executor, engine, work)
    finally:
        executor.destroy()


def over_http(work: argparse.Namespace) -> None:
    """Measure the executor with AReaL's HTTP client."""
    with http_engine(work.tokens) as address:
        engine = RemoteInfEngine(config_for(work), SGLangBackend())
        engine.initialize(engine_id="benchmark", addr=address, train_data_parallel_size=1)
        try:
            train(engine, engine, work)
        finally:
            engine.destroy()


def main() -> None:
    """Run one measurement."""
    work = options(__doc__)
    torch.set_num_threads(1)
    if work.what == "http":
        over_http(work)
    else:
        in_process(work)


if __name__ == "__main__":
    main()
