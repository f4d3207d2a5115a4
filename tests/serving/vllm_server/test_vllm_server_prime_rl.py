"""The calls of prime-rl's orchestrator (src/prime_rl/utils/client.py there), restated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import tidegate
from tests.models import make_model, make_model_directory
from tests.serving.vllm_server.vllm_serving import CONTEXT_TOKENS_MAX, PROMPT, Client

pytestmark = [
    pytest.mark.wire,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's use
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def server(model: Path, outputs: Path) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(
        model=model, served_model_name="tiny", weight_directories=[outputs]
    ) as server:
        yield server


def prefill_logprobs(server: tidegate.VLLMServer, token_ids: list[int]) -> list[float]:
    import httpx

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.control_token)
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    with client:
        answer = client.post(
            f"{server.url}/inference/v1/generate",
            cast_to=httpx.Response,
            body={"model": "tiny", "token_ids": token_ids, "sampling_params": sampling},
        )
    reported = answer.json()["prompt_logprobs"]
    return [next(iter(entry.values()))["logprob"] if entry else 0.0 for entry in reported]


def test_weights_are_read_from_a_directory_under_a_pause(
    client: Client, server: tidegate.VLLMServer, model: Path, outputs: Path
) -> None:
    import transformers

    assert client.get("/liveness") == {"status": "ok"}
    assert client.http.post("/init_broadcaster", json={"host": "x", "port": 1}).status_code == 404
    before = prefill_logprobs(server, PROMPT)
    vocab = transformers.AutoConfig.from_pretrained(model).vocab_size
    step = make_model_directory(
        outputs / "step_1", seed=5, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX
    )
    (step / "NCCL_READY").touch()
    client.post("/pause", mode="keep", clear_cache="false")
    assert client.post("/update_weights", {"weight_dir": step.as_posix()}) == {"status": "ok"}
    client.post("/resume")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(step)
    with torch.no_grad():
        rows = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0].float(), -1)
    expected = [rows[at, token].item() for at, token in enumerate(PROMPT[1:])]
    after = prefill_logprobs(server, PROMPT)
    assert after == pytest.approx([0.0, *expected], abs=1e-4)
    assert after != pytest.approx(before, abs=1e-3)
    refused = client.refusal("/update_weights", {"weight_dir": "/etc"})
    assert "No such file or directory" in refused["message"]
    assert client.refusal("/update_weights", {"weight_dir": None})["code"] == 400


def test_an_adapter_of_one_name_is_replaced_at_each_step(client: Client, outputs: Path) -> None:
    import peft

    def sampled(model: str) -> Any:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        (choice,) = client.post("/v1/completions", {**body, "logprobs": 0})["choices"]
        return choice["logprobs"]["token_logprobs"]

    reported = [sampled("tiny")]
    for step in range(2):
        base = make_model("qwen3", seed=0, max_position_embeddings=CONTEXT_TOKENS_MAX)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        path = outputs / f"adapter_{step}"
        torch.manual_seed(step)
        peft.get_peft_model(base, config).save_pretrained(str(path))
        body = {"lora_name": "policy", "lora_path": path.as_posix()}
        assert client.post("/load_lora_adapter", body)["status"] == "ok"
        reported.append(sampled("policy"))
    assert reported[0] != reported[1] != reported[2] != reported[0]
    missing = {"lora_name": "policy", "lora_path": str(outputs / "no")}
    assert client.refusal("/load_lora_adapter", missing)["code"] == 404  # prime-rl asks again
    client.http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})
