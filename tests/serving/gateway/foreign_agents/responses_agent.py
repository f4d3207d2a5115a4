"""Agent that is a loop around OpenAI's Responses API, with one tool; its last answer is streamed.

``python responses_agent.py BASE_URL API_KEY`` prints the answer.
"""

import json
import sys
from typing import Any

import openai

TOOLS: list[Any] = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
]


def main(base_url: str, api_key: str) -> str:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    said = client.responses.create(model="policy", input="1+2?", tools=TOOLS)
    (call,) = (item for item in said.output if item.type == "function_call")
    given = json.loads(call.arguments)
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": str(given["a"] + sum(given["b"])),
    }
    with client.responses.stream(
        model="policy", input=[result], tools=TOOLS, previous_response_id=said.id
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas)
    return final.output_text


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
