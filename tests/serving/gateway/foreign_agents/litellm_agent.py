"""Agent that is a loop around litellm, with one tool; its last answer is streamed.

``python litellm_agent.py BASE_URL API_KEY`` prints the answer.
"""

import json
import sys

import litellm

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def main(base_url: str, api_key: str) -> str:
    ask = {"model": "openai/policy", "base_url": base_url, "api_key": api_key, "tools": TOOLS}
    messages = [{"role": "user", "content": "1+2?"}]
    said = litellm.completion(messages=messages, max_tokens=200, **ask).choices[0].message
    (call,) = said.tool_calls
    given = json.loads(call.function.arguments)
    result = given["a"] + sum(given["b"])
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    stream = litellm.completion(messages=messages, max_tokens=200, stream=True, **ask)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
