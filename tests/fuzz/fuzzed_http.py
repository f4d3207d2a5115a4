"""Fuzzing of the gateway and the vLLM- and SGLang-compatible server over HTTP; parts for Tinker's.

Bodies are valid ones with a part replaced, garbled text, endless nesting, bodies up to their size
limits, endless headers, half requests, and requests that are not HTTP. A healthy client sends
requests in between, and must be answered correctly.
"""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tidegate
from tests.fuzz.frames import swap_value
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import ENDS, add_chat_template, chat_tokenizer
from tests.orchestrator.episodes.talking import Engine
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.model_files import ModelFiles, read_tokenizer
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.serving.control.routes import BODY_BYTES_MAX as SERVER_BODY_BYTES_MAX
from tidegate.serving.gateway.app import BODY_BYTES_MAX
from tidegate.serving.gateway.gateway import Endpoint, Gateway
from tidegate.serving.http.server import JSON_TYPE
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

WORDS = "what the model says"

BODIES_PER_SESSION = 200
"""Requests per session, because valid bodies create rows, which end with their session."""

ANSWER_TIMEOUT_S = 120.0
"""Timeout of an answer, far above any real one; reaching it is a failure."""

LARGE_SHARE = 1 / 500
"""Share of requests with bodies up to the size limit."""

WARM_UP_LARGE_SHARE = 1 / 10
"""The same before memory is measured, so that each kind of large body has come."""

HALF_SHARE = 0.02
"""Share of requests that are cut off while their connection stays open for a while."""

HALVES_HELD = 32
"""Maximum number of open half requests; the oldest is closed for a new one."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"}],
    "tools": [TOOL],
    "max_tokens": 16,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["\n\n"],
    "logit_bias": {"5": -1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 1,
    "stream": False,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}
RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    "max_output_tokens": 16,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "truncation": "auto",
    "stream": False,
}
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 16,
    "stop_sequences": ["x"],
    "stream": False,
}
COUNTED = {k: MESSAGES[k] for k in ("model", "system", "messages", "tools")}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNTED,
    "/inference/v1/generate": {
        "token_ids": [3, 4, 5],
        "sampling_params": {"max_tokens": 4, "logprobs": 1},
    },
    "/v1/completions": {"prompt": [3, 4, 5], "max_tokens": 4, "stop": "x", "n": 2, "logprobs": 1},
    "/tokenize": {"messages": [{"role": "user", "content": "hello"}]},
    "/sessions/{}/reward": {"reward": 0.5},
}

SERVER_PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [3, 4, 5], "max_tokens": 4, "n": 2, "logprobs": 1, "seed": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "1+2?"}],
        "max_tokens": 4,
        "stop": ["x"],
        "logit_bias": {"5": -1.0},
        "top_logprobs": 2,
        "logprobs": True,
    },
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "q"}]] * 2,
        "max_tokens": 4,
    },
    "/inference/v1/generate": {
        "token_ids": [3, 4, 5],
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1},
        "stream": False,
    },
    "/tokenize": {"prompt": "hello", "return_token_strs": True},
    "/detokenize": {"tokens": [3, 4, 5]},
    "/abort_requests": {"request_ids": ["x"]},
    "/start_weight_update": {},
    "/update_weights": {"update_info": {"path": "/nowhere", "names": ["x"]}},
    "/finish_weight_update": {"weight_version": "7"},
    "/update_weight_version": {"new_version": "7"},
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/init_weight_transfer_engine": {"init_info": {}},
    "/weight_checker": {"action": "checksum"},
    "/pause?mode=keep": {},
    "/reset_prefix_cache": {},
    "/v1/responses": {k: v for k, v in RESPONSES.items() if k != "tools"},
    "/v1/messages": {k: v for k, v in MESSAGES.items() if "tool" not in k},
    "/v1/messages/count_tokens": COUNTED,
    "/generate": {
        "input_ids": [[3, 4, 5], [6, 7]],
        "sampling_params": {"max_new_tokens": 4, "n": 2, "stop": ["x"], "json_schema": "{}"},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "rid": ["a", "b"],
    },
    "/abort_request": {"rid": "x"},
    "/pause_generation": {"mode": "retract"},
    "/continue_generation": {},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/update_weights_from_disk": {"model_path": "/nowhere", "flush_cache": True},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVBAAAAAAAAABLAS4="]},
    "/update_weights_from_distributed": {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weights_update_group": {
        "master_address": "localhost",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "none",  # a known one would wait for a trainer
    },
    "/destroy_weights_update_group": {"group_name": "x"},
    "/unload_lora_adapter": {"lora_name": "x"},
}

MAY_FAIL = frozenset(
    {
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/weight_checker",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Paths that may refuse with vLLM's statuses: 500 for an impossible update, 501 if not served."""

PROTOBUF_TYPE = "application/x-protobuf"

SERVER_CONTEXT_TOKENS = 128
"""Context length, so short that a request without ``max_tokens`` ends soon."""

ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda chance: None,
    lambda chance: chance.random() < 0.5,
    lambda chance: chance.choice([0, -1, 2**31, 2**63, 2**64, -(2**70), 1e308, -0.0, 1e-320]),
    lambda chance: chance.choice(["", "\x00", "\ud7ff\uffff", "a" * 5000, "{{ messages }}"]),
    lambda chance: [],
    lambda chance: {},
    lambda chance: [[[[]]]] * chance.randrange(1, 50),
    lambda chance: {"type": chance.choice(["text", "image_url", "function", "json_object", 7])},
    lambda chance: [chance.randrange(-5, 200_000) for _ in range(chance.randrange(20))],
    lambda chance: {str(chance.randrange(10**6)): chance.random() * 1e9},
)
"""Generators of values that replace a part of a body."""


class FixedEngine(Engine):
    async def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        self.words, self.received = [WORDS + self.end], []
        return await super().generate(rollout, sampling, media)

    def give_up_turn(self, rollout: Rollout) -> None:
        """No-op: turns end at once."""


class Client:
    """An HTTP connection that is reopened when the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._halves: deque[asyncio.StreamWriter] = deque()

    async def post(
        self, path: str, key: str, body: bytes, body_type: str = JSON_TYPE
    ) -> tuple[int, bytes]:
        """Send a valid request; return the answer's status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        writer.write(head_of(path, key, len(body), body_type) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(" ", 2)[1])
        if status == 204:
            answer = b""
        elif "content-length: " in head:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            answer = await reader.readexactly(length)
        else:
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        if "connection: close" in head:
            self.close()
        return status, answer

    async def send_raw(self, raw: bytes) -> bytes:
        """Send arbitrary bytes over a new connection, and read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            writer.write_eof()
            return await reader.read()
        except OSError:  # closed before all was sent
            return b""
        finally:
            writer.close()

    async def send_half(self, raw: bytes) -> None:
        """Send part of a request, and leave its connection open for a while."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        self._halves.append(writer)
        if len(self._halves) > HALVES_HELD:
            self._halves.popleft().close()

    def end(self) -> None:
        self.close()
        while self._halves:
            self._halves.popleft().close()

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def head_of(path: str, key: str, length: int, body_type: str = JSON_TYPE) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: {body_type}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def large_body(chance: random.Random, right: dict[str, Any], bytes_max: int) -> bytes:
    """Return a body near the size limit, or somewhat over it."""
    size = chance.choice([bytes_max // 16, bytes_max - 4096, bytes_max, bytes_max + 4096])
    values: list[Callable[[], str]] = [
        lambda: "{}," * (size // 3) + "{}",
        lambda: "0," * (size // 2) + "0",
        lambda: json.dumps({"role": "user", "content": "x" * size}),
        lambda: json.dumps("a b " * (size // 4)),
        lambda: json.dumps("\\u0041" * (size // 8)),
        lambda: '{"role":"user","content":"q"},' * min(20_000, size // 30) + "{}",
        lambda: "[" * size,
        lambda: '"' + "x" * size,
    ]
    name = chance.choice(["messages", "prompt", "token_ids", "tokens", "stop", "tools", "x"])
    inner = chance.choice(values)()
    rest = json.dumps({k: v for k, v in right.items() if k != name})[1:]
    opened = chance.choice(["[%s]", "%s"])
    return (f'{{"{name}": ' + opened % inner + (", " + rest if len(rest) > 1 else "}")).encode()


def oversized_head(chance: random.Random, path: str, key: str) -> bytes:
    """Return a request with headers of a megabyte: one, many, in the path, as trailers or chunk
    sizes."""
    begun = head_of(path, key, 2)[:-2]
    chunked = begun.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"\r\n"
    size = chance.choice([60_000, 70_000, 2**20])
    return chance.choice(
        [
            begun + b"x: " + b"y" * size + b"\r\n\r\n{}",
            begun + b"x: y\r\n" * (size // 6) + b"\r\n{}",
            b"GET /" + b"y" * size + b" HTTP/1.1\r\n\r\n",
            chunked + b"0\r\n" + b"t: y\r\n" * (size // 6) + b"\r\n",
            chunked + b"2;" + b"e" * size + b"\r\n{}\r\n0\r\n\r\n",
            chunked + b"1\r\n0\r\n" * (size // 6) + b"0\r\n\r\n",
        ]
    )


@dataclass(slots=True)
class FuzzedGateway:
    seed: int
    directory: Path
    bodies: int = 0
    refused: int = 0
    """Requests that were refused with 4xx, or whose connection was closed."""
    healthy: int = 0
    large_share: float = LARGE_SHARE
    large: int = 0
    """Requests with bodies near or over their limit."""
    failures: list[str] = field(default_factory=list)
    error_fields: tuple[bytes, ...] = (b'"error"',)
    """What the body of every refusal has, one of them."""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    async def feed(self, bodies: int, each: Callable[[int], None]) -> None:
        """Send this many requests; ``each`` is called with each number before."""
        path = add_chat_template(self.directory / "model", "chatml")
        tokenizer = read_tokenizer(path / "tokenizer.json")
        stop = tokenizer.token_to_id(ENDS["chatml"]) or 0
        model = ModelFiles(path, tokenizer, (0, stop))
        engine = FixedEngine(model, ENDS["chatml"], rollouts=10**9)
        defaults = SamplingSettings(max_tokens=64, temperature=1.0, seed=0)
        gateway, done = Gateway(), 0
        client = Client(int(gateway.url.rpartition(":")[2]))

        async def agent(endpoint: Endpoint, task: object) -> float:
            nonlocal done
            for _ in range(min(BODIES_PER_SESSION, bodies - done)):
                each(done)
                done += 1
                await self._send(client, endpoint)
            await self._send_valid_request(client, endpoint)
            return 0.0

        play = gateway.episode(agent)
        try:
            while done < bodies:
                await play(Episode(Rollout(done, 0, 0), model, engine, defaults), None)
        finally:
            client.end()
            gateway.close()

    async def _send(self, client: Client, endpoint: Endpoint) -> None:
        path, right = self.chance.choice(list(PATHS.items()))
        path = path.format(endpoint.session_id)
        await self.send(client, path, endpoint.api_key, right, BODY_BYTES_MAX)

    async def send(
        self,
        client: Client,
        path: str,
        key: str,
        right: dict[str, Any],
        bytes_max: int,
        protobuf: bytes | None = None,
    ) -> None:
        """Send one fuzzed request: of a JSON body, or of a protobuf body if there is one."""
        self.bodies += 1
        body_type = JSON_TYPE if protobuf is None else PROTOBUF_TYPE
        kind, body = self.chance.random(), b""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if kind < 0.05:
                    body = self._body(right)
                    await client.send_raw(
                        self._garbled(f"POST {path} HTTP/1.1\r\n\r\n".encode() + body)
                    )
                    self.refused += 1
                    return
                if kind < 0.05 + HALF_SHARE:
                    body = self._body(right)
                    whole = head_of(path, key, len(body)) + body
                    await client.send_half(whole[: self.chance.randrange(len(whole) + 1)])
                    self.refused += 1
                    return
                if kind < 0.05 + 2 * HALF_SHARE:
                    body = oversized_head(self.chance, path, key)
                    await client.send_raw(body)
                    self.refused += 1
                    return
                is_large = self.chance.random() < self.large_share
                self.large += is_large
                if protobuf is not None:
                    body = self._garbled(protobuf) * (bytes_max // len(protobuf) if is_large else 1)
                else:
                    body = (
                        large_body(self.chance, right, bytes_max) if is_large else self._body(right)
                    )
                status, answer = await client.post(path, key, body, body_type)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            client.close()
            if len(body) <= bytes_max:
                reported = f"no answer, {type(error).__name__}"
                self.failures.append(f"{path} {body[:300]!r}: {reported}")
            return
        self.refused += 400 <= status < 500
        may_fail = status == 503 or path in MAY_FAIL
        says_why = any(field in answer for field in self.error_fields)
        if (status >= 500 and not may_fail) or (status >= 400 and not says_why):
            self.failures.append(f"{path} {body[:300]!r}: {status} {answer[:300]!r}")

    async def _send_valid_request(self, client: Client, endpoint: Endpoint) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "and now?"}]}).encode()
        status, answer = await client.post("/v1/chat/completions", endpoint.api_key, body)
        if status != 200 or json.loads(answer)["choices"][0]["message"]["content"] != WORDS:
            self.failures.append(f"a healthy agent got {status} {answer[:300]!r}")
        self.healthy += 1

    # ------------------------------------------------------------ bodies

    def _body(self, right: dict[str, Any]) -> bytes:
        kind = self.chance.random()
        if kind < 0.55:
            return json.dumps(self._replaced(right)).encode()
        if kind < 0.9:
            return self._garbled(json.dumps(right).encode())
        depth = self.chance.choice([1, 100, 100_000])
        opened = self.chance.choice([b"[", b'{"messages":', b'{"a":[', b'"\\ud800'])
        return self.chance.choice([self.chance.randbytes(depth % 999), opened * depth, b""])

    def _replaced(self, right: dict[str, Any]) -> Any:
        """Return a copy with one to three parts replaced, added or removed."""
        copy = json.loads(json.dumps(right))
        for _ in range(self.chance.randrange(1, 4)):
            if copy:
                swap_value(self.chance, copy, self.chance.choice(ODD)(self.chance))
        return copy

    def _garbled(self, right: bytes) -> bytes:
        garbled = bytearray(right)
        for _ in range(self.chance.randrange(1, 6)):
            place = self.chance.randrange(len(garbled) + 1)
            if self.chance.random() < 0.5:
                garbled[place : place + self.chance.randrange(20)] = b""
            else:
                garbled[place:place] = self.chance.randbytes(self.chance.randrange(1, 8))
        return bytes(garbled)


class FuzzedServer:
    def __init__(self, seed: int, directory: Path) -> None:
        # the latter is how SGLang refuses changes of weights
        errors = (b'"error"', b'"success":false')
        self.fuzzed = FuzzedGateway(seed, directory, error_fields=errors)
        vocab = chat_tokenizer().get_vocab_size()
        path = directory / "model"
        make_model_directory(path, vocab_size=vocab, max_position_embeddings=SERVER_CONTEXT_TOKENS)
        self._model = add_chat_template(path, "chatml")

    def feed(self, bodies: int, each: Callable[[int], None]) -> None:
        with tidegate.vllm_server(model=self._model, engines=1) as server:
            asyncio.run(self._feed(server, bodies, each))
            self.longest_block_s = server.statistics().event_loop_longest_block_s

    async def _feed(
        self, server: tidegate.VLLMServer, bodies: int, each: Callable[[int], None]
    ) -> None:
        fuzzed, key = self.fuzzed, server.control_token or ""
        client = Client(int(server.url.rpartition(":")[2]))
        try:
            for number in range(bodies):
                each(number)
                path, right = fuzzed.chance.choice(list(SERVER_PATHS.items()))
                await fuzzed.send(client, path, key, right, SERVER_BODY_BYTES_MAX)
                if path.startswith(("/pause", "/release")) or number % BODIES_PER_SESSION == 0:
                    await self._send_valid_request(client, key)
            await self._send_valid_request(client, key)
        finally:
            client.end()

    async def _send_valid_request(self, client: Client, key: str) -> None:
        body = {"prompt": [3, 4, 5], "max_tokens": 2, "ignore_eos": True}
        path, resuming = "/v1/completions", Client(client.port)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await resuming.post("/resume_memory_occupation", key, b"")
            await resuming.post("/resume", key, b"")
            request_of = asyncio.ensure_future(client.post(path, key, json.dumps(body).encode()))
            # A half request for a pause may take effect after the first resume.
            while not (await asyncio.wait({request_of}, timeout=1.0))[0]:
                await resuming.post("/resume", key, b"")
            status, answer = await request_of
        resuming.close()
        if status != 200 or json.loads(answer)["usage"]["completion_tokens"] != 2:
            self.fuzzed.failures.append(f"a healthy client got {status} {answer[:300]!r}")
        self.fuzzed.healthy += 1
