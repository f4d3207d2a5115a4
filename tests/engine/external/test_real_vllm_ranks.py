"""A real vLLM of two data-parallel ranks that share a mixture's experts: ``make test-vllm``.

The ranks compute in step, so a pause that reaches one rank only would stop both for ever.
"""

import contextlib
import os
import random
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.external.test_real_vllm import KEY, PYTHON, Server, start, wait_for
from tests.engine.orchestra import Orchestra, Publisher, SeenTurn
from tests.models import make_model_directory
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import (
    ABORT,
    LENGTH,
    RUNNING,
    FinishWeightUpdate,
    Goodbye,
    KvPolicy,
    Pause,
    PauseMode,
    Resume,
    SamplingParams,
    Shutdown,
    TurnsPaused,
    TurnsResumed,
    WeightsStaged,
)

CYCLES_DEFAULT = 60

CYCLES = int(os.environ.get("TIDEGATE_VLLM_CYCLES", CYCLES_DEFAULT))
"""Number of updates, of about a second each; with more, a rank is killed at more moments, too."""

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="wants vLLM, in a Python of its own: make test-vllm"),
    pytest.mark.timeout(600 + 10 * CYCLES),
]

RANKS = ["--data-parallel-size", "2", "--enable-expert-parallel"]
RANKS += ["--worker-extension-cls", "expert_parallel.Extension"]
LACKING = Path(__file__).parent / "vllm_on_a_cpu"

ROUTES = {
    "decoding": b"",
    "an update": b"POST /collective_rpc",
    "a pause": b"POST /pause",
    "a resume": b"POST /resume",
}
"""Moments at which a rank is killed: while the server handles such a request, or at once."""

PHASES = list(ROUTES) if CYCLES > CYCLES_DEFAULT else list(ROUTES)[:2]
"""Each needs a server of its own, which takes most of a minute to start."""

LONG = SamplingParams(max_tokens=400, temperature=0.0)

WORDS = 31
"""Number of tokens that versions name. It is prime, so no two of them are named by one token."""

LOGPROB = -1.2152
"""Log-prob of each token that names a version, by transformers too."""

PROGRAM = "tests.engine.external.mixture_worker"


def named(weights: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Return weights with which every token, after whatever context, is ``word(version)``.

    All experts of both layers write one dimension of the hidden state, which the head maps to the
    token. So the token names the sum of both versions if experts and head are of different ones,
    and experts of several versions change its log-prob.
    """
    signs = torch.randn(weights["model.embed_tokens.weight"].shape).sign()
    signs[:, :WORDS] = 0.0
    signs[:, -1] = 1.0  # opens every expert's gate
    made = {}
    for name, tensor in weights.items():
        new = torch.zeros_like(tensor)
        if name.endswith("norm.weight"):
            new.fill_(1.0)
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            new[:, -1] = 1.0
        elif name.endswith("down_proj.weight"):
            new[version % WORDS, 0] = 1.0
        elif name.endswith("embed_tokens.weight"):
            new = signs
        elif name.endswith("lm_head.weight"):
            new[:WORDS, :WORDS] = torch.eye(WORDS).roll(version, 0)
        elif not name.endswith("o_proj.weight"):
            new = tensor  # the router sends tokens to different experts
        made[name] = new
    return made


def word(version: int) -> int:
    return 2 * version % WORDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's CPU kernel pads experts to 32 and then fails to load them again.
    return make_model_directory(
        tmp_path_factory.mktemp("model"),
        "qwen3_moe",
        tied=False,
        num_experts=4,
        moe_intermediate_size=64,
    )


@contextlib.contextmanager
def started(model: Path, directory: Path) -> Iterator[Server]:
    log = directory / "log"
    server = start(model, log, *RANKS, python_path=str(LACKING))
    try:
        wait_for(server, log)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEGATE_ENGINE_KEY", KEY)
            yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests but those that kill it; the last one leaves it hanging."""
    with started(model, tmp_path_factory.mktemp("vllm")) as server:
        yield server


class Relay(socketserver.ThreadingTCPServer):
    """Forwards to a server, and kills a rank of it while it handles a request of one route."""

    daemon_threads = True

    def __init__(self, server: Server) -> None:
        super().__init__(("127.0.0.1", 0), RelayedConnection)
        self.server = server
        self.route = b"armed by the test"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Relay":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def stop_rank(self) -> psutil.Process:
        """Stop rank 1's engine process, which answers nothing from now on."""
        every = psutil.Process(self.server.process.pid).children(recursive=True)
        [rank] = [each for each in every if "EngineCore_DP1" in each.cmdline()[0]]
        rank.suspend()
        return rank


class RelayedConnection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        port = int(self.server.server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as far:
            threading.Thread(target=forward, args=(far, self.request), daemon=True).start()
            while data := self.request.recv(65536):
                is_due = data.startswith(self.server.route)
                rank = self.server.stop_rank() if is_due else None
                far.sendall(data)
                if rank is not None:
                    threading.Timer(0.5, rank.kill).start()  # once the rank has been asked, too


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


UPDATES: tuple[tuple[PauseMode, KvPolicy], ...] = (
    ("keep", "keep"),
    ("abort", "recompute"),
    ("wait", "recompute"),
    ("keep", "recompute"),
)


def test_no_update_stops_the_ranks_or_mistakes_a_tokens_version(
    server: Server, model: Path, tmp_path: Path
) -> None:
    options = ["--url", f"vllm+{server.url}", "--stream-interval-tokens", "1"]
    weights, dice = load_file(model / "model.safetensors"), random.Random(0)
    turns: list[int] = []

    def new_turn(orchestra: Orchestra) -> int:
        prompt = dice.choices(range(1, 96), k=dice.randint(3, 60))
        sampling = SamplingParams(max_tokens=dice.randint(20, 100), temperature=0.0)
        return orchestra.submit(prompt, sampling)

    with Orchestra(tmp_path, model, options, program=PROGRAM) as orchestra:
        orchestra.welcome(credit_steps=64)
        publisher = Publisher(orchestra)
        for version, (mode, kv_policy) in zip(range(1, CYCLES + 1), cycle(UPDATES)):
            under_way = [turn for turn in turns if orchestra.turns[turn].finish == RUNNING]
            wanted = 8
            if version % 3 == 0:  # one rank computes nothing, and must keep step all the same
                for turn in under_way:
                    orchestra.finish(turn)
                wanted, under_way = 1, []
            turns += [new_turn(orchestra) for _ in range(max(1, wanted - len(under_way)))]
            if version > 1:
                orchestra.read_tokens(turns[-1], 3)
            publisher.send_tensors(version, named_buffers(named(weights, version)))
            orchestra.await_one(WeightsStaged)
            is_paused = version % 5 in (0, 1)
            if is_paused:
                orchestra.send(Pause(mode=mode))
                assert orchestra.await_one(TurnsPaused).mode == mode
            publisher.swap(version, mode, kv_policy)
            if is_paused:
                orchestra.send(Resume())
                orchestra.await_one(TurnsResumed)
        for turn in turns:
            orchestra.finish(turn)
        publisher.close()
        orchestra.send(Shutdown())
        assert orchestra.exit_status() == 0
    seen = [orchestra.turns[turn] for turn in turns]
    assert {turn.finish for turn in seen} == {LENGTH, ABORT}
    assert any(len(set(turn.versions)) > 1 for turn in seen)
    assert_named(seen)


def assert_named(turns: Iterable[SeenTurn]) -> None:
    for turn in turns:
        for token, logprob, version in zip(
            turn.token_ids, turn.logprobs, turn.versions, strict=True
        ):
            assert version == 0 or (token, round(logprob, 4)) == (word(version), LOGPROB), turn


@contextlib.contextmanager
def decoding(
    relay: Relay, model: Path, directory: Path, cause: str = ""
) -> Iterator[tuple[Orchestra, Publisher]]:
    """Run an adapter whose turns decode on both ranks; then check their tags, and why it ended."""
    options = ["--url", f"vllm+{relay.url}", "--stream-interval-tokens", "1"]
    with Orchestra(directory, model, options, program=PROGRAM) as orchestra:
        orchestra.welcome(credit_steps=64)
        publisher = Publisher(orchestra)
        turns = [orchestra.submit([n + 1] * 9, LONG) for n in range(4)]
        stage(publisher, orchestra, model, 1)
        publisher.swap(1, "keep", "keep")
        orchestra.read_tokens(turns[0], 3)
        yield orchestra, publisher
        publisher.close()
        goodbye = orchestra.await_one(Goodbye)
        assert goodbye.has_failed
        assert relay.url + cause in goodbye.reason
        assert orchestra.exit_status() != 0
    assert_named(orchestra.turns[turn] for turn in turns)


def stage(publisher: Publisher, orchestra: Orchestra, model: Path, version: int) -> None:
    weights = load_file(model / "model.safetensors")
    publisher.send_tensors(version, named_buffers(named(weights, version)))
    orchestra.await_one(WeightsStaged)


def test_a_rank_that_hangs_ends_the_adapter_although_the_server_says_it_is_healthy(
    server: Server, model: Path, tmp_path: Path
) -> None:
    cause = "/is_paused did not respond"
    with Relay(server) as relay, decoding(relay, model, tmp_path, cause):
        relay.stop_rank()


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_ends_the_adapter_with_the_cause_and_true_tags(
    model: Path, tmp_path: Path, phase: str
) -> None:
    with (
        started(model, tmp_path) as server,
        Relay(server) as relay,
        decoding(relay, model, tmp_path) as (orchestra, publisher),
    ):
        stage(publisher, orchestra, model, 2)
        if route := ROUTES[phase]:
            relay.route = route
        else:
            relay.stop_rank().kill()
        orchestra.send(FinishWeightUpdate(version=2, pause_mode="keep", kv_policy="keep"))
