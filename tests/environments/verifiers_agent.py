"""Program that runs a task of several turns with verifiers' runner; arguments: base URL, key."""

import asyncio
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.agent import Agent, AgentConfig
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.runtimes import SubprocessConfig

KEY = "KEY_OF_THE_SESSION"


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def is_right(self, task: SumData, trace: Any) -> float:
        return float(task.answer in trace.last_reply)


async def main(base_url: str, api_key: str) -> None:
    os.environ[KEY] = api_key
    config = AgentConfig(
        harness={"id": "calling_harness"},  # the module beside this one
        runtime=SubprocessConfig(),
        model="policy",
        client=EvalClientConfig(base_url=base_url, api_key_var=KEY),
    )
    data = SumData(prompt="What is 1 + 2?", answer="3")
    async with Agent(config) as agent:
        trace = await agent.run(Sum(data, vf.TaskConfig()))
    if not trace.ok:
        raise SystemExit(f"verifiers says: {trace.errors}")
    sys.stdout.write(f"{trace.reward}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
