"""Weight updates by vLLM's protocol change the server's outputs when they finish."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import tidegate
from tests.held_credit import paused, turns_continue_until
from tests.models import make_model, make_model_directory
from tests.serving.vllm_server.vllm_serving import (
    CONTEXT_TOKENS_MAX,
    LONG,
    PROMPT,
    Client,
    difference,
)
from tidegate.serving.control.receivers import broadcast, gloo_group
from tidegate.transport.messages import FinishWeightUpdate

pytestmark = pytest.mark.wire

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of one shape, with other weights each; the first is served."""
    folder = tmp_path_factory.mktemp("models")
    fields: dict[str, Any] = {"max_position_embeddings": CONTEXT_TOKENS_MAX}
    return [make_model_directory(folder / str(n), seed=n, **fields) for n in range(3)]


@pytest.fixture(scope="module")
def server(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(
        model=models[0],
        served_model_name="tiny",
        engines=2,
        max_running_turns=4,
        weight_checksums=True,
        weight_directories=[tmp_path_factory.getbasetemp()],
    ) as server:
        yield server


@pytest.fixture
def client(server: tidegate.VLLMServer, models: list[Path]) -> Iterator[Client]:
    with Client(server) as client:
        yield client
        client.post("/resume")
        client.post("/collective_rpc", {"method": "reload_weights"})
        client.post("/update_weight_version", {"new_version": "default"})


def say(client: Client, **fields: Any) -> list[tuple[int, float]]:
    """What both engines say, with log-probs; it must be the same."""
    body = {"prompt": [PROMPT, PROMPT], **GREEDY, "return_token_ids": True, **fields}
    one, two = client.post("/v1/completions", body)["choices"]
    assert one["token_ids"] == two["token_ids"]
    return list(zip(one["token_ids"], one["logprobs"]["token_logprobs"], strict=True))


def expect(client: Client, model: Path) -> None:
    """The log-probs are those of the model in this directory."""
    assert difference(say(client), model, PROMPT) < 1e-4


def send(client: Client, info: Mapping[str, Any], label: str | None = None) -> None:
    """The three phases of every update."""
    client.post("/start_weight_update", {"is_checkpoint_format": True})
    client.post("/update_weights", {"update_info": info})
    client.post("/finish_weight_update", {"weight_version": label} if label else None)


def test_the_four_phases_bring_new_weights_to_every_engine(
    client: Client, models: list[Path]
) -> None:
    expect(client, models[0])
    client.post("/init_weight_transfer_engine", {"init_info": {}})
    client.post("/pause", mode="keep")
    send(client, {"path": str(models[1])}, "v8")
    client.post("/resume")
    assert client.get("/weight_info") == {"weight_version": "v8"}
    expect(client, models[1])
    answer = client.generate(token_ids=PROMPT, sampling_params={"max_tokens": 2})
    assert answer["choices"][0]["weight_versions"] == [{"version": "v8", "start": 0, "end": 2}]


@pytest.mark.parametrize("clears", ["true", "false", "later"])
def test_a_request_that_is_kept_continues_under_the_new_weights(
    client: Client, server: tidegate.VLLMServer, models: list[Path], clears: str
) -> None:
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG | {"token_ids": PROMPT})
        client.post("/pause", mode="keep", clear_cache=str(clears == "true").lower())
    send(client, {"path": str(models[1])}, "new")
    if clears == "later":  # as SkyRL's trainer does, by a field of the body
        client.post("/reset_prefix_cache", {"reset_running_requests": True})
    client.post("/resume")
    (choice,) = request.answer["choices"]
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"]) == ("default", "new")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], CONTEXT_TOKENS_MAX - 4)
    said = [(one["token_id"], one["logprob"]) for one in choice["logprobs"]["content"]]
    assert difference(said[: old["end"]], models[0], PROMPT) < 1e-3
    # With the cache cleared the new weights have read all of it; else they continue from old KV.
    is_recomputed = difference(said, models[1], PROMPT, new["start"]) < 1e-3
    assert is_recomputed == (clears != "false")


def test_skyrls_phases_bring_new_weights_by_collective_rpc(
    client: Client, models: list[Path]
) -> None:
    def call(method: str, **kwargs: Any) -> None:
        body = {"method": method, "kwargs": kwargs}
        assert client.post("/collective_rpc", body) == {"results": [None]}

    call("skyrl_start_weight_update", is_checkpoint_format=True)
    call("update_weights_nccl", update_info={"path": str(models[1])})
    call("skyrl_finish_weight_update")
    expect(client, models[1])
    for method, kwargs, code in (
        ("skyrl_start_weight_update", {"is_checkpoint_format": False}, 501),
        ("update_weights_ipc", {}, 400),
    ):
        body = {"method": method, "kwargs": kwargs}
        assert client.refusal("/collective_rpc", body)["code"] == code


def test_a_trainer_of_nccl_or_ipc_gets_an_error_that_names_this_servers_transfer(
    client: Client,
) -> None:
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for init_info in [where, {"packed": True}]:
        reported = client.refusal("/init_weight_transfer_engine", {"init_info": init_info})
        assert (reported["code"], reported["param"]) == (400, "init_info")
        assert "--weight-transfer nccl or ipc" in reported["message"]


def test_prime_rls_orchestrator_has_a_directory_read_under_a_pause(
    client: Client, models: list[Path]
) -> None:
    """The calls of src/prime_rl/utils/client.py there, restated."""
    assert client.get("/liveness") == {"status": "ok"}
    assert client.http.post("/init_broadcaster", json={"host": "x", "port": 1}).status_code == 404
    client.post("/pause", mode="keep", clear_cache="false")
    assert client.post("/update_weights", {"weight_dir": str(models[1])}) == {"status": "ok"}
    client.post("/resume")
    expect(client, models[1])
    refused = client.refusal("/update_weights", {"weight_dir": "/etc"})
    assert "No such file or directory" in refused["message"]
    assert client.refusal("/update_weights", {"weight_dir": None})["code"] == 400


def test_updates_need_no_pause(
    client: Client, server: tidegate.VLLMServer, models: list[Path]
) -> None:
    with turns_continue_until(server, lambda message: isinstance(message, FinishWeightUpdate)):
        request = client.begin(server, "/inference/v1/generate", LONG)
        send(client, {"path": str(models[1])}, "new")
    versions = [span["version"] for span in request.answer["choices"][0]["weight_versions"]]
    assert versions == ["default", "new"]
    expect(client, models[1])


def test_weights_may_come_in_pieces_or_in_part(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    path = str(models[1])
    names = sorted(load_file(models[1] / "model.safetensors"))
    client.post("/start_weight_update")
    for piece in (names[:5], names[5:]):
        client.post("/update_weights", {"update_info": [{"path": path, "names": piece}]})
    client.post("/finish_weight_update")
    assert client.get("/weight_info") == {"weight_version": "default"}  # none was given
    expect(client, models[1])

    mixed = tmp_path / "mixed"
    make_model_directory(mixed, seed=1, max_position_embeddings=CONTEXT_TOKENS_MAX)
    tensors = load_file(mixed / "model.safetensors")
    tensors |= {names[0]: load_file(models[2] / "model.safetensors")[names[0]]}
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    send(client, {"path": str(models[2]), "names": names[:1]})
    expect(client, mixed)


def test_phases_out_of_order_are_refused(client: Client, models: list[Path]) -> None:
    info = {"update_info": {"path": str(models[1])}}
    reported = client.refusal("/update_weights", info)["message"]
    assert "start_weight_update must be called before update_weights." in reported
    reported = client.refusal("/finish_weight_update")["message"]
    assert "finish_weight_update called without a matching start_weight_update." in reported
    client.post("/start_weight_update")
    assert "already active" in client.refusal("/start_weight_update")["message"]
    assert client.refusal("/update_weights", {"update_info": {"nope": 1}})["code"] == 500
    reported = client.refusal("/init_weight_transfer_engine", {"init_info": {"nope": 1}})["message"]
    assert "Invalid init_info" in reported


def test_a_trainer_that_comes_anew_need_not_finish_what_another_began(
    client: Client, models: list[Path]
) -> None:
    client.post("/start_weight_update")
    client.post("/update_weights", {"update_info": {"path": str(models[1])}})
    client.post("/init_weight_transfer_engine", {"init_info": {}})
    assert "matching start" in client.refusal("/finish_weight_update")["message"]
    client.post("/start_weight_update")
    client.post("/shutdown_weight_transfer_engine")
    assert "matching start" in client.refusal("/finish_weight_update")["message"]
    expect(client, models[0])


def test_an_update_that_fails_changes_nothing(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    save_file({"strange": torch.zeros(2)}, tmp_path / "a.safetensors")
    other = make_model_directory(tmp_path / "other", intermediate_size=64)
    for path in ("/nope", str(tmp_path), str(other)):
        client.post("/pause")
        client.post("/start_weight_update")
        assert client.refusal("/update_weights", {"update_info": {"path": path}})["code"] == 500
        assert client.refusal("/finish_weight_update", {"weight_version": "bad"})["code"] == 500
        assert client.get("/weight_info") == {"weight_version": "default"}
        assert client.http.get("/health").status_code == 200
        client.post("/resume")
        expect(client, models[0])


def test_files_that_publish_would_refuse_are_refused(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    whole = load_file(models[1] / "model.safetensors")
    norm = "model.norm.weight"
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in whole.items()}
    for tensors, why in (
        ({**whole, norm: torch.ones(64, dtype=torch.int8)}, "model.norm.weight is torch.int8"),
        (
            {n: t for n, t in whole.items() if n != norm},
            f"lack 1 of the model's tensors, such as '{norm}'",
        ),
        (compiled, "torch.compile has added '_orig_mod'"),
    ):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        assert why in client.refusal("/collective_rpc", reload)["message"]
        client.post("/start_weight_update")
        sent = client.http.post("/update_weights", json={"update_info": {"path": str(tmp_path)}})
        reported = sent.text if sent.status_code == 500 else ""
        assert why in reported + str(client.refusal("/finish_weight_update"))
        expect(client, models[0])


def test_weights_are_reloaded_from_a_directory_and_named_later(
    client: Client, models: list[Path]
) -> None:
    strange = {"method": "reload_weights", "kwargs": {"weights_path": 3}}
    assert "must be a directory" in client.refusal("/collective_rpc", strange)["message"]
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(models[2])}}
    assert client.post("/collective_rpc", rpc) == {"results": [None]}
    response = client.post("/update_weight_version", {"new_version": "7"})
    assert response.items() >= {"success": True, "new_version": "7"}.items()
    assert client.get("/weight_info") == {"weight_version": "7"}
    expect(client, models[2])
    assert client.refusal("/collective_rpc", {"method": "shutdown"})["code"] == 501


def test_checksums_distinguish_sets_of_weights(client: Client, models: list[Path]) -> None:
    before = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert "dp0:pp0:pcp0:tp0:model.norm.weight" in before
    same = {"action": "compare", "baseline": before}
    assert client.post("/weight_checker", same) == {"match": True, "mismatches": []}
    send(client, {"path": str(models[1]), "names": ["model.norm.weight"]})
    reported = client.post("/weight_checker", same)
    assert reported == {"match": False, "mismatches": ["dp0:pp0:pcp0:tp0:model.norm.weight"]}
    assert client.refusal("/weight_checker", {"action": "compare"})["code"] == 400


def test_a_publish_wakes_weights_that_were_thrown_away(client: Client, models: list[Path]) -> None:
    client.post("/sleep", level=2)
    client.post("/wake_up", tags="weights")
    send(client, {"path": str(models[1])}, "w")
    assert client.post("/wake_up", tags="kv_cache")["status"] == "awake"
    expect(client, models[1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own use
def test_an_adapter_is_a_model_of_its_own(
    client: Client, models: list[Path], tmp_path: Path
) -> None:
    import peft

    def saved(step: int) -> str:
        torch.manual_seed(step)
        base = make_model("qwen3", seed=0, max_position_embeddings=CONTEXT_TOKENS_MAX)
        projections = ["q_proj", "down_proj"]
        config = peft.LoraConfig(r=4, target_modules=projections, init_lora_weights=False)
        path = str(tmp_path / f"adapter_{step}")
        peft.get_peft_model(base, config).save_pretrained(path)
        return path

    plain = say(client)
    load = {"lora_name": "night", "lora_path": saved(0)}
    assert client.refusal("/v1/completions", {"prompt": "x", "model": "night"})["code"] == 404
    answer = client.http.post("/v1/load_lora_adapter", json=load)
    assert answer.text == "Success: LoRA adapter 'night' added successfully."
    assert "already been loaded" in client.refusal("/v1/load_lora_adapter", load)["message"]
    cards = client.get("/v1/models")["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("night", "tiny")]
    night = say(client, model="night")
    assert night != plain
    context = [*PROMPT, *(token for token, _ in night)]

    def scored(**fields: Any) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        reported = client.generate(token_ids=context, sampling_params=sampling, **fields)
        rows = list(zip(context, reported["prompt_logprobs"], strict=True))
        return [row[str(token)]["logprob"] for token, row in rows[len(PROMPT) :]]

    sampled = pytest.approx([logprob for _, logprob in night], abs=1e-4)
    assert scored(model="night") == sampled
    assert scored() != sampled
    assert [token for token, _ in say(client)] == [token for token, _ in plain]
    assert client.get("/weight_info") == {"weight_version": "default"}
    again = {"lora_name": "night", "lora_path": saved(1)}  # at each step, as prime-rl does
    assert client.post("/load_lora_adapter", again)["status"] == "ok"
    assert say(client, model="night") not in (night, plain)
    gone = client.http.post("/v1/unload_lora_adapter", json={"lora_name": "night"})
    assert gone.status_code == 200
    assert client.refusal("/v1/unload_lora_adapter", {"lora_name": "night"})["code"] == 404
    missing = {"lora_name": "x", "lora_path": str(tmp_path / "no")}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        assert client.refusal(path, missing)["code"] == 404  # prime-rl asks again


def test_weights_come_by_gloo_from_another_process(models: list[Path]) -> None:
    tensors = load_file(models[1] / "model.safetensors")
    with (
        tidegate.vllm_server(model=models[0], weight_transfer="gloo") as server,
        Client(server) as client,
    ):
        port = _free_port()
        groups: list[Any] = []
        meeting = threading.Thread(target=lambda: groups.append(gloo_group("127.0.0.1", port, 0)))
        meeting.start()
        where = {"master_address": "127.0.0.1", "master_port": port}
        wrong = client.refusal("/init_weight_transfer_engine", {"init_info": {"world_size": 2}})
        assert "master_address" in wrong["message"]
        where |= {"rank_offset": 1, "world_size": client.get("/get_world_size")["world_size"] + 1}
        client.post("/init_weight_transfer_engine", {"init_info": where})
        meeting.join(60)
        (group,) = groups
        sending = threading.Thread(target=_broadcast, args=(group, tensors.values()))
        sending.start()
        info = {
            "names": list(tensors),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
        }
        send(client, info, "1")
        sending.join(60)
        expect(client, models[1])
        client.post("/shutdown_weight_transfer_engine")


def test_a_server_ends_while_it_waits_for_a_trainer_that_never_comes(models: list[Path]) -> None:
    before = set(threading.enumerate())
    with tidegate.vllm_server(model=models[0], weight_transfer="gloo") as server:
        client = Client(server)
        unreachable = {"master_address": "127.0.0.1", "master_port": _free_port()}
        body = {"init_info": {**unreachable, "rank_offset": 1, "world_size": 2}}

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                client.http.post("/init_weight_transfer_engine", json=body)

        request = threading.Thread(target=ask)
        request.start()
        names = {"tidegate weights"}
        client.wait_until(lambda: names <= {thread.name for thread in threading.enumerate()})
    request.join(60)
    client.http.close()
    left = [t.name for t in set(threading.enumerate()) - before if not t.daemon]
    assert left == []  # those keep a process from ending


def _broadcast(group: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        broadcast(group, tensor)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_run_generates_on_this_server_as_on_vllm_and_publishes_to_it(
    models: list[Path], tmp_path: Path
) -> None:
    async def play(episode: tidegate.Episode, task: object) -> float:
        episode.append(PROMPT)
        turn = await episode.generate(max_tokens=4, top_logprobs=2)
        assert turn.top_logprobs is not None
        assert {len(top) for top in turn.top_logprobs} == {2}
        return 1.0

    with tidegate.vllm_server(
        model=models[0], needs_control_token=False, weight_directories=[tmp_path]
    ) as server:
        async with tidegate.serve(
            model=models[0],
            engine_urls=[f"vllm+{server.url}"],
            group_size=2,
            groups_per_batch=1,
            run_directory=tmp_path / "run",
        ) as rollouts:
            await rollouts.evaluate(["t"], episode=play)
            await rollouts.publish(load_file(models[1] / "model.safetensors"))
            await rollouts.evaluate(["t"], episode=play)
            ledger = rollouts.statistics().evaluation_ledger
            assert ledger.generated > 0
            assert ledger.error == 0
        with Client(server) as client:
            expect(client, models[1])
