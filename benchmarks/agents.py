"""CPU cost of the agent gateway per request, with few and with many concurrent sessions.

``python -m benchmarks.agents [--json] [--only PART …]`` prints ``name, value, unit, peer, ratio``.
All sessions run at once, three turns each, against a model stub that answers after a delay at
almost no cost; clients run in a process of their own. CPU time is that of the gateway's whole
process, model stub included. The peer is the same HTTP server with a handler that does nothing.
``prefill_saved_share``: see :mod:`benchmarks.sessions`; ``efficiency``:
:mod:`benchmarks.scheduling.trajectories`. A command that no module imports. Built on the gateway,
the episode classes and uvicorn.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from time import process_time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.fuzz_http import FixedEngine
from benchmarks.scheduling.trajectories import rows as trajectory_rows
from benchmarks.sessions import rows as session_rows
from benchmarks.table import Row, compared, show
from tests.orchestrator.episodes.chat_templates import ENDS, add_chat_template
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.model_files import ModelFiles, read_tokenizer
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.serving.gateway.gateway import Gateway

SESSIONS = (100, 2000)
TURNS = 3
LATENCY_S = 0.2
"""Latency of the model stub."""
RUNS = 3
WORDS = "a reply of some thirty tokens, no more and no less, so to say"
QUESTION = "what is there to be said about this question, of average length? " * 4
CONNECTIONS = 500
"""Concurrent connections, within the default limit of open files; other sessions wait."""


CLIENT = """
import asyncio, json, sys

async def talk(job, key, slots):
    messages = []
    async with slots:
        reader, writer = await asyncio.open_connection("127.0.0.1", job["port"])
        for _ in range(job["turns"]):
            messages.append({"role": "user", "content": job["question"]})
            body = json.dumps({"messages": messages, "max_tokens": 64}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n"
                f"Authorization: Bearer {key}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
            )
            writer.write(head.encode() + body)
            headers = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
            length = int(headers.split("content-length: ")[1].split()[0])
            answer = json.loads(await reader.readexactly(length))
            messages.append(answer["choices"][0]["message"])
        writer.close()

async def main():
    job = json.load(sys.stdin)
    slots = asyncio.Semaphore(job["connections"])
    await asyncio.gather(*(talk(job, key, slots) for key in job["keys"]))

asyncio.run(main())
"""


async def cpu_ms_per_request(port: int, keys: list[str]) -> float:
    """Return this process's CPU time per request, while a client process sends the requests."""
    job = {
        "port": port,
        "keys": keys,
        "turns": TURNS,
        "question": QUESTION,
        "connections": CONNECTIONS,
    }
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, stdin=subprocess.PIPE, stdout=sys.stderr
    )
    before_s = process_time()
    await client.communicate(json.dumps(job).encode())
    if client.returncode:
        raise RuntimeError(f"the client ended with {client.returncode}; its error is above")
    return (process_time() - before_s) * 1000 / (len(keys) * TURNS)


async def through_gateway(model: ModelFiles, sessions: int) -> float:
    """Every session an episode of its own."""
    gateway, defaults = Gateway(), SamplingSettings(max_tokens=64, temperature=1.0, seed=0)
    engine, over = FixedEngine(model, WORDS, LATENCY_S), asyncio.Event()
    keys: asyncio.Queue[str] = asyncio.Queue()

    async def agent(endpoint: Any, task: object) -> float:
        await keys.put(endpoint.api_key)
        await over.wait()
        return 0.0

    play = gateway.episode(agent)
    episodes = [
        asyncio.ensure_future(play(Episode(Rollout(n, n, 0), model, engine, defaults), n))
        for n in range(sessions)
    ]
    try:
        all_keys = [await keys.get() for _ in range(sessions)]
        return await cpu_ms_per_request(int(gateway.url.rpartition(":")[2]), all_keys)
    finally:
        over.set()
        await asyncio.gather(*episodes)
        gateway.close()


async def through_nothing(sessions: int) -> float:
    """Measure the bare server with as many requests and the same answers."""
    message = {"role": "assistant", "content": WORDS}
    body = json.dumps({"choices": [{"message": message}]}).encode()

    async def answer(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(LATENCY_S)
        return Response(body, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has nothing else to wait for
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        return await cpu_ms_per_request(port, ["none"] * sessions)
    finally:
        server.should_exit = True
        await serving


def median_of(measure: Callable[[], Awaitable[float]]) -> float:
    """Return the median of several runs, each on a new event loop."""
    import uvloop

    async def once() -> float:
        return await measure()

    return statistics.median(uvloop.run(once()) for _ in range(RUNS))


def rows(model: ModelFiles) -> list[Row]:
    """Return all lines of the table."""
    lines: list[Row] = []
    for sessions in SESSIONS:
        ours = median_of(lambda sessions=sessions: through_gateway(model, sessions))  # type: ignore[misc]
        bare = median_of(lambda sessions=sessions: through_nothing(sessions))  # type: ignore[misc]
        lines.append(compared(f"gateway_cpu_ms_per_request_{sessions}", "ms", ours, bare))
    return lines


def gateway_rows() -> list[Row]:
    """Measure the gateway's cost per request."""
    with tempfile.TemporaryDirectory() as directory:
        path = add_chat_template(Path(directory) / "model", "chatml")
        tokenizer = read_tokenizer(path / "tokenizer.json")
        stop = tokenizer.token_to_id(ENDS["chatml"]) or 0
        return rows(ModelFiles(path, tokenizer, (0, stop)))


PARTS: dict[str, Callable[[], Iterable[Row]]] = {
    "gateway": gateway_rows,
    "prefill": session_rows,
    "efficiency": trajectory_rows,
}
"""Parts of the table. The last takes half an hour of CPU time, for five runs in virtual time."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    arguments = parser.parse_args()
    for part in arguments.only:
        show(PARTS[part](), as_json=arguments.json)


if __name__ == "__main__":
    main()
