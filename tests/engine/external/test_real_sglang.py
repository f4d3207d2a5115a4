"""Runs over a real SGLang server; skipped without one.

``make test-sglang`` starts one in a Python of its own: SGLang has no CPU build, so its CUDA imports
are stubbed. Or use a running server on the same file system, whose weights may be replaced:

    TIDEGATE_SGLANG_URL=http://127.0.0.1:30000 TIDEGATE_SGLANG_MODEL=DIR make test-sglang
"""

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tidegate
from tests.engine.external.adapter_runs import train
from tests.engine.external.sglang_streams import TOLERANCE, Sglang, off_by
from tests.models import make_model_directory
from tests.orchestrator.trainer.test_external_loras import train as train_adapters
from tidegate.engine.external.sglang import make_adapter
from tidegate.errors import ConfigError
from tidegate.transport.messages import SamplingParams

URL = os.environ.get("TIDEGATE_SGLANG_URL", "")
MODEL = os.environ.get("TIDEGATE_SGLANG_MODEL", "")
PYTHON = os.environ.get("TIDEGATE_SGLANG_PYTHON", "")

KEY = "sesame"

STUBS = Path(__file__).parent / "sglang_on_a_cpu"

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON and not (URL and MODEL),
        reason="wants SGLang, in a Python of its own or as a server: make test-sglang",
    ),
    pytest.mark.timeout(900),  # 20 to 60 ms a token on a CPU
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL of the server, and the directory of its model."""
    if URL:
        yield URL, Path(MODEL)
        return
    directory = tmp_path_factory.mktemp("sglang")
    model = make_model_directory(directory / "model", tied=False)
    with pytest.MonkeyPatch.context() as patch, started(model, directory / "log") as url:
        patch.setenv("TIDEGATE_ENGINE_KEY", KEY)
        yield url, model


@contextmanager
def started(model: Path, log: Path, *more: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(STUBS)}
    options = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    options += ["--sampling-backend", "pytorch", "--skip-server-warmup"]
    # Of what is free as it starts: a tenth goes where others take memory meanwhile.
    options += ["--mem-fraction-static", "0.3", "--max-total-tokens", "8192"]
    options += ["--api-key", KEY]
    options += ["--disable-overlap-schedule"]  # or kv_policy="keep" would be refused
    options += more
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", "sglang.launch_server", *options],
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):  # pytest's own limit bounds it
            if process.poll() is not None:
                pytest.fail(f"SGLang ended: {log.read_text()[-2000:]}")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    """Turns of such different lengths that some are in flight whenever others make a batch."""
    episode.append(task)
    first = await episode.generate(max_tokens=20 + 40 * (task[3] % 3))
    episode.append([3, 4, 5])
    await episode.generate(max_tokens=20)
    return float(len(first.token_ids))


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
async def test_tags_are_right_over_sglang(
    server: tuple[str, Path], kv_policy: str, tmp_path: Path
) -> None:
    url, model = server
    report = await train(
        model,
        tmp_path / "run",
        batches=8,
        episode=solve,
        engine_urls=[f"sglang+{url}"],
        kv_policy=kv_policy,
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 2  # on a slow machine rollouts come in three waves
    assert report.version_power.unnoticed_share < 0.05


async def test_kv_that_is_kept_over_an_update_is_labelled_to_the_token(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, model = server
    other = make_model_directory(tmp_path / "other", seed=1, tied=False)
    adapter = make_adapter(url, model)
    try:
        capabilities = await adapter.open("v0")
        assert capabilities.keeps_kv  # started with --disable-overlap-schedule
        stream = Sglang(adapter, capabilities).stream(SamplingParams(max_tokens=450))
        await stream.has(10)
        await adapter.pause("keep")
        await adapter.load_weights(other, "v1")
        await adapter.resume()
        await stream.end()
    finally:
        await adapter.close()
    (_, _, before), (_, _, after) = stream.labels
    assert [label for label, _, _ in stream.labels] == ["v0", "v1"]
    assert off_by([model, other], stream, [(0, before), (1, after - before)]) < TOLERANCE


@pytest.mark.parametrize("way", ["http", "gloo"])
async def test_weights_come_without_files_and_the_next_token_is_of_them(
    server: tuple[str, Path], tmp_path: Path, way: str
) -> None:
    url, model = server
    other = make_model_directory(tmp_path / "other", seed=1, tied=False)
    adapter = make_adapter(url, model, weights=way)
    try:
        capabilities = await adapter.open("v0")
        engine = Sglang(adapter, capabilities)
        stream = engine.stream(SamplingParams(max_tokens=300))
        await stream.has(10)
        await adapter.pause("keep")
        await adapter.load_tensors(load_file(other / "model.safetensors"), "v1")
        await adapter.resume()
        await stream.end()
        fresh = await engine.stream(SamplingParams(max_tokens=8), salt="v1").end()
    finally:
        await adapter.close()
    (_, _, before), (_, _, after) = stream.labels
    assert [label for label, _, _ in [*stream.labels, *fresh.labels]] == ["v0", "v1", "v1"]
    assert off_by([model, other], stream, [(0, before), (1, after - before)]) < TOLERANCE
    assert off_by([model, other], fresh, [(1, 8)]) < TOLERANCE


async def test_tags_are_right_over_a_run_that_sends_weights_by_gloo(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, model = server
    report = await train(
        model,
        tmp_path / "run",
        batches=6,
        episode=solve,
        engine_urls=[f"sglang+{url}#weights=gloo"],
        kv_policy="recompute",
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 1
    assert not (tmp_path / "run" / "published").exists()


async def test_memory_is_released_and_resumed_in_the_order_that_its_scheduler_takes(
    server: tuple[str, Path],
) -> None:
    """Without a memory saver, which does not exist on a CPU, no memory is released."""
    url, model = server
    adapter = make_adapter(url, model)
    try:
        capabilities = await adapter.open("v0")
        assert capabilities.sleep_levels == set()
        stream = Sglang(adapter, capabilities).stream(SamplingParams(max_tokens=300))
        await stream.has(3)
        await adapter.pause("abort")
        await stream.end()
        await adapter.sleep(2, ["weights", "kv_cache"])
        await adapter.wake(["weights"])
        await adapter.load_weights(model, "v1")
        await adapter.wake(["kv_cache"])
        await adapter.resume()
        after = (
            await Sglang(adapter, capabilities)
            .stream(SamplingParams(max_tokens=8), salt="v1")
            .end()
        )
    finally:
        await adapter.close()
    assert after.labels == [("v1", 0, 8)]
    assert off_by([model], after, [(0, 8)]) < TOLERANCE


async def test_a_server_with_a_key_is_not_driven_without_it(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if URL:
        pytest.skip("the given server may need a key")
    url, model = server
    monkeypatch.delenv("TIDEGATE_ENGINE_KEY")
    adapter = make_adapter(url, model)
    try:
        with pytest.raises(ConfigError, match=r"requires a key.*TIDEGATE_ENGINE_KEY"):
            await adapter.open("v0")
    finally:
        await adapter.close()


LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"),
    *("--lora-backend", "torch_native"),  # the others' kernels are Triton's
)


async def test_each_token_is_of_the_lora_adapter_that_its_tag_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if URL:
        pytest.skip("the given server may take no adapters")
    monkeypatch.setenv("TIDEGATE_ENGINE_KEY", KEY)
    model = make_model_directory(tmp_path / "model", tied=False)
    with started(model, tmp_path / "log", *LORA) as url:
        report = await train_adapters(model, tmp_path / "run", f"sglang+{url}", kv_policy="keep")
    assert report.agrees, report.lines()
    assert (report.tokens_unreplayable, report.tokens_unknown) == (0, 0)
    assert report.versions >= 3
    assert report.version_power.unnoticed_share < 0.5
    assert not list((tmp_path / "run").rglob("tidegate-lora-*"))
