"""Minimal inference server for the peers' HTTP clients; it answers each POST with the same JSON.

It serves as much of SGLang's ``/generate`` and vLLM's ``/inference/v1/generate`` as the clients of
AReaL and SkyRL read. Each answer is one write of prepared bytes, so that only the client's cost is
measured. Standard library only, so that it runs in any Python.
"""

import argparse
import asyncio
import json


def sglang_answer(tokens: int) -> dict[str, object]:
    """Return SGLang's answer with ``return_logprob``."""
    return {
        "text": "",
        "meta_info": {
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": 128,
            "completion_tokens": tokens,
            "output_token_logprobs": [[-1.0, token, None] for token in range(tokens)],
        },
    }


def vllm_answer(tokens: int) -> dict[str, object]:
    """Return vLLM's answer to a generate request with token ids and log-probs."""
    content = [{"token": f"token_id:{token}", "logprob": -1.0} for token in range(tokens)]
    choice = {
        "index": 0,
        "token_ids": list(range(tokens)),
        "finish_reason": "length",
        "logprobs": {"content": content},
    }
    return {"request_id": "0", "choices": [choice]}


def http_answer(body: object) -> bytes:
    """Return a whole HTTP response."""
    text = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


class Engine(asyncio.Protocol):
    """One connection: finds the ends of requests without parsing them."""

    def __init__(self, answers: dict[bytes, bytes], other: bytes) -> None:
        self._answers = answers
        self._other = other
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._received += data
        while (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:head_end]
            end = head_end + 4 + _content_length(head)
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            path = head.split(b" ", 2)[1]
            assert self._transport is not None
            self._transport.write(self._answers.get(path, self._other))


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    return int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def main() -> None:
    """Listen on a free port, print it, and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    tokens = parser.parse_args().tokens
    answers = {
        b"/generate": http_answer(sglang_answer(tokens)),
        b"/inference/v1/generate": http_answer(vllm_answer(tokens)),
    }
    loop = asyncio.get_running_loop()
    other = http_answer({"status": "ok"})
    server = await loop.create_server(lambda: Engine(answers, other), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
