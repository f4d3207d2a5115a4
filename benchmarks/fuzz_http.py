"""What does the gateway do with bodies that make no sense? The server and its clients, on one loop.

Bodies are right ones with a part replaced, garbled text, nesting without end, and requests that are
not HTTP. A healthy agent asks in between, and must get what it asks for. Knows no rollout.
"""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.orchestrator.chat_templates import ENDS, add_chat_template
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generating import SamplingDefaults
from tidegate.orchestrator.gateway.gateway import Endpoint, Gateway
from tidegate.orchestrator.weights.model_files import ModelFiles, read_tokenizer
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

WORDS = "what the model says"

BODIES_PER_SESSION = 200
"""Bodies that turn out to be right make rows: a session and its rows end after so many."""

ANSWER_TIMEOUT_S = 30.0
"""Far more than any answer takes: reaching it is a failure."""

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
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [3, 4, 5], "max_tokens": 4, "stop": "x", "n": 2, "logprobs": 1},
    "/tokenize": {"messages": [{"role": "user", "content": "hello"}]},
    "/sessions/{}/reward": {"reward": 0.5},
}

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
"""What takes the place of a part of a body."""


class FixedEngine:
    """Says the same, at once or a little later."""

    def __init__(self, model: ModelFiles, words: str, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self._ids = model.tokenizer.encode(words + ENDS["chatml"], add_special_tokens=False).ids
        self._rows = 10**9

    async def ask(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        """A whole turn."""
        turn = Turn(rollout, sampling)
        rollout.turns.append(turn)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        for token in self._ids:
            turn.append(token, -1.0, 0, "engine-0")
        turn.finish_reason = "stop"
        return turn

    async def rejoin(self, rollout: Rollout) -> Turn:
        """Never."""
        raise AssertionError("nothing is resumed here")

    def give_up_turn(self, rollout: Rollout) -> None:
        """Nobody is cancelled here."""

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Nothing is resumed here."""

    def doing(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        """Nobody counts."""
        return nullcontext()

    def is_over_budget(self, rollout: Rollout) -> bool:
        """They have all time."""
        return False

    async def park(self, rollout: Rollout) -> None:
        """Nobody waits here."""
        raise AssertionError("nobody waits for newer weights here")

    async def score(self, rollout: Rollout, asked: object) -> NoReturn:
        """Nobody scores here."""
        raise AssertionError("nobody has tokens scored here")

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Another row."""
        self._rows += 1
        branch = Rollout(self._rows, rollout.group_id, rollout.index)
        branch.branch_of, branch.fork_reason = rollout, reason
        rollout.branches = (*rollout.branches, branch)
        return branch


class Client:
    """One connection, made again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, key: str, body: bytes) -> tuple[int, bytes]:
        """Ask properly; the answer's status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(answer.split(" ", 2)[1])
        if "content-length: " in answer:
            length = int(answer.split("content-length: ")[1].split("\r\n")[0])
            said = await reader.readexactly(length)
        else:
            said = await reader.readuntil(b"\r\n0\r\n\r\n")
        if "connection: close" in answer:
            self.close()
        return status, said

    async def say(self, raw: bytes) -> bytes:
        """Send what may not be HTTP, over a connection of its own, and read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(raw)
            writer.write_eof()
            return await reader.read()
        except ConnectionError:  # closed before all was sent
            return b""
        finally:
            writer.close()

    def close(self) -> None:
        """The next request makes another connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass(slots=True)
class FuzzedGateway:
    """A gateway under bodies by chance."""

    seed: int
    directory: Path
    bodies: int = 0
    refused: int = 0
    """Told what is wrong with them: 4xx, or a connection closed on what is not HTTP."""
    healthy: int = 0
    failures: list[str] = field(default_factory=list)
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    async def feed(self, bodies: int, each: Callable[[int], None]) -> None:
        """Send so many; ``each`` hears the number of each before it is sent."""
        path = add_chat_template(self.directory / "model", "chatml")
        tokenizer = read_tokenizer(path / "tokenizer.json")
        stop = tokenizer.token_to_id(ENDS["chatml"]) or 0
        model = ModelFiles(path, tokenizer, (0, stop))
        engine, defaults = FixedEngine(model, WORDS), SamplingDefaults(64, 1.0, 0)
        gateway, done = Gateway(), 0
        client = Client(int(gateway.url.rpartition(":")[2]))

        async def agent(endpoint: Endpoint, task: object) -> float:
            nonlocal done
            for _ in range(min(BODIES_PER_SESSION, bodies - done)):
                each(done)
                done += 1
                await self._send(client, endpoint)
            await self._ask_properly(client, endpoint)
            return 0.0

        play = gateway.episode(agent)
        try:
            while done < bodies:
                await play(Episode(Rollout(done, 0, 0), model, engine, defaults), None)
        finally:
            client.close()
            gateway.close()

    async def _send(self, client: Client, endpoint: Endpoint) -> None:
        path, right = self.chance.choice(list(PATHS.items()))
        path, body = path.format(endpoint.session_id), self._body(right)
        self.bodies += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if self.chance.random() < 0.05:
                    await client.say(self._garbled(f"POST {path} HTTP/1.1\r\n\r\n".encode() + body))
                    self.refused += 1
                    return
                status, said = await client.post(path, endpoint.api_key, body)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            self.failures.append(f"{path} {body[:300]!r}: no answer, {type(error).__name__}")
            client.close()
            return
        self.refused += 400 <= status < 500
        if status >= 500 or (status >= 400 and b'"error"' not in said):
            self.failures.append(f"{path} {body[:300]!r}: {status} {said[:300]!r}")

    async def _ask_properly(self, client: Client, endpoint: Endpoint) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "and now?"}]}).encode()
        status, said = await client.post("/v1/chat/completions", endpoint.api_key, body)
        if status != 200 or json.loads(said)["choices"][0]["message"]["content"] != WORDS:
            self.failures.append(f"a healthy agent was told {status} {said[:300]!r}")
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

    def _replaced(self, part: Any) -> Any:
        """A copy with one to three parts replaced, left out, or put under another name."""
        copy = json.loads(json.dumps(part))
        for _ in range(self.chance.randrange(1, 4)):
            holder: Any = copy
            while True:
                keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
                if not keys:
                    break
                key = self.chance.choice(keys)
                if isinstance(holder[key], (dict, list)) and self.chance.random() < 0.6:
                    holder = holder[key]
                    continue
                if self.chance.random() < 0.2:
                    del holder[key]
                else:
                    holder[key] = self.chance.choice(ODD)(self.chance)
                break
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
