"""SkyRL's Tinker server trains a LoRA adapter with jax, and Tidegate samples from it.

    # In a Python with Tidegate; SkyRL sends no control token, and its key is "EMPTY":
    tidegate serve --model DIR --port 8000 --lora-directory LORAS
    # In one with skyrl[tinker,jax]==0.3.0 and tinker<0.25, the last SDK that reads its answers:
    python examples/skyrl_tinker_server.py --model DIR --engine http://127.0.0.1:8000 --loras LORAS

Starts SkyRL's API server with `--external-inference-url`, and trains over the tinker SDK. At each
step SkyRL saves the adapter, unpacks it below `--loras` when it is first sampled from, and names
its directory as the model of `/v1/completions`. The reward is the share of small letters. The
base model's weights do not change: both processes read the same directory.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tokenizers import Tokenizer

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
KEY = "tml-none"
"""The SDK requires a key of this form; SkyRL's server reads none."""

UV = """#!/bin/sh
# Stands in for `uv run`, by which SkyRL's server starts its engine from a checkout of SkyRL.
while [ "$1" != -m ]; do shift; done
"{python}" "$@"
"""


@contextlib.contextmanager
def tinker_server(model: Path, engine_url: str, loras: Path) -> Iterator[str]:
    """Run SkyRL's server on a free port until the end of the `with`; yield its URL."""
    with (
        tempfile.TemporaryDirectory(dir=loras.parent) as folder,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        uv = Path(folder) / "uv"
        uv.write_text(UV.format(python=sys.executable))
        uv.chmod(0o755)
        command = [str(uv), "run", "python", "-m", "skyrl.tinker.api", "--port", str(port)]
        command += ["--host", "127.0.0.1", "--base-model", str(model), "--backend", "jax"]
        command += ["--backend-config", '{"max_lora_adapters": 2, "max_lora_rank": 8}']
        command += ["--external-inference-url", engine_url]
        command += ["--external-inference-lora-base", str(loras)]
        command += ["--checkpoints-base", f"{folder}/checkpoints"]
        command += ["--database-url", f"sqlite:///{folder}/tinker.db"]
        # SkyRL renames the unpacked adapter from TMPDIR, which must be of the same file system.
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": folder}
        # Of a small model's time compilation is the most.
        environment.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        free.close()
        # Its log is no part of this program's report.
        process = subprocess.Popen(
            command, env=environment, stdout=sys.stderr, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, f"{url}/api/v1/healthz")
            yield url
        finally:
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End the server, its engine and both stand-ins, and wait for them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until the server answers; raise RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"SkyRL's server does not answer at {url}; its log above says why")


def samples_of(sampler: Any, prompt: list[int], options: argparse.Namespace) -> list[Any]:
    """Sample continuations of the prompt, with log-probs."""
    params = types.SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=1)
    model_input = types.ModelInput.from_ints(prompt)
    sequences: list[Any] = sampler.sample(model_input, options.samples, params).result().sequences
    return sequences


def datum(prompt: list[int], sample: Any, advantage: float) -> types.Datum:
    """Return a sequence whose loss is that of the sampled tokens, each with this advantage."""
    tokens, unsampled = [*prompt, *sample.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * unsampled + [1.0] * len(sample.tokens),
        "logprobs": [0.0] * unsampled + list(sample.logprobs),
        "advantages": [0.0] * unsampled + [advantage] * len(sample.tokens),
    }
    kinds = {name: "int64" if name == "target_tokens" else "float32" for name in inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: types.TensorData(data=values, dtype=kinds[name], shape=[len(values)])
            for name, values in inputs.items()
        },
    )


def train(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train an adapter for some steps, and return what was sampled at each."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompt: list[int] = tokenizer.encode("The sea was", add_special_tokens=False).ids
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    # SkyRL 0.3 trains neither embedding nor head, whatever train_unembed says.
    trainer = service.create_lora_training_client(str(options.model), rank=4, seed=0)
    base = samples_of(
        service.create_sampling_client(base_model=str(options.model)), prompt, options
    )
    steps = []
    for number in range(options.steps):
        name = f"step-{number}"
        path = trainer.save_weights_for_sampler(name).result().path
        samples = samples_of(trainer.create_sampling_client(path), prompt, options)
        texts = [tokenizer.decode(sample.tokens) for sample in samples]
        rewards = [sum(map(str.islower, text)) / max(len(text), 1) for text in texts]
        mean = sum(rewards) / len(rewards)
        data = [datum(prompt, s, r - mean) for s, r in zip(samples, rewards, strict=True)]
        done = trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(types.AdamParams(learning_rate=options.learning_rate)).result()
        # Log-probs by the trainer's own forward pass, and the sampler's.
        differences = [
            abs(ours - theirs)
            for output, sample in zip(done.loss_fn_outputs, samples, strict=True)
            for ours, theirs in zip(
                output["logprobs"].data[len(prompt) - 1 :], sample.logprobs, strict=True
            )
        ]
        steps.append(
            {
                "path": path,
                "samples": [{"tokens": s.tokens, "logprobs": s.logprobs} for s in samples],
                "mean_reward": mean,
                "max_difference": max(differences),
            }
        )
        print(f"step {number}: reward {mean:.3f}, log-probs differ by {max(differences):.1e}")
    return {
        "prompt": prompt,
        "base": [{"tokens": s.tokens, "logprobs": s.logprobs} for s in base],
        "steps": steps,
    }


def main() -> None:
    """Train with the options of the command line; the last line is a report in JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="its directory, as served")
    parser.add_argument("--engine", required=True, help="URL of `tidegate serve`")
    parser.add_argument("--loras", type=Path, required=True, help="its --lora-directory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-2)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that SkyRL's server ends, too
    with tinker_server(options.model, options.engine, options.loras) as url:
        report = train(url, options)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
