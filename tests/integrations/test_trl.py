"""TRL's trainers and client against the server, TRLRollouts and trl_rollout_func, on a CPU.

TRL has a Python of its own, which `make test-trl` creates; otherwise these tests are skipped.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidegate
from examples.tiny_model import make_model
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer

PYTHON = os.environ.get("TIDEGATE_TRL_PYTHON", "")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400
MAX_STALENESS = 2
"""Bound of the example program."""

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TRL has a Python of its own: make test-trl"),
    # A limit includes the fixture that warms a model up.
    pytest.mark.timeout(2 * TIMEOUT_S),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "model"
    # Nearly uniform, so that the reward of a letter can rise.
    fields: dict[str, Any] = {"max_position_embeddings": 1024, "initializer_range": 0.05}
    make_model_directory(path, vocab_size=chat_tokenizer().get_vocab_size(), **fields)
    add_chat_template(path, "chatml")
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["bos_token"] = "<bos>"  # transformers refuses a dict without a type, which we accept
    file.write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.VLLMServer]:
    # TRL names the model by its directory, as vLLM does. It sends no control token, and
    # writes weights and adapters to temporary directories.
    settings: dict[str, Any] = {"engines": 2, "max_running_turns": 8}
    settings |= {"needs_control_token": False, "weight_directories": [tempfile.gettempdir()]}
    with tidegate.vllm_server(model=model, **settings) as server:
        yield server


def _reload(server: tidegate.VLLMServer) -> None:
    body = {"method": "reload_weights"}
    httpx.post(f"{server.url}/collective_rpc", json=body, timeout=TIMEOUT_S).raise_for_status()


def run_in_trls_python(*arguments: str) -> Any:
    """Run a program there, and return its last line, parsed as JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("mode", [[], ["--lora"]], ids=["weights", "adapters"])
def test_trls_trainer_advances_versions_within_its_staleness(
    server: tidegate.VLLMServer, mode: list[str]
) -> None:
    _reload(server)  # the adapter's trainer starts from the directory's weights
    before = server.version
    model = str(server.settings.model)
    script = str(ROOT / "examples" / "trl_async_grpo.py")
    seen = run_in_trls_python(
        script, "--model", model, "--server", server.url, "--steps", "4", *mode
    )
    assert seen["steps"] == 4
    assert seen["versions"] == 5  # the first before any step
    assert server.version - before >= seen["versions"]
    ages = {int(age): samples for age, samples in seen["staleness"].items()}
    assert sum(ages.values()) > 0
    assert max(ages) <= MAX_STALENESS + 1  # when taken; TRL drops older rows
    # The trainer computes the log-probs that the server sampled with.
    assert seen["first_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert seen["first_kl"] == pytest.approx(0.0, abs=1e-4)


def test_trls_trainer_trains_on_a_run_in_the_place_of_its_own_rollout_worker(model: Path) -> None:
    seen = run_in_trls_python("-m", "examples.trl_rollouts", "--model", str(model), "--steps", "4")
    assert seen["steps"] == 4
    assert seen["versions"] == seen["run_version"] == 5  # the first before any step
    ages = {int(age): samples for age, samples in seen["staleness"].items()}
    assert sum(ages.values()) >= 4 * 8
    assert max(ages) <= 1  # the run's own bound, when taken: TRL has nothing to drop
    assert seen["first_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert seen["first_kl"] == pytest.approx(0.0, abs=1e-4)
    assert 0 < seen["mean_length"] <= 24
    assert seen["rollouts"] == 4 * 8
    assert seen["tokens"]["generated"] >= seen["tokens"]["trained"] > 0
    assert seen["tokens"]["trained"] == seen["trained_tokens"]  # as TRL counts them
    assert seen["tokens"]["discarded"]["not_trained"] > 0  # a micro-batch that TRL never trained on


@pytest.mark.parametrize(
    ("reason", "logged", "limits"),
    [
        ("too_stale", "stale", ["--max-staleness", "0"]),
        ("too_long", "oversize", ["--token-budget", "47"]),
    ],
)
async def test_what_counts_as_trained_is_what_trls_trainer_trains_on_by_its_own_limits(
    model: Path, reason: str, logged: str, limits: list[str]
) -> None:
    """Engines may be further ahead than TRL's own limits allow."""
    shape: dict[str, Any] = {"max_staleness": 6, "group_size": 4, "groups_per_batch": 2}
    seen = await run_beside_trl(model, "--steps", "4", *limits, **shape)
    assert seen["steps"] == 4
    assert seen["tokens"]["trained"] == seen["trained_tokens"]
    assert seen["tokens"]["discarded"][reason] > 0
    assert seen["dropped"][logged] > 0  # TRL logs them under its own name


def test_two_ranks_of_trls_trainer_train_on_the_run_of_the_first(model: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    port = ("--master-port", str(free_port()))
    script = ("-m", "examples.trl_rollouts", "--model", str(model), "--engines", "1")
    seen = run_in_trls_python(*ranks, *port, *script, "--steps", "3")
    assert (seen["steps"], seen["versions"], seen["run_version"]) == (3, 4, 4)
    assert max(int(age) for age in seen["staleness"]) <= 1
    assert seen["first_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert seen["first_kl"] == pytest.approx(0.0, abs=1e-4)
    assert seen["tokens"]["trained"] == seen["trained_tokens"]
    assert seen["rollouts"] == 3 * 8


async def solve(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """The example's episode."""
    turn = await episode.generate(messages=task["prompt"], max_tokens=24)
    return turn.text.count("e") / max(1, len(turn.text))


def questions() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield {"prompt": [{"role": "user", "content": f"Say {number % 7}."}]}


async def run_beside_trl(model: Path, *options: str, **shape: Any) -> dict[str, Any]:
    """Train in TRL's Python on a run of this process; return what it printed."""
    script = ("-m", "examples.trl_rollouts", "--model", str(model))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        address = f"ipc://{folder}/run"
        async with tidegate.serve(model=model, engines=1, **shape) as run:
            listening = asyncio.create_task(
                tidegate.listen(run, address, tasks=questions(), episode=solve)
            )
            seen: dict[str, Any] = await asyncio.to_thread(
                run_in_trls_python, *script, *options, "--run", address
            )
            await listening
            assert run.version == seen["run_version"]
    return seen


async def test_trls_trainer_trains_on_a_run_of_another_process(model: Path) -> None:
    shape: dict[str, Any] = {"max_staleness": 1, "group_size": 4, "groups_per_batch": 2}
    seen = await run_beside_trl(model, "--steps", "3", **shape)
    assert seen["steps"] == 3
    assert seen["versions"] == seen["run_version"] == 4
    assert max(int(age) for age in seen["staleness"]) <= 1
    assert seen["first_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert seen["first_kl"] == pytest.approx(0.0, abs=1e-4)


def test_trls_trainer_continues_from_its_checkpoint_with_a_new_run(
    model: Path, tmp_path: Path
) -> None:
    script = ["-m", "examples.trl_rollouts", "--model", str(model), "--engines", "1"]
    script += ["--checkpoints", str(tmp_path)]
    assert run_in_trls_python(*script, "--steps", "2")["steps"] == 2
    seen = run_in_trls_python(*script, "--steps", "4", "--resume", str(tmp_path / "checkpoint-2"))
    assert seen["steps"] == 4
    assert seen["versions"] == seen["run_version"] == 3  # the checkpoint's version and two more
    assert max(int(age) for age in seen["staleness"]) <= 1
    assert seen["ratios"][-2] == pytest.approx(1.0, abs=1e-3)  # sampled by the checkpoint's weights


def test_trls_synchronous_trainer_generates_and_syncs_by_the_server(model: Path) -> None:
    script = str(ROOT / "examples" / "trl_grpo_server.py")
    about: dict[str, Any] = {"weight_transfer": "gloo", "needs_control_token": False}
    with tidegate.vllm_server(model=model, **about) as server:
        asked = ("--model", str(model), "--server", server.url, "--group-port", str(free_port()))
        seen = run_in_trls_python(script, *asked, "--steps", "3")
        assert server.version == seen["updates"]
    assert seen["steps"] == 3
    assert seen["updates"] >= 2  # none before the first step, one before each later one
    assert max(seen["logprobs_differ"]) < 1e-3  # also after each update: the weights have arrived


def test_trls_own_tests_of_rollout_func_pass_with_a_run_in_place_of_their_mock(model: Path) -> None:
    seen = run_in_trls_python("-m", "tests.integrations.trl_dispatch", str(model))
    assert seen == {
        "prefers_rollout_func": None,  # no error
        "rollout_func_syncs_vllm_weights_when_needed": None,
        "rollout_func_raises_when_required_keys_are_missing": None,
    }


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_model(path)
    return path


ROLLOUT_FUNC = ("-m", "examples.trl_rollout_func", "--engines", "1", "--model")
QUICK = ("--prompts", "4", "--num-generations", "4", "--held-out", "16", "--tasks", "64")


def test_trls_grpo_trainer_learns_from_episodes_of_several_turns_whose_tokens_audit(
    warmed_up: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    script = (*ROLLOUT_FUNC, str(warmed_up), "--run-directory", str(run))
    seen = run_in_trls_python(*script, "--steps", "15")
    assert seen["steps"] == 15
    assert seen["version"] == 16  # before the first step, and after each
    assert seen["rollouts"] == 15 * 16 * 8
    assert seen["after"] > seen["before"] + 0.25
    assert seen["staleness"] == 0
    assert seen["evaluation_tokens"] > 0
    audited = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "audit", str(run)], capture_output=True, text=True
    )
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert f"{seen['rollouts'] + 2 * 256} of" in audited.stdout


MODES = {
    # options, and the versions of 2 optimizer steps between two evaluations
    "adapters": (["--lora", "--num-generations-eval", "4"], 3),
    "several-steps-on-a-generation": (["--iterations", "2"], 2),
    "several-generations-in-a-step": (["--accumulate", "2"], 5),
}


@pytest.mark.parametrize("mode", MODES)
def test_trls_grpo_trainer_runs_in_its_modes(warmed_up: Path, mode: str) -> None:
    options, versions = MODES[mode]
    seen = run_in_trls_python(*ROLLOUT_FUNC, str(warmed_up), *QUICK, "--steps", "2", *options)
    assert (seen["steps"], seen["version"]) == (2, versions)
    assert seen["staleness"] == 0


def test_two_processes_of_trls_grpo_trainer_share_the_run_of_the_first(warmed_up: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    port = ("--master-port", str(free_port()))
    one = run_in_trls_python(*ROLLOUT_FUNC, str(warmed_up), *QUICK, "--steps", "2")
    two = run_in_trls_python(*ranks, *port, *ROLLOUT_FUNC, str(warmed_up), *QUICK, "--steps", "2")
    assert two["rollouts"] == one["rollouts"] == 2 * 16
    assert two["rewards"][0] == one["rewards"][0]  # the same prompts, seeds and weights
    assert two["version"] == one["version"] == 3


def test_trls_grpo_trainer_continues_from_its_checkpoint(warmed_up: Path, tmp_path: Path) -> None:
    script = (*ROLLOUT_FUNC, str(warmed_up), *QUICK, "--checkpoints", str(tmp_path))
    assert run_in_trls_python(*script, "--no-evaluation", "--steps", "2")["steps"] == 2
    checkpoint = str(tmp_path / "checkpoint-2")
    seen = run_in_trls_python(*script, "--no-evaluation", "--steps", "4", "--resume", checkpoint)
    assert (seen["steps"], seen["version"]) == (4, 2)  # the checkpoint's weights, and one step's


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_trls_client_knows_the_server(server: tidegate.VLLMServer) -> None:
    script = str(Path(__file__).parent / "client_of_the_server.py")
    seen = run_in_trls_python(script, server.url, str(server.settings.model))
    assert seen == {
        "max_model_len": 1024,
        "dtype": "torch.float32",
        "world_size": 1,
        "has_lora": True,
        "frozen": True,
        "label_is_kept": True,  # whatever an earlier trainer set
        "missing_adapter": 404,
    }
