"""A user-defined harness of verifiers: a program that calls tools until it can answer.

``verifiers_agent.py`` names it; verifiers imports it and starts its program.
"""

import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult, Runtime

PROGRAM = """
import json, sys
import openai

base_url, api_key, question = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
messages = [{"role": "user", "content": question}]
while True:
    answer = client.chat.completions.create(model="policy", messages=messages, tools=tools)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        numbers = json.loads(call.function.arguments)
        total = str(numbers["a"] + sum(numbers["b"]))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
"""


class CallingConfig(HarnessConfig):
    pass


class Calling(Harness[CallingConfig]):
    """Harness whose program is :data:`PROGRAM`; verifiers finds it by the module's name."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **others: Any,
    ) -> ProgramResult:
        """Run the program in verifiers' runtime, with the session's address and key."""
        _, question = self.resolve_prompt(data)
        program = [sys.executable, "-c", PROGRAM, endpoint, secret, str(question)]
        return await runtime.run_program(program, {})


__all__ = ["Calling"]
