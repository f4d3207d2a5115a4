"""Task of several turns, run by verifiers' own runner over Tidegate's HTTP API.

    python examples/verifiers_agent.py URL KEY [TOKENIZER]     # pip install "verifiers>=0.4,<0.5"

URL is that of the gateway or of ``tidegate serve``, with its key. Given the directory of the
model's tokenizer, it uses ``TrainClient``, which sends and gets tokens; else the client that
evaluates. Prints the samples that verifiers would train on as JSON, then the reward.
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
    """A question, and its answer."""

    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """A sum, which the harness' program works out with a tool."""

    @vf.reward(weight=1.0)
    async def is_right(self, task: SumData, trace: Any) -> float:
        """Whether the last reply has the answer."""
        return float(task.answer in trace.last_reply)


async def main(base_url: str, api_key: str, tokenizer: str = "") -> None:
    """Run the task once, and print its samples and reward."""
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
