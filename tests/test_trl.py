"""Does TRL train with the server in place of vLLM? Its trainer and client as they are, on a CPU.

TRL has a Python of its own, which `make test-trl` makes; elsewhere these tests are skipped.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.chat_templates import add_chat_template, chat_tokenizer

PYTHON = os.environ.get("TIDEGATE_TRL_PYTHON", "")
ROOT = Path(__file__).parent.parent
TIMEOUT_S = 400
MAX_STALENESS = 2
"""Of the example."""

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TRL has a Python of its own: make test-trl"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tidegate.VLLMServer]:
    path = tmp_path_factory.mktemp("trl") / "model"
    # Near to uniform: rewards of a letter have room to rise.
    fields: dict[str, Any] = {"max_position_embeddings": 1024, "initializer_range": 0.05}
    make_model_directory(path, vocab_size=chat_tokenizer().get_vocab_size(), **fields)
    add_chat_template(path, "chatml")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    # TRL asks for the model by its directory, as vLLM's servers name it.
    with tidegate.VLLMServer(model=path, engines=2, max_running_turns=8) as server:
        yield server


def _reload(server: tidegate.VLLMServer) -> None:
    body = {"method": "reload_weights"}
    httpx.post(f"{server.url}/collective_rpc", json=body, timeout=TIMEOUT_S).raise_for_status()


def run_in_trls_python(*arguments: str) -> Any:
    """What a program there says last, as JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, *arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("mode", [[], ["--lora"]], ids=["weights", "adapters"])
def test_trls_trainer_advances_versions_within_its_staleness(
    server: tidegate.VLLMServer, mode: list[str]
) -> None:
    _reload(server)  # an adapter's trainer has the directory's weights under it
    before = server.version
    model = str(server.settings.model)
    script = str(ROOT / "examples" / "trl_async_grpo.py")
    told = run_in_trls_python(
        script, "--model", model, "--server", server.url, "--steps", "4", *mode
    )
    assert told["steps"] == 4
    assert told["versions"] == 5  # the first before any step
    assert server.version - before >= told["versions"]
    ages = {int(age): samples for age, samples in told["staleness"].items()}
    assert sum(ages.values()) > 0
    assert max(ages) <= MAX_STALENESS + 1  # as taken; TRL drops what is beyond
    # Log-probs that its trainer computes are those that the server drew by.
    assert told["first_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert told["first_kl"] == pytest.approx(0.0, abs=1e-4)


def test_trls_client_knows_the_server(server: tidegate.VLLMServer) -> None:
    script = str(Path(__file__).parent / "trl" / "client_of_the_server.py")
    told = run_in_trls_python(script, server.url, str(server.settings.model))
    assert told == {
        "max_model_len": 1024,
        "dtype": "torch.float32",
        "world_size": 1,
        "has_lora": True,
        "frozen": True,
        "weight_version": "default",
        "missing_adapter": 404,
    }
