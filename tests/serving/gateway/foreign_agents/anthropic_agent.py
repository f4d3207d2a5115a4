"""Agent that is a loop around Anthropic's client, with one tool; its last answer is streamed.

``python anthropic_agent.py BASE_URL API_KEY`` prints the answer.
"""

import sys
from typing import Any

import anthropic

TOOLS: list[Any] = [
    {"name": "add", "description": "Add numbers.", "input_schema": {"type": "object"}}
]


def main(base_url: str, api_key: str) -> str:
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    ask = {"model": "policy", "max_tokens": 200, "system": "Add.", "tools": TOOLS}
    counted = client.messages.count_tokens(
        model="policy", system="Add.", tools=TOOLS, messages=messages
    )
    said = client.messages.create(messages=messages, **ask)
    assert said.stop_reason == "tool_use"
    assert said.usage.input_tokens == counted.input_tokens
    (use,) = (block for block in said.content if block.type == "tool_use")
    total = use.input["a"] + sum(use.input["b"])
    result = {"type": "tool_result", "tool_use_id": use.id, "content": str(total)}
    messages += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    with client.messages.stream(messages=messages, **ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.content[0].text == text
    return text


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
