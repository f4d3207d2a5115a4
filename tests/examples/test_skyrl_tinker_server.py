"""SkyRL's Tinker server trains with jax and samples from the server: `make test-skyrl`."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer

PYTHON = os.environ.get("TIDEGATE_SKYRL_PYTHON", "")
EXAMPLE = Path(__file__).parents[2] / "examples" / "skyrl_tinker_server.py"
TIMEOUT_S = 500
STEPS = 2

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not PYTHON, reason="SkyRL has a Python of its own: make test-skyrl"),
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's use
]


def model_directory(path: Path) -> Path:
    make_model_directory(path, vocab_size=chat_tokenizer().get_vocab_size())
    add_chat_template(path, "chatml")
    file = path / "tokenizer_config.json"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    file.write_text(json.dumps(settings))  # which SkyRL's engine reads with AutoTokenizer
    return path


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), -1)
    sampled = torch.tensor(tokens)[:, None]
    return rows[len(prompt) - 1 : -1].gather(1, sampled)[:, 0]


def with_adapter(model: Path, directory: Path) -> Any:
    """Return the model with an adapter; SkyRL's configuration names no modules."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    tensors = load_file(directory / "adapter_model.safetensors")
    saved = json.loads((directory / "adapter_config.json").read_text())
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in tensors})
    config = peft.LoraConfig(r=saved["r"], lora_alpha=saved["lora_alpha"], target_modules=modules)
    adapted = peft.get_peft_model(base, config).eval()
    peft.set_peft_model_state_dict(adapted, tensors)
    return adapted


def test_tokens_and_log_probs_are_those_of_the_adapter_that_was_just_saved(tmp_path: Path) -> None:
    import transformers

    model, loras = model_directory(tmp_path / "model"), tmp_path / "loras"
    loras.mkdir()
    with tidegate.vllm_server(model=model, lora_directory=loras, api_key="EMPTY") as server:
        command = [PYTHON, str(EXAMPLE), "--model", str(model), "--engine", server.url]
        command += ["--loras", str(loras), "--steps", str(STEPS), "--samples", "4"]
        done = subprocess.run(
            command,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        headers = {"Authorization": "Bearer EMPTY"}
        listed = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
    report = json.loads(done.stdout.splitlines()[-1])
    prompt = report["prompt"]

    def difference(reference: Any, samples: list[Mapping[str, Any]]) -> float:
        found = [logprobs(reference, prompt, each["tokens"]) for each in samples]
        reported = [torch.tensor(each["logprobs"]) for each in samples]
        return max((a - b).abs().max().item() for a, b in zip(found, reported, strict=True))

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert difference(base, report["base"]) < 1e-3
    names = []
    for number, step in enumerate(report["steps"]):
        run = step["path"].removeprefix("tinker://").split("/")[0]
        names.append(f"{run}_step-{number}")
        assert difference(with_adapter(model, loras / names[-1]), step["samples"]) < 1e-3
        assert step["max_difference"] < 1e-3  # from the trainer's own forward pass
    assert difference(base, report["steps"][-1]["samples"]) > 1e-2  # so the adapter did it
    assert [card["id"] for card in listed] == [str(model), *names]
