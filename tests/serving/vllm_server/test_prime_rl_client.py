"""prime-rl's own client, from a checkout of its repository, against the server.

    pip install tenacity loguru
    make test-prime-rl PRIME_RL=CHECKOUT

Tried with commit 559b44772. Only packages that it imports for types are stubbed: verifiers,
renderers and vLLM.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest

import tidegate
from examples import prime_rl_loop
from tests.models import make_model, make_model_directory
from tests.serving.vllm_server.vllm_serving import CONTEXT_TOKENS_MAX, PROMPT

CHECKOUT = os.environ.get("TIDEGATE_PRIME_RL", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not CHECKOUT, reason="TIDEGATE_PRIME_RL must name prime-rl's checkout"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's use
]

KEY = "TIDEGATE_TEST_PRIME_RL_KEY"

GENERATE_RESPONSE = "vllm.entrypoints.scale_out.token_in_token_out.protocol"


class GenerateResponse(msgspec.Struct):
    """Stub of vLLM's model of an answer: the one field that the client reads."""

    prompt_logprobs: list[dict[str, Any] | None] | None

    @staticmethod
    def model_validate_json(content: bytes) -> "GenerateResponse":
        return msgspec.json.decode(content, type=GenerateResponse)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """The module of prime-rl's client."""
    stubs: dict[str, dict[str, Any]] = {
        "verifiers": {},
        "verifiers.v1": {"ClientConfig": object},
        "verifiers.v1.configs": {},
        "verifiers.v1.configs.client": {"EvalClientConfig": object, "TrainClientConfig": object},
        "renderers": {"RendererConfig": object},
        "prime_rl.configs": {},
        "prime_rl.configs.shared": {"ClientConfig": object},
        **{GENERATE_RESPONSE.rsplit(".", n)[0]: {} for n in range(1, 5)},
        GENERATE_RESPONSE: {"GenerateResponse": GenerateResponse},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(CHECKOUT) / "src"))
        for name, fields in stubs.items():
            module = ModuleType(name)
            module.__dict__.update({"__path__": [], **fields})
            patch.setitem(sys.modules, name, module)
        sys.modules["verifiers"].v1 = sys.modules["verifiers.v1"]  # type: ignore[attr-defined]
        yield importlib.import_module("prime_rl.utils.client")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def server(model: Path, outputs: Path) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(
        model=model, served_model_name="tiny", weight_directories=[outputs]
    ) as server:
        yield server


@pytest.fixture
def admins(
    client: Any, server: tidegate.VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> list[httpx.AsyncClient]:
    monkeypatch.setenv(KEY, server.control_token or "")
    config = SimpleNamespace(
        base_url=f"{server.url}/v1",
        admin_base_url=None,
        headers={},
        headers_from_env={},
        api_key_var=KEY,
    )
    admins: list[httpx.AsyncClient] = client.setup_admin_clients(config)
    return admins


async def scores(client: Any, server: tidegate.VLLMServer, model: str = "tiny") -> list[float]:
    key = server.control_token
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as api:
        found: list[float] = await client.prefill_logprobs(api, model, PROMPT)
        return found


async def test_its_client_updates_weights_and_scores_under_them(
    client: Any, server: tidegate.VLLMServer, admins: list[Any], model: Path, outputs: Path
) -> None:
    import transformers

    vocab = transformers.AutoConfig.from_pretrained(model).vocab_size
    await client.check_health(admins, timeout=10)
    await client.maybe_check_has_model(admins, "tiny")
    with pytest.raises(ValueError, match="not found"):
        await client.maybe_check_has_model(admins, "other")
    await client.init_nccl_broadcast(admins, "127.0.0.1", 1, 5)  # skips what answers with 404
    before = await scores(client, server)
    assert before[0] == 0.0
    step = make_model_directory(
        outputs / "step_1", seed=5, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX
    )
    await client.update_weights(admins, step, step=1)
    after = await scores(client, server)
    assert len(after) == len(PROMPT)
    assert after[1:] != pytest.approx(before[1:], abs=1e-3)
    for admin in admins:
        assert (await admin.get("/liveness")).status_code == 200
        assert (await admin.get("/is_paused")).json() == {"is_paused": False}
        await admin.aclose()


@pytest.mark.usefixtures("client")
def test_the_example_learns_with_its_client() -> None:
    history = prime_rl_loop.main(["--steps", "16"])
    assert sum(history[-4:]) > sum(history[:4]) + 0.1


async def test_weights_change_under_requests_that_are_salted_by_version(
    client: Any, server: tidegate.VLLMServer, admins: list[Any], model: Path
) -> None:
    (admin,) = admins

    async def generate(salt: str) -> Any:
        sampling = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "cache_salt": salt}
        answer = await admin.post("/inference/v1/generate", json=body, timeout=60)
        return answer.json()["choices"][0]

    running = asyncio.create_task(generate("0"))
    while not (await admin.get("/load")).json()["server_load"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await client.update_weights(admins, model, step=2)
    choice = await running
    assert len(choice["token_ids"]) == 400
    assert len((await generate("1"))["token_ids"]) == 400
    await admin.aclose()


async def test_its_client_loads_an_adapter_of_one_name_at_each_step(
    client: Any, server: tidegate.VLLMServer, admins: list[Any], outputs: Path, model: Path
) -> None:
    import peft
    import transformers

    vocab = transformers.AutoConfig.from_pretrained(model).vocab_size
    for step in range(2):
        base = make_model(
            "qwen3", seed=0, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX
        )
        path = outputs / f"adapter_{step}"
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(str(path))
        await client.update_weights(admins, path, lora_name="policy", step=step)
        await client.maybe_check_has_model(admins, "policy")
    await client.unload_lora_adapter(admins, "policy")
    with pytest.raises(ValueError, match="not found"):
        await client.maybe_check_has_model(admins, "policy")
    for admin in admins:
        await admin.aclose()
