"""The real client of SkyRL's trainer calls every one of its methods: `make test-skyrl`."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.models import make_model, make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer
from tests.serving.vllm_server.vllm_serving import PROMPT, logprobs_of

PYTHON = os.environ.get("TIDEGATE_SKYRL_PYTHON", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not PYTHON, reason="SkyRL has a Python of its own: make test-skyrl"),
    pytest.mark.timeout(460),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's use
    pytest.mark.filterwarnings("ignore:The configuration file contains a `runtime_config`"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of one shape, with other weights each; the first is served."""
    folder = tmp_path_factory.mktemp("models")
    vocab = chat_tokenizer().get_vocab_size()
    for seed in range(3):
        make_model_directory(folder / str(seed), seed=seed, vocab_size=vocab)
        add_chat_template(folder / str(seed), "chatml")
    return [folder / str(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> list[Path]:
    import peft

    folder = tmp_path_factory.mktemp("adapters")
    for seed in range(2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            init_lora_weights=False,
            task_type=peft.TaskType.CAUSAL_LM,
        )
        base = make_model("qwen3", seed=0, vocab_size=chat_tokenizer().get_vocab_size())
        peft.get_peft_model(base, config).save_pretrained(str(folder / str(seed)))
        # As SkyRL's FSDP worker writes it.
        fields = dataclasses.asdict(config)
        fields |= {name: fields[name].value for name in ("task_type", "peft_type")}
        fields["target_modules"] = list(fields["target_modules"])
        (folder / str(seed) / "adapter_config.json").write_text(json.dumps(fields))
    return [folder / str(seed) for seed in range(2)]


@pytest.fixture(scope="module")
def answers(models: list[Path], adapters: list[Path]) -> Any:
    settings: dict[str, Any] = {"model": models[0], "served_model_name": "tiny"}
    settings |= {"needs_control_token": False}  # SkyRL sends none
    folders = [models[0].parent, adapters[0].parent]
    with (
        tidegate.vllm_server(**settings, weight_directories=folders) as server,
        tidegate.vllm_server(**settings, weight_transfer="gloo") as gloo,
    ):
        given = {
            "url": server.url,
            "gloo_url": gloo.url,
            "models": list(map(str, models[1:])),
            "adapters": list(map(str, adapters)),
        }
        script = Path(__file__).with_name("skyrl_client_calls.py")
        done = subprocess.run(
            [PYTHON, str(script), json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_sampled_from(
    sampled: Sequence[Sequence[Any]], model: Path, adapter: Path | None = None
) -> None:
    """Check tokens and log-probs of a greedy continuation against transformers and peft."""
    import transformers

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    if adapter is not None:
        import peft

        reference = peft.PeftModel.from_pretrained(reference, str(adapter))
    rows = logprobs_of(reference, [*PROMPT, *(token for token, _ in sampled)])[len(PROMPT) - 1 :]
    for row, (token, logprob) in zip(rows, sampled, strict=False):
        assert token == row.argmax().item()
        assert logprob == pytest.approx(row[token].item(), abs=1e-3)


def test_every_method_of_the_client_is_called_and_none_warns(answers: dict[str, Any]) -> None:
    assert answers["uncalled"] == []
    assert answers["warnings"] == []


def test_tokens_are_generated_and_sampled_with_log_probs(
    answers: dict[str, Any], models: list[Path]
) -> None:
    data = answers["data"]
    batch = data["generate"]
    pairs = zip(batch["response_ids"][0], batch["response_logprobs"][0], strict=True)
    assert_sampled_from(list(pairs), models[0])
    assert batch["stop_reasons"] == ["length", "length"]
    first, second = data["sample"]["sequences"]
    assert first["tokens"] != second["tokens"]
    assert len(first["tokens"]) == len(first["logprobs"])
    assert data["sample"]["prompt_logprobs"][0] is None
    assert [len(top) for top in data["sample"]["topk_prompt_logprobs"][1:]] == [2, 2, 2]
    assert data["tokenize"] == [chat_tokenizer().encode("say", add_special_tokens=False).ids]
    assert data["detokenize"] == [chat_tokenizer().decode([30, 41], skip_special_tokens=False)]
    assert data["completion"]["choices"][0]["finish_reason"] in ("length", "stop")
    status, message = data["sample_image"]
    assert (status, message) == (400, "a message's content may have text parts only")


def test_a_rendered_conversation_generates_what_the_chat_answers(answers: dict[str, Any]) -> None:
    data = answers["data"]
    assert data["rendered"]["token_ids"] == data["chat"]["prompt_token_ids"]
    assert data["rendered"]["features"] is None
    assert data["generate_rendered"]["response_ids"] == [data["chat"]["choices"][0]["token_ids"]]


def test_engines_pause_sleep_and_wake(answers: dict[str, Any]) -> None:
    control = answers["control"]
    assert control["world_size"] == [1, 1]
    assert control["bodies"] == [
        {"status": "paused"},
        {"status": "paused"},
        {"status": "resumed"},
        {"status": "resumed"},
        {"success": True},
        {"status": "sleeping", "level": 2},
        {"status": "sleeping", "tags": ["weights"]},
        {"status": "awake", "tags": ["kv_cache"]},
    ]
    assert control["before"] == control["after"]


def test_an_adapter_is_replaced_in_place_and_unloaded(
    answers: dict[str, Any], models: list[Path], adapters: list[Path]
) -> None:
    *sampled, (status, message) = answers["adapters"]
    for each, adapter in zip(sampled, adapters, strict=True):
        assert_sampled_from(each, models[0], adapter)
    assert status == 404
    assert "skyrl-lora" in message


def test_weights_are_read_from_files_between_start_and_finish(
    answers: dict[str, Any], models: list[Path]
) -> None:
    for sampled, model in zip(answers["disk"], models[1:], strict=True):
        assert_sampled_from(sampled, model)


def test_weights_are_broadcast_over_gloo_by_skyrls_own_init_info(
    answers: dict[str, Any], models: list[Path]
) -> None:
    assert_sampled_from(answers["gloo"]["sampled"], models[1])
    status, message = answers["gloo"]["packed"]
    assert status == 400
    assert "packed=false" in message


def test_what_needs_cuda_is_refused_with_what_to_use_instead(answers: dict[str, Any]) -> None:
    refused = answers["refused"]
    for name in ("init", "nccl", "ipc"):
        status, message = refused[name]
        assert status == 400, name
        assert "--weight-transfer nccl or ipc" in message
        assert "disk" in message
    assert refused["init_ipc"][0] == 200  # it says nothing that a server of files must refuse
    assert refused["kernel_format"][0] == 501
    assert "matching start_weight_update" in refused["finish"][1]
    status, message = refused["experts"]
    assert status == 501
    assert "enable_return_routed_experts" in message
