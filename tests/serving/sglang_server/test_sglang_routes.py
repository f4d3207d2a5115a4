"""SGLang's routes over a real engine: pauses, aborts, weights, and a run of Tidegate's own over
them."""

import base64
import io
import json
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions

import tidegate
from tests.engine.external.adapter_runs import train
from tests.engine.external.test_real_sglang import solve
from tests.models import make_model_directory
from tests.serving.vllm_server.vllm_serving import PROMPT, BackgroundRequest, Client
from tidegate.serving.control.safe_unpickler import OPERATIONS_MAX
from tidegate.transport.weight_channels.collective import join_custom_group, open_store

pytestmark = pytest.mark.wire

LONG = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 450, "ignore_eos": True},
    "return_logprob": True,
}

CONTEXT_TOKENS_MAX = 8192

ENDLESS = {"max_new_tokens": CONTEXT_TOKENS_MAX - 10, "ignore_eos": True}
"""Sampling parameters of a request that runs until it is aborted."""

GREEDY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    path, most = directory / "model", CONTEXT_TOKENS_MAX
    return make_model_directory(path, tied=False, max_position_embeddings=most)


@pytest.fixture(scope="module")
def other(directory: Path) -> Path:
    """The same model with other weights."""
    path, most = directory / "other", CONTEXT_TOKENS_MAX
    return make_model_directory(path, seed=1, tied=False, max_position_embeddings=most)


def begin(client: Client, server: tidegate.VLLMServer, **fields: Any) -> BackgroundRequest:
    """A request that has some of its tokens by now, and not all."""
    running = BackgroundRequest(server, "/generate", LONG | fields)
    client.wait_until(lambda: client.num_running() == 1)
    before = client.tokens_generated()
    client.wait_until(lambda: client.tokens_generated() > before)
    return running


def refused(client: Client, path: str, body: Any = None) -> str:
    answer = client.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    if answer.headers["content-type"].startswith("text/plain"):
        return answer.text
    reported: dict[str, Any] = answer.json()
    return str(reported["error"]["message"] if "error" in reported else reported["message"])


def test_a_request_that_is_kept_in_place_has_both_versions_and_a_new_one_waits(
    client: Client, server: tidegate.VLLMServer, model: Path, other: Path
) -> None:
    client.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "a"})
    for mode, flushes in (("in_place", False), ("in_place", True), ("retract", True)):
        running = begin(client, server)
        client.post("/pause_generation", {"mode": mode})
        new = BackgroundRequest(server, "/generate", GREEDY)
        update = {"model_path": str(other), "weight_version": "b", "flush_cache": flushes}
        assert client.post("/update_weights_from_disk", update)["success"]
        assert not new.is_answered
        assert not running.is_answered
        client.post("/continue_generation", {})
        meta = running.answer["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == ["a", "b"]
        assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"] == 450
        assert new.answer["meta_info"]["weight_version"] == "b"
        client.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "a"})


def test_requests_are_aborted_by_rid_by_all_and_by_a_pause_with_their_tokens(
    client: Client, server: tidegate.VLLMServer
) -> None:
    aborts: list[tuple[str, Any]] = [
        ("/abort_request", {"rid": "r"}),
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weight_version", {"new_version": "c", "abort_all_requests": True}),
    ]
    for path, body in aborts:
        running = begin(client, server, rid="r", sampling_params=ENDLESS)
        assert "Duplicate request ID" in refused(client, "/generate", GREEDY | {"rid": "r"})
        assert "running or waiting" in refused(client, "/flush_cache")
        assert "pause generation" in refused(client, "/release_memory_occupation", {})
        assert client.get("/v1/loads")["loads"][0]["num_running_reqs"] == 1
        client.http.post("/abort_request", json={"rid": "another"}).raise_for_status()
        client.http.post("/abort_request", json={}).raise_for_status()
        assert not running.is_answered
        client.http.post(path, json=body).raise_for_status()
        answer = running.answer
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["finish_reason"]["message"] == "Aborted"
        assert 0 < len(answer["output_ids"]) == len(meta["output_token_logprobs"])
        assert len(answer["output_ids"]) < ENDLESS["max_new_tokens"]
        client.post("/continue_generation", {})


@pytest.mark.parametrize("new_tokens", [3, 0])
def test_a_request_whose_prompt_is_scored_is_aborted_without_a_token(
    client: Client, server: tidegate.VLLMServer, new_tokens: int
) -> None:
    client.post("/pause_generation", {"mode": "in_place"})  # engines score no prompt until then
    sampling = {"max_new_tokens": new_tokens}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "rid": "r"}
    scored = body | {"return_logprob": True, "logprob_start_len": 0}
    running = BackgroundRequest(server, "/generate", scored)
    client.wait_until(lambda: client.num_running() == 1)

    assert "Duplicate request ID" in refused(client, "/generate", body)
    client.http.post("/abort_request", json={"rid": "another"}).raise_for_status()
    assert not running.is_answered
    client.http.post("/abort_request", json={"rid": "r"}).raise_for_status()
    assert running.answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert running.answer["output_ids"] == []
    assert client.num_running() == 0


def test_one_rid_names_one_prompt_of_a_request(client: Client) -> None:
    body = {"input_ids": [PROMPT, PROMPT], "rid": ["r", "r"]}
    assert "Duplicate request ID detected: r" in refused(client, "/generate", body)


def test_health_generate_fails_under_a_pause(client: Client) -> None:
    assert client.http.get("/health_generate").status_code == 200
    client.post("/pause_generation", {"mode": "retract"})
    assert client.http.get("/health_generate").status_code == 503
    assert client.http.get("/health").status_code == 200


def test_a_pause_outlasts_the_release_of_memory(client: Client) -> None:
    client.post("/pause_generation", {"mode": "retract"})
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert client.post(path, {"tags": ["weights", "cuda_graph"]}) is None
    assert client.get("/is_paused") == {"is_paused": True}
    client.post("/continue_generation", {})
    assert client.post("/release_memory_occupation") is None
    assert client.http.get("/health_generate").status_code == 503
    assert client.post("/resume_memory_occupation") is None
    assert client.http.get("/health_generate").status_code == 200
    assert client.post("/generate", GREEDY)["output_ids"]
    assert "tags name some of" in refused(client, "/resume_memory_occupation", {"tags": ["gpu"]})


# ---------------------------------------------------------------- weights


def by_value(tensors: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(pickle.dumps(list(tensors.items()))).decode()


class Reduced:
    """An object that a pickle makes by calling a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made_by = function, arguments

    def __reduce__(self) -> Any:
        return self._made_by


def hostile_storages() -> Iterator[tuple["Reduced", str]]:
    """Storages by value that ``torch.load`` would read, or take much memory for."""
    good = torch.ones(3)._typed_storage().__reduce__()[1][0]  # type: ignore[no-untyped-call]
    compressed = io.BytesIO()
    torch.save(torch.ones(3), compressed)
    for data, why in (
        (
            good.replace(b"K\x03N", b"J\xff\xff\xff\x7fN"),
            "of 2147483647 torch.float32 has 12 bytes",
        ),
        (good.replace(b"\3\0\0\0cpu", b"\6\0\0\0cuda:0"), "must be on the CPU"),
        (good.replace(b"FloatStorage", b"SlackStorage"), "is not among"),
        (good[:-1], "has 11 bytes"),
        (compressed.getvalue(), "can't be read"),
        (b"", "can't be read"),
    ):
        yield Reduced(torch.storage._load_from_bytes, data), why


def in_shared_memory(tensors: dict[str, torch.Tensor]) -> str:
    """Pickle as torch's ``ForkingPickler`` does for CPU tensors, without its manager process."""
    pairs = []
    for index, (name, tensor) in enumerate(tensors.items()):
        handle = f"/torch_{os.getpid()}_{index}_0"
        SHARED.append(Path(f"/dev/shm{handle}"))
        SHARED[-1].write_bytes(tensor.numpy().tobytes())
        kind, storage = torch.UntypedStorage, reductions.rebuild_storage_filename
        found = Reduced(storage, kind, b"manager", handle.encode(), tensor.nbytes)
        typed = Reduced(reductions.rebuild_typed_storage, found, tensor.dtype)
        metadata = (0, tensor.size(), tensor.stride(), False)
        pairs.append((name, Reduced(reductions.rebuild_tensor, torch.Tensor, typed, metadata)))
    return base64.b64encode(pickle.dumps(pairs)).decode()


SHARED: list[Path] = []
"""Files of shared memory to be removed."""


@pytest.mark.parametrize("pickled", [by_value, in_shared_memory])
def test_tensors_of_an_update_are_published_together_at_its_end(
    client: Client, model: Path, other: Path, pickled: Any
) -> None:
    client.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "b"})
    expected = client.post("/generate", GREEDY)
    client.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "a"})
    before = client.post("/generate", GREEDY)
    assert before["output_ids"] != expected["output_ids"]
    tensors = load_file(other / "model.safetensors")
    halves = [dict(list(tensors.items())[start::2]) for start in range(2)]
    client.post("/begin_weight_update", {"selector": "all"})
    for half in halves:
        body = {"serialized_named_tensors": [pickled(half)], "weight_version": "t"}
        reported = client.post("/update_weights_from_tensor", body)
        assert reported == {"success": True, "message": "Success Weight version updated to t."}
        assert client.post("/generate", GREEDY)["output_ids"] == before["output_ids"]
    client.post("/end_weight_update", {})
    while SHARED:
        SHARED.pop().unlink(missing_ok=True)
    after = client.post("/generate", GREEDY)
    assert after["output_ids"] == expected["output_ids"]
    assert after["meta_info"]["weight_version"] == "t"
    assert client.get("/model_info")["weight_version"] == "t"
    assert client.get("/get_weight_version") == {"weight_version": "t"}


def test_tensors_outside_an_update_are_published_at_once(client: Client) -> None:
    body = {"serialized_named_tensors": [by_value({"model.norm.weight": torch.ones(64)})]}
    assert client.post("/update_weights_from_tensor", body | {"weight_version": "n"})["success"]
    assert client.get("/model_info")["weight_version"] == "n"


def test_pickles_of_anything_else_are_refused_and_call_nothing(client: Client) -> None:
    evil = Reduced(print, "called")
    for value in (evil, [("x", 1)], {"flattened_tensor": torch.ones(2)}, [("x", torch.ones(2))]):
        pickled = base64.b64encode(pickle.dumps(value)).decode()
        body = {"serialized_named_tensors": [pickled]}
        assert refused(client, "/update_weights_from_tensor", body)
    for hostile, why in hostile_storages():
        pickled = base64.b64encode(pickle.dumps(hostile)).decode()
        answer = refused(
            client, "/update_weights_from_tensor", {"serialized_named_tensors": [pickled]}
        )
        assert why in answer
    empty_lists = base64.b64encode(b"]" * (OPERATIONS_MAX + 1)).decode()
    body = {"serialized_named_tensors": [empty_lists]}
    assert "operations" in refused(client, "/update_weights_from_tensor", body)
    two = {"serialized_named_tensors": ["", ""]}
    assert "one rank" in refused(client, "/update_weights_from_tensor", two)
    path = b"/torch_1_2_3/../../etc/passwd"
    kind, storage = torch.UntypedStorage, reductions.rebuild_storage_filename
    elsewhere = pickle.dumps(Reduced(storage, kind, b"", path, 8))
    body = {"serialized_named_tensors": [base64.b64encode(elsewhere).decode()]}
    assert "shared memory" in refused(client, "/update_weights_from_tensor", body)


def test_what_groups_and_updates_cannot_do_is_refused_with_its_reason(
    client: Client, model: Path
) -> None:
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    if not torch.cuda.is_available():
        assert "backend 'gloo'" in refused(client, "/init_weights_update_group", group)
    far = group | {"backend": "gloo", "rank_offset": 2}
    assert "rank_offset 2 of 2" in refused(client, "/init_weights_update_group", far)
    for port in (70_000, -1):
        unknown = group | {"backend": "gloo", "master_port": port}
        assert f"no trainer at 127.0.0.1:{port}" in refused(
            client, "/init_weights_update_group", unknown
        )
    other = group | {"backend": "mpi"}
    assert "gloo or nccl" in refused(client, "/init_weights_update_group", other)
    tensors = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
    reported = refused(client, "/update_weights_from_distributed", tensors)
    assert "init_weights_update_group" in reported
    body = {"model_path": str(model), "load_format": "flattened_bucket"}
    assert "flattened_bucket" in refused(client, "/update_weights_from_disk", body)
    assert "No such file" in refused(client, "/update_weights_from_disk", {"model_path": "/etc"})


def test_a_group_that_is_being_joined_cannot_be_joined_by_another_request(
    client: Client, server: tidegate.VLLMServer
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = open_store("127.0.0.1", port, listen_fd=listener.detach())
    group = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    keys_before = store.num_keys()
    first = BackgroundRequest(server, "/init_weights_update_group", group)
    client.wait_until(lambda: store.num_keys() > keys_before)
    reported = refused(client, "/init_weights_update_group", group)
    assert "being joined by another request" in reported

    trainer = join_custom_group(store, "g", backend="gloo", rank=0, world_size=2, own_host=None)
    assert first.answer["success"]
    assert "destroy it first" in refused(client, "/init_weights_update_group", group)
    client.post("/destroy_weights_update_group", {"group_name": "g"})
    trainer.leave()


# ---------------------------------------------------------------- requests and keys


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token_ids_logprob": [1]}, "token_ids_logprob is not served"),
        ({"image_data": "x"}, "image_data is not served"),
        ({"return_routed_experts": True}, "return_routed_experts is not served"),
        ({"sampling_params": {"custom_params": {"x": 1}}}, "custom_params is not served"),
        ({"sampling_params": {"stop_regex": "x"}}, "stop_regex is not served"),
        ({"sampling_params": {"max_new_tokens": -1}}, "at least 0"),
        ({"sampling_params": {"n": 0}}, "at least 1"),
        ({"sampling_params": {"n": 10**12}}, "at most 1024 choices"),
        (
            {"sampling_params": {"n": 1024}, "return_logprob": True, "top_logprobs_num": 20},
            "the answer would have up to",
        ),
        ({"top_logprobs_num": [1, 2]}, "2 entries for 1 prompts"),
        ({"input_ids": [PROMPT, 3]}, "lists of token ids"),
        ({"lora_path": "no"}, "does not exist"),
        ({"text": "x"}, "Either text or input_ids"),
    ],
)
def test_what_a_request_cannot_have_is_refused_by_name(
    client: Client, fields: dict[str, Any], why: str
) -> None:
    answer = client.http.post("/generate", json={"input_ids": PROMPT, **fields})
    assert answer.status_code in (400, 404)
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize("start", [1, len(PROMPT), 2**70])
@pytest.mark.parametrize("streams", [False, True])
def test_log_probs_of_a_prompt_begin_anywhere_and_are_in_every_event_of_a_stream(
    client: Client, start: int, streams: bool
) -> None:
    fields = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
    answer = client.http.post("/generate", json=GREEDY | fields | {"stream": streams})
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    for text in events if streams else [answer.text]:
        meta = json.loads(text)["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT[start:]
        assert len(meta["input_top_logprobs"]) == len(PROMPT[start:])


def test_generate_wants_the_api_key_as_sglangs_does(model: Path) -> None:
    import httpx

    with tidegate.vllm_server(model=model, api_key="open sesame, please") as server:
        path = f"{server.url}/generate"
        assert httpx.post(path, json=GREEDY, timeout=60).status_code == 401
        headers = {"Authorization": "Bearer open sesame, please"}
        assert httpx.post(path, json=GREEDY, headers=headers, timeout=60).status_code == 200


# ---------------------------------------------------------------- Tidegate over Tidegate


@pytest.mark.parametrize("transfer", ["", "#weights=gloo"])
async def test_a_run_over_the_server_has_right_versions_on_every_token(
    server: tidegate.VLLMServer,
    model: Path,
    directory: Path,
    transfer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEGATE_ENGINE_KEY", server.control_token or "")
    report = await train(
        model,
        directory / f"run{transfer.removeprefix('#weights=')}",
        episode=solve,
        engine_urls=[f"sglang+{server.url}{transfer}"],
        kv_policy="keep" if transfer else "recompute",
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 1
