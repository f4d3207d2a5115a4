"""Tests that the real SDK continues with the next server after a kill at any moment."""

import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidegate
from tidegate.errors import ConfigError

tinker = pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tests.serving.tinker_server.sdk_calls import SENTENCE, datum, new_client, train  # noqa: E402

pytestmark = [
    pytest.mark.wire,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).with_name("mortal_server.py")
ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 120


class MortalServer:
    """A server process on one port and one state directory, killed and started again."""

    def __init__(self, model: Path, state: Path, run: Path | None = None) -> None:
        # Bound and not listening, so that no other process takes the port while the server is dead.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.state = state
        self.deaths = state.with_name("deaths")
        """Directory with a file for each phase in which the server is still to die."""
        self.deaths.mkdir()
        self._command = [sys.executable, str(PROGRAM), str(model), str(state), str(self._port)]
        self._command += [str(self.deaths), *([] if run is None else [str(run)])]
        self._process: subprocess.Popen[bytes] | None = None

    def limit_files(self, size_bytes: int) -> None:
        """Let no file of the server grow beyond some bytes, as on a full disk."""
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size_bytes, -1))

    def die_in(self, *phases: str, always: bool = False) -> None:
        """Have the server die in these phases, once in each or ``always``."""
        for phase in phases:
            (self.deaths / phase).write_text("always" if always else "")

    def start(self, *, is_mortal: bool = False) -> None:
        """Start the server and wait until it answers, or if it ``is_mortal`` until it ends."""
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(self._command, env=environment, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                assert is_mortal, "the server has ended"
                return
            try:
                answer = httpx.get(f"{self.url}/api/v1/healthz")
                if answer.status_code == 200 and not is_mortal:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    def start_again_until(self, is_over: threading.Event) -> None:
        """Start the server whenever it has died."""
        while not is_over.wait(0.05):
            if self._process is not None and self._process.poll() is not None:
                with contextlib.suppress(AssertionError):  # it died again while it started
                    self.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._reserved.close()


def test_training_continues_over_kills_as_if_there_were_none(
    mortal: MortalServer, model: Path
) -> None:
    service = tinker.ServiceClient(base_url=mortal.url, api_key="tml-anybody")
    first, second = (new_client(service, model, seed=7) for _ in range(2))
    expected = train(first, steps=16)

    def strike() -> None:
        numbers = random.Random(1)
        for _ in range(3):
            time.sleep(numbers.uniform(0.05, 0.9))
            mortal.kill()
            mortal.start()

    striking = threading.Thread(target=strike)
    striking.start()
    losses = train(second, steps=8)
    losses += train(second, steps=8)
    striking.join()
    assert losses == expected
    assert train(second, steps=1) == train(first, steps=1)  # the weights and Adam's state
    service.close("success").result()


def test_samplers_and_checkpoints_are_those_of_before_a_kill(
    mortal: MortalServer, model: Path
) -> None:
    service = tinker.ServiceClient(base_url=mortal.url, api_key="tml-anybody")
    prompt = tinker.ModelInput.from_ints(SENTENCE)

    def logprobs(sampler: Any) -> list[float]:
        found: list[float] = sampler.compute_logprobs(prompt).result()[1:]
        return found

    client = new_client(service, model)
    train(client, steps=1)
    snapshot = client.save_weights_and_get_sampling_client().result()
    train(client, steps=1)
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    path = client.save_state("kept").result().path
    base = service.create_sampling_client(base_model=str(model)).result()
    before = [logprobs(each) for each in (snapshot, inflight, base)]
    assert before[0] != pytest.approx(before[1], abs=1e-4) != before[2]
    train(client, steps=4)  # past a snapshot of the journal, so that the saves are not repeated

    mortal.kill()
    mortal.start()
    for sampler, known in zip((snapshot, inflight, base), before, strict=True):
        assert logprobs(sampler) == pytest.approx(known, abs=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="exists, and checkpoints do not change"):
        client.save_state("kept").result()
    resumed = service.create_training_client_from_state(path).result()
    output = resumed.forward([datum()], "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].data == pytest.approx(before[1], abs=1e-4)
    service.close("success").result()

    mortal.kill()
    mortal.start()
    answer = httpx.post(
        f"{mortal.url}/api/v1/get_info",
        json={"model_id": client.model_id},
        headers={"x-api-key": "tml-anybody"},
    )
    assert answer.status_code == 404  # it ended with its session


def again(create: Callable[[], Any]) -> Any:
    """Create a client; the SDK itself gives up after some seconds without a server."""
    deadline_s = time.monotonic() + 3 * START_TIMEOUT_S
    while True:
        try:
            return create()
        except tinker.APIConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def scenario(
    url: str, model: Path, die_in: Callable[..., None] = lambda *phases: None
) -> dict[str, Any]:
    """Use everything that a server keeps; return what a client sees of it.

    ``die_in`` is called with the phases in which the server dies next: two in one call of the SDK
    at most, because it gives up a call after five minutes without a server, which are four or five
    starts on a busy machine.
    """
    die_in("after session record")
    service = again(lambda: tinker.ServiceClient(base_url=url, api_key="tml-anybody"))

    die_in("before model record", "after model record")
    client = again(lambda: new_client(service, model, seed=7))
    losses = []
    for phase in ("request record", "snapshot", "forward-backward", "optimizer step"):
        die_in(f"after {phase}")
        losses += train(client, steps=1)
    prompt = tinker.ModelInput.from_ints(SENTENCE)
    die_in("after trainer's save", "after checkpoint")
    path = client.save_state("kept").result().path
    die_in("after sampler")
    snapshot = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=8, seed=3)
    die_in("after sample")
    sampled = snapshot.sample(prompt, 2, params).result().sequences
    losses += train(client, steps=4)
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    logprobs = [each.compute_logprobs(prompt).result() for each in (snapshot, inflight)]
    resumed = again(lambda: service.create_training_client_from_state_with_optimizer(path).result())
    losses += train(resumed, steps=2)
    loaded = again(lambda: new_client(service, model, seed=8))
    die_in("after checkpoint's link")
    loaded.load_state_with_optimizer(path).result()
    losses += train(loaded, steps=2)
    seen = {
        "losses": losses,
        "sampled": [each.tokens for each in sampled],
        "logprobs": [each[1:] for each in logprobs],
        "after": train(client, steps=1),
    }
    again(lambda: service.close("success").result())
    return seen


@pytest.mark.timeout(1200)
def test_a_client_sees_nothing_of_a_death_in_any_phase(mortal: MortalServer, model: Path) -> None:
    expected = scenario(mortal.url, model)
    # What an engine has cached decides how it splits a prefill, and so the last bits.
    expected["logprobs"] = [pytest.approx(row, abs=1e-5) for row in expected["logprobs"]]
    is_over = threading.Event()
    starting = threading.Thread(target=mortal.start_again_until, args=[is_over])
    starting.start()
    try:
        assert scenario(mortal.url, model, mortal.die_in) == expected
        assert not list(mortal.deaths.iterdir())
    finally:
        is_over.set()
        starting.join()


def test_a_restart_neither_needs_nor_restores_a_checkpoint_that_was_deleted(
    mortal: MortalServer, model: Path
) -> None:
    service = tinker.ServiceClient(base_url=mortal.url, api_key="tml-anybody")
    rest_client = tinker.RestClient(base_url=mortal.url, api_key="tml-anybody")
    first = new_client(service, model, seed=7)
    train(first, steps=1)
    path = first.save_state("kept").result().path
    sampler_path = first.save_weights_for_sampler("sampled").result().path
    second = new_client(service, model)
    second.load_state_with_optimizer(path).result()
    for each in (path, sampler_path):
        rest_client.delete_checkpoint_from_tinker_path(each).result()
    mortal.kill()
    mortal.start()
    assert train(second, steps=2) == train(first, steps=2)
    assert rest_client.list_checkpoints(first.model_id).result().checkpoints == []
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        service.create_training_client_from_state(path).result()
    assert first.save_state("kept").result().path == path  # a later request may have the name
    service.close("success").result()


def test_inflight_weights_keep_their_number_of_steps_over_a_kill(
    mortal: MortalServer, model: Path
) -> None:
    service = tinker.ServiceClient(base_url=mortal.url, api_key="tml-anybody")
    client = new_client(service, model)
    for _ in range(2):
        train(client, steps=1)
        sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()
    mortal.kill()
    mortal.start()
    train(client, steps=1)  # after the saves have been carried out again
    headers = {"x-api-key": "tml-anybody"}
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 1000,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": SENTENCE}]},
        "sampling_params": {"max_tokens": 2},
    }
    api = f"{mortal.url}/api/v1"
    sent = httpx.post(f"{api}/asample", json=body, headers=headers).raise_for_status().json()
    asked = {"request_id": sent["request_id"]}
    answer = httpx.post(f"{api}/retrieve_future", json=asked, headers=headers, timeout=60).json()
    spans = answer["sequences"][0]["weight_versions"]
    assert {span["optimizer_steps"] for span in spans} == {2}
    service.close("success").result()


def test_a_state_directory_serves_one_server_at_a_time(model: Path, tmp_path: Path) -> None:
    with (
        tidegate.tinker_server(model=model, engines=1, state_directory=tmp_path),
        pytest.raises(ConfigError, match="another server uses the state directory"),
    ):
        tidegate.tinker_server(model=model, engines=1, state_directory=tmp_path)
