"""Program that runs a task of several turns with verifiers' runner.

Arguments: base URL, key; and, for the client that trains, the directory of the tokenizer. Prints
the samples that it would train on as JSON, and the reward.
"""

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.agent import Agent, AgentConfig
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.runtimes import SubprocessConfig

KEY = "KEY_OF_THE_SESSION"


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def is_right(self, task: SumData, trace: Any) -> float:
        return float(task.answer in trace.last_reply)


async def main(base_url: str, api_key: str, tokenizer: str = "") -> None:
    os.environ[KEY] = api_key
    client: Any = EvalClientConfig(base_url=base_url, api_key_var=KEY)
    if tokenizer:
        client = TrainClientConfig(
            base_url=base_url,
            api_key_var=KEY,
            renderer=Qwen3RendererConfig(),
            renderer_model_name=tokenizer,
        )
    config = AgentConfig(
        harness={"id": "calling_harness"},  # the module beside this one
        runtime=SubprocessConfig(),
        model="policy",
        client=client,
        sampling=vf.SamplingConfig(max_tokens=400),
    )
    data = SumData(prompt="What is 1 + 2?", answer="3")
    async with Agent(config) as agent:
        trace = await agent.run(Sum(data, vf.TaskConfig()))
    if not trace.ok:
        raise SystemExit(f"verifiers says: {trace.errors}")
    samples = [
        {
            "token_ids": branch.token_ids,
            "sampled": branch.sampled_mask,
            "logprobs": branch.spread(lambda node: node.logprobs),
        }
        for branch in trace.branches
    ]
    sys.stdout.write(f"{json.dumps(samples)}\n{trace.reward}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
