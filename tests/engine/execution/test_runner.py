from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from tests.engine.scheduling.driving import DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.execution.runner import DecodeRows, ModelRunner, Row, RowSampling
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import (
    Quantization,
    Weights,
    fill_from_directory,
    load_directory,
)
from tidegate.engine.sampling.options import RowOptions
from tidegate.kernels.layers import Layers
from tidegate.transport.sampling import SamplingParams

pytestmark = pytest.mark.slow

PROMPT = [5, 80, 17, 17, 3, 42, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(
        tmp_path_factory.mktemp("model"), "qwen3", vocab_size=24, initializer_range=0.1
    )


class MakeRunner(Protocol):
    def __call__(
        self, path: Path, *, num_blocks: int = 256, block_tokens: int = 4
    ) -> ModelRunner: ...


@pytest.fixture(params=["torch", "compiled"])
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    """Runners that compute with torch, and with compiled code."""

    def make(path: Path, *, num_blocks: int = 256, block_tokens: int = 4) -> ModelRunner:
        config = ModelConfig.from_directory(path)
        is_compiled = request.param == "compiled"
        packed = None if is_compiled else False
        weights = load_directory(path, config, torch.float32, is_packed=packed)
        native = native_for(config, torch.float32) if is_compiled else None
        if is_compiled and native is None:
            pytest.skip("no C++ compiler: engines compute by torch's code here")
        return ModelRunner(
            config, weights, num_blocks=num_blocks, block_tokens=block_tokens, native=native
        )

    return make


def make_turn(seed: int, *, chunk: int = 64) -> DrivenTurn:
    prompt = [token_id % 24 for token_id in PROMPT]
    return DrivenTurn(prompt, RowSampling(1.0, 0, 1.0, seed, 0), (chunk,))


def test_the_same_seed_samples_the_same_tokens_whatever_the_batch_and_the_chunks(
    model: Path, make_runner: MakeRunner
) -> None:
    alone = make_turn(seed=7)
    drive(make_runner(model), [alone], new_tokens=20)

    among_others = [make_turn(seed, chunk=1 + seed % 5) for seed in range(12)]
    drive(make_runner(model, block_tokens=16), among_others, new_tokens=20)

    assert among_others[7].sampled == alone.sampled
    assert among_others[7].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(turn.sampled) for turn in among_others}) == 12


def test_long_prompts_of_one_step_are_computed_as_each_alone_and_in_chunks(
    model: Path, make_runner: MakeRunner
) -> None:
    prompts = [np.arange(n, n + size, dtype=np.int32) % 24 for n, size in ((1, 150), (2, 201))]
    tables = [list(range(60)), list(range(60, 120))]
    greedy = RowSampling(0.0, 0, 1.0, 0, 0)
    together = make_runner(model).step(
        [Row(prompt, 0, table, greedy) for prompt, table in zip(prompts, tables, strict=True)]
    )
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        alone = make_runner(model).step([Row(prompt, 0, table, greedy)])
        chunked = make_runner(model)
        chunked.step([Row(prompt[:7], 0, table, None)])
        last = chunked.step([Row(prompt[7:], 7, table, greedy)])
        for output in (alone, last):
            assert output.token_ids.tolist() == [together.token_ids[number]]
            np.testing.assert_allclose(output.logprobs, together.logprobs[number], atol=1e-5)


def test_a_row_attends_to_blocks_that_rows_before_it_fill_in_the_same_step(
    model: Path, make_runner: MakeRunner
) -> None:
    prompt = np.array([n % 24 for n in range(5, 150)], np.int32)
    sampling = [RowSampling(1.0, 0, 1.0, seed, 0) for seed in range(5)]
    alone = [make_runner(model).step([Row(prompt, 0, list(range(37)), each)]) for each in sampling]

    own = [[*range(36), 36 + n] for n in range(5)]  # all but the last block are the first row's
    rows = [Row(prompt, 0, own[0], sampling[0])]
    rows += [Row(prompt[144:], 144, own[n], sampling[n]) for n in range(1, 5)]
    together = make_runner(model).step(rows)

    assert together.token_ids.tolist() == [int(one.token_ids[0]) for one in alone]
    assert together.logprobs.tolist() == pytest.approx(
        [float(one.logprobs[0]) for one in alone], abs=1e-4
    )


REPORTS: list[SamplingParams | None] = [
    SamplingParams(max_tokens=9, top_logprobs=3, kept_tokens=True),
    None,
    SamplingParams(max_tokens=9, min_p=0.05, raw_logprobs=True),
]


@pytest.mark.parametrize("reports", [[None] * 3, REPORTS], ids=["plain", "reporting"])
@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization", "is_tied"),
    [
        ("qwen3", torch.float32, None, True),
        ("qwen2", torch.float32, None, False),
        ("mistral", torch.bfloat16, None, False),
        ("qwen3", torch.bfloat16, "int8", True),
        ("gemma3_text", torch.float32, None, True),
        ("gemma3_text", torch.bfloat16, None, True),
    ],
)
def test_decodes_by_columns_are_one_call_and_have_the_bits_of_decodes_by_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
    reports: list[SamplingParams | None],
    *,
    is_tied: bool,
) -> None:
    fields: dict[str, Any] = {"initializer_range": 0.1}
    if architecture == "gemma3_text":
        fields["final_logit_softcapping"] = None  # caps are torch's, so such a step is not one call
    path = make_model_directory(tmp_path, architecture, tied=is_tied, **fields)
    config = ModelConfig.from_directory(path)
    native = native_for(config, dtype)
    if native is None:
        pytest.skip("no C++ compiler: engines compute by torch's code here")
    weights = Weights.allocate(config, dtype, is_packed=True, quantization=quantization)
    fill_from_directory(weights, path)
    runner = ModelRunner(config, weights, num_blocks=32, block_tokens=4, native=native)
    prompts = [[5, 80, 17], [*range(20, 29)], [7] * 6]
    tables = [[3, 9], [1, 4, 2, 8], [30, 11, 12]]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.step([Row(np.array(prompt, np.int32), 0, table, None)])
    options = [
        None if asked is None else RowOptions(asked, np.array(prompt, np.int32), len(prompt))
        for asked, prompt in zip(reports, prompts, strict=True)
    ]
    rows = [
        Row(np.array([token], np.int32), len(prompt), table, RowSampling(*each, 2**63, 5, own))
        for token, prompt, table, each, own in zip(
            (4, 5, 6),
            prompts,
            tables,
            ((1.0, 0, 0.5), (0.0, 0, 1.0), (0.7, 3, 1.0)),
            options,
            strict=True,
        )
    ]
    called: list[int] = []
    decode = Layers.decode

    def counted(layers: Layers, *given: Any) -> Any:
        called.append(len(called))
        return decode(layers, *given)

    monkeypatch.setattr(Layers, "decode", counted)
    columns = DecodeRows(rows)
    for step in range(2):
        by_rows = runner.step(list(columns))
        assert len(called) == step
        by_columns = runner.step(columns)
        assert len(called) == step + 1
        assert by_columns.token_ids.tolist() == by_rows.token_ids.tolist()
        assert by_columns.logprobs.tobytes() == by_rows.logprobs.tobytes()
        assert by_columns.attachments == by_rows.attachments
        assert len(by_columns.attachments) == len([each for each in reports if each is not None])
        columns.advance(by_columns.token_ids)


def test_rows_in_mid_prefill_sample_nothing_and_the_others_keep_their_order(
    model: Path, make_runner: MakeRunner
) -> None:
    runner = make_runner(model)
    prompt = np.array(PROMPT, np.int32) % 24
    greedy = RowSampling(0.0, 0, 1.0, 0, 0)

    def step(*samplings: RowSampling | None) -> list[int]:
        # The longer its row, the later a row is computed; outputs keep the order all the same.
        rows = [
            Row(prompt[:length], 0, [2 * n, 2 * n + 1], sampling)
            for n, (length, sampling) in enumerate(zip((7, 1, 4), samplings, strict=True))
        ]
        return [int(token_id) for token_id in runner.step(rows).token_ids]

    everyone = step(greedy, greedy, greedy)

    assert len(set(everyone)) > 1
    assert step(greedy, None, greedy) == [everyone[0], everyone[2]]
    assert step(None, greedy, None) == [everyone[1]]
    assert step(None, None, None) == []
    assert runner.step([]).token_ids.tolist() == []
