"""Effects of logits processors on a turn, and failing processors."""

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from tests.models import EOS_TOKEN_ID, make_model_directory
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling import grammar
from tidegate.engine.sampling.grammar import GIVEN_UP_MAX, MaskThread
from tidegate.engine.sampling.logits import ProcessorSetup, TurnTokens
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.processors import ProcessorRegistry
from tidegate.engine.scheduling.scheduler import EngineScheduler, StepColumns
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import ConfigError, TurnRefused
from tidegate.kernels.layers import DecodeColumns, Layers
from tidegate.kernels.native import Native, native
from tidegate.transport import messages
from tidegate.transport.messages import LENGTH, RUNNING, STOP, SubmitTurn
from tidegate.transport.sampling import LogitsProcessor, SamplingParams, TokenBias

pytestmark = pytest.mark.wire

VOCAB = 96

TIMEOUT_S = 120.0
"""Seconds after which a missing grammar fails the test."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("processors") / "model")


@pytest.fixture
def bad_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable modules that define no valid processors."""
    (tmp_path / "clashing_processors.py").write_text("PROCESSORS = {'allowed_tokens': print}")
    (tmp_path / "empty_processors.py").write_text("")
    (tmp_path / "odd_processors.py").write_text("PROCESSORS = ['once']")
    monkeypatch.syspath_prepend(tmp_path)


class Engine:
    """Scheduler and runner of a real model, without a wire."""

    def __init__(
        self, model: Path, modules: Sequence[str] = (), compiled: Native | None = None
    ) -> None:
        self.directory = model
        config = ModelConfig.from_directory(model)
        weights = load_directory(model, config, torch.float32)
        limits = EngineLimits(
            max_running_turns=8,
            max_step_tokens=32,
            num_blocks=64,
            block_tokens=16,
            context_tokens_max=256,
            vocab_size=VOCAB,
        )
        self.options = OptionReader(
            vocab_size=VOCAB,
            max_running_turns=8,
            tokenizer=ModelTokenizer(model),
            registry=ProcessorRegistry(modules),
        )
        self.scheduler = EngineScheduler(limits, options=self.options)
        self.runner = ModelRunner(config, weights, num_blocks=64, native=compiled)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finish: dict[int, int] = {}
        self.top_ids: dict[int, list[bytes]] = {}
        self.attachments: dict[tuple[int, str], list[float]] = {}
        """Values of all tokens, by turn and name."""

    def submit(
        self, turn: int, prompt: list[int], *processors: LogitsProcessor, **requested: Any
    ) -> None:
        sampling = SamplingParams(
            **({"max_tokens": 12, "seed": turn} | requested),
            logits_processors=[processor.to_str() for processor in processors],
        )
        token_ids = np.array(prompt, "<i4").tobytes()
        self.admit(SubmitTurn(turn=turn, token_ids=token_ids, sampling=sampling))
        self.tokens[turn], self.finish[turn] = [], RUNNING
        self.logprobs[turn], self.top_ids[turn] = [], []

    def admit(self, message: SubmitTurn) -> None:
        """Submit a turn whose grammars are compiled, so that it is queued or refused at once."""
        compiled = self.options.prepare(message)
        futures.wait(compiled, timeout=TIMEOUT_S)
        self.scheduler.submit(message)

    def run(self) -> dict[int, str]:
        """Run until no turn is left; return the refusals."""
        while rows := self.scheduler.plan():
            columns = self.scheduler.complete(self.runner.step(rows))
            if columns is not None:
                self._take(columns)
        answers = self.scheduler.take_replies()
        assert all(isinstance(answer, messages.TurnFailed) for answer in answers)
        return {a.turn: a.message for a in answers if isinstance(a, messages.TurnFailed)}

    def _take(self, columns: StepColumns) -> None:
        handles = np.frombuffer(columns.turns, "<u4").tolist()
        ids, logprobs = (
            np.frombuffer(columns.token_ids, "<i4").tolist(),
            np.frombuffer(columns.logprobs, "<f4").tolist(),
        )
        finish = columns.finish or bytes(len(handles))
        for handle, token_id, logprob, code in zip(handles, ids, logprobs, finish, strict=True):
            self.tokens[handle].append(token_id)
            self.logprobs[handle].append(logprob)
            self.finish[handle] = code
        for attachment in columns.attachments:
            if attachment.name == "top_ids":
                self.top_ids[attachment.turn].append(attachment.values)
            dtype = {"int32": "<i4", "float32": "<f4"}[attachment.dtype]
            self.attachments.setdefault((attachment.turn, attachment.name), []).extend(
                np.frombuffer(attachment.values, dtype).tolist()
            )


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(model, ["tests.engine.sampling.own_processors"])
    yield engine
    engine.options.close()


@pytest.fixture(params=["torch", "compiled"])
def either_engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Engine without and with compiled code."""
    compiled = native(torch.float32) if request.param == "compiled" else None
    engine = Engine(model, compiled=compiled)
    yield engine
    engine.options.close()


def test_edits_and_stop_strings_are_the_same_in_one_compiled_call_as_in_torch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    functions = native(torch.float32)
    if functions is None:
        pytest.skip("no C++ compiler: engines compute by torch's code here")
    called: list[int] = []
    decode = Layers.decode

    def counted(layers: Layers, columns: DecodeColumns, *given: Any) -> Any:
        called.append(len(columns.token_ids))
        return decode(layers, columns, *given)

    monkeypatch.setattr(Layers, "decode", counted)
    written = []
    for compiled in (None, functions):
        engine = Engine(model, compiled=compiled)
        schema = LogitsProcessor("json_schema", {"schema": SCHEMA})
        requested: dict[str, Any] = {"stop_token_ids": [EOS_TOKEN_ID], "max_tokens": 30}
        engine.submit(1, [5, 6], schema, top_logprobs=3, raw_logprobs=True, **requested)
        engine.submit(2, [5, 7], schema, top_p=0.9, kept_tokens=True, **requested)
        engine.submit(3, [5, 8], LogitsProcessor("disallowed_tokens", {"token_ids": [7]}))
        engine.submit(4, [5, 9], stop_strings=["no such text"])
        penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        biases = {"logit_bias": [TokenBias(9, 4.0), TokenBias(8, 3.0)]}
        ends = {"min_tokens": 8, "stop_token_ids": [8], "temperature": 0.3}
        engine.submit(5, [5, 9, 9], **penalties, **biases, **ends, raw_logprobs=True)
        assert engine.run() == {}
        written.append((engine.tokens, engine.finish, engine.attachments, engine.logprobs))
        engine.options.close()
    torchs, compileds = written
    assert called.count(5) > 5
    assert 8 < len(compileds[0][5]) < 12
    assert torchs[:2] == compileds[:2]
    assert torchs[2].keys() == compileds[2].keys()
    for (turn, name), values in torchs[2].items():
        if name != "top_ids":  # excluded tokens come in any order
            np.testing.assert_allclose(compileds[2][turn, name], values, atol=1e-5)
    for turn, logprobs in torchs[3].items():
        np.testing.assert_allclose(compileds[3][turn], logprobs, atol=1e-5)


def test_a_mask_that_leaves_nothing_ends_its_turn_and_no_other(either_engine: Engine) -> None:
    engine = either_engine
    engine.submit(
        1,
        [5, 6],
        LogitsProcessor("allowed_tokens", {"token_ids": [7]}),
        LogitsProcessor("disallowed_tokens", {"token_ids": [7, 8]}),
    )
    only_stop = LogitsProcessor("allowed_tokens", {"token_ids": [9]})
    engine.submit(2, [5, 6], only_stop, stop_token_ids=[9], min_tokens=3)
    engine.submit(3, [5, 6], top_logprobs=1)
    reason = "after 0 tokens the logits processors {} leave nothing to sample: the largest logit is"
    assert {turn: why[: why.index(" -inf")] for turn, why in engine.run().items()} == {
        1: reason.format("allowed_tokens, disallowed_tokens"),
        2: reason.format("allowed_tokens"),
    }
    assert len(engine.tokens[3]) == 12


def test_a_stop_string_ends_a_turn_that_decodes_beside_others(either_engine: Engine) -> None:
    engine = either_engine
    forced = LogitsProcessor("json_schema", {"schema": {"const": "abcabcabcabcabc"}})
    requested: dict[str, Any] = {"stop_token_ids": [EOS_TOKEN_ID], "max_tokens": 40}
    engine.submit(1, [5, 6], forced, stop_strings=["bcab"], **requested)
    engine.submit(2, [5, 6], forced, **requested)
    assert engine.run() == {}
    decode = ModelTokenizer(engine.directory).get().decode
    assert decode(engine.tokens[1]).endswith("bcab")
    assert decode(engine.tokens[2]).startswith('"abcabcabcabcabc"')
    assert (engine.finish[1], engine.finish[2]) == (STOP, STOP)


def test_only_allowed_tokens_are_sampled_and_never_a_disallowed_one(
    either_engine: Engine,
) -> None:
    engine = either_engine
    engine.submit(1, [5, 6], LogitsProcessor("allowed_tokens", {"token_ids": [7, 8, 9]}))
    engine.submit(2, [5, 6], LogitsProcessor("disallowed_tokens", {"token_ids": list(range(90))}))
    engine.submit(3, [5, 6], LogitsProcessor("allowed_tokens", {"token_ids": [7]}))
    assert engine.run() == {}
    assert {*engine.tokens[1]} <= {7, 8, 9}
    assert {*engine.tokens[2]} <= {*range(90, 96)}
    assert (engine.tokens[3], engine.logprobs[3]) == ([7] * 12, [0.0] * 12)


def test_a_temperature_schedule_is_the_temperature_it_names_at_each_token() -> None:
    schedule = LogitsProcessor(
        "temperature_schedule", {"initial": 2.0, "final": 0.5, "warmup_tokens": 3}
    )
    setup = ProcessorSetup(VOCAB, (), ModelTokenizer(None))
    name, processor = ProcessorRegistry().make(schedule.to_str(), setup)
    assert name == "temperature_schedule"
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    for index, temperature in enumerate((2.0, 1.5, 1.0, 0.5, 0.5)):
        edited = logits.clone()
        processor(edited, TurnTokens(np.zeros(2, np.int32), np.zeros(index, np.int32)))
        expected = torch.log_softmax(logits / temperature, -1)
        assert torch.allclose(torch.log_softmax(edited, -1), expected, atol=1e-5)


def test_bad_words_are_the_token_sequences_that_vllm_bans(tmp_path: Path) -> None:
    letters = ["a", "b", " ", " a", "c"]
    model = models.BPE(vocab={each: n for n, each in enumerate(letters)}, merges=[(" ", "a")])
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    setup = ProcessorSetup(VOCAB, (), ModelTokenizer(tmp_path))

    def banned(words: list[str], *output: int) -> list[int]:
        spec = LogitsProcessor("bad_words", {"words": words}).to_str()
        _, processor = ProcessorRegistry().make(spec, setup)
        logits = torch.zeros(VOCAB)
        processor(logits, TurnTokens(np.zeros(2, np.int32), np.array(output, np.int32)))
        found: list[int] = logits.isinf().nonzero().flatten().tolist()
        return found

    assert banned(["a"]) == [0, 3]  # " a" is one other token
    assert banned(["b"]) == [1]  # " b" is two
    assert banned(["ab"]) == []
    assert banned(["ab"], 4, 0) == banned(["ab"], 4, 3) == [1]
    assert banned(["ab"], 0, 4) == []
    assert banned([" acb", "c"], 0, 4) == [1, 4]
    for words, reported in [
        ([], "got 0"),
        ([""], "got ''"),
        (["b"] * 129, "1 to 128 .* got 129"),
        (["b" * 1001], "at most 1000 .* got 1001"),
    ]:
        with pytest.raises(TurnRefused, match=reported):
            banned(words)


def test_a_users_own_processor_sees_prompt_and_output_and_edits_its_row_only(
    engine: Engine,
) -> None:
    engine.submit(1, [5, 6], LogitsProcessor("once"), max_tokens=40)
    engine.submit(2, [5, 6], max_tokens=40)
    engine.submit(3, [5, 6], LogitsProcessor("nosy"))
    refused = engine.run()
    assert len({*engine.tokens[1]}) == 40
    a, b = engine.tokens[3]
    seen = [([5, 6], [], 96), ([5, 6], [a], 96), ([5, 6], [a, b], 96)]
    assert refused == {3: f"logits processor 'nosy' failed after 2 tokens: RuntimeError: {seen!r}"}


def test_a_processor_that_raises_ends_its_turn_and_no_other(engine: Engine) -> None:
    engine.submit(1, [5, 6], max_tokens=8)
    engine.run()
    undisturbed = engine.tokens[1]
    engine.submit(1, [5, 6], max_tokens=8)
    engine.submit(2, [5, 6], LogitsProcessor("raising", {"after": 0}))
    engine.submit(3, [5, 6, 7], LogitsProcessor("raising", {"after": 3}), top_logprobs=1)
    engine.submit(4, [5, 6], top_logprobs=1, max_tokens=8)
    engine.submit(5, [5, 6, 8], LogitsProcessor("raising", {"after": 1, "by": "exit"}))
    assert engine.run() == {
        5: "logits processor 'raising' failed after 1 tokens: SystemExit: what a pity",
        2: "logits processor 'raising' failed after 0 tokens: RuntimeError: what a pity",
        3: "logits processor 'raising' failed after 3 tokens: RuntimeError: what a pity",
    }
    assert engine.tokens[1] == undisturbed
    assert [len(engine.tokens[turn]) for turn in (1, 2, 3, 4)] == [8, 0, 3, 8]
    assert [len(engine.top_ids[turn]) for turn in (1, 2, 3, 4)] == [0, 0, 3, 8]
    assert engine.scheduler.free_blocks == 64
    assert engine.scheduler.handles == []


@pytest.mark.parametrize("peak", ["-inf", "inf", "nan"])
def test_a_turn_without_an_allowed_token_fails_with_the_reason(engine: Engine, peak: str) -> None:
    engine.submit(1, [5, 6], LogitsProcessor("silencing", {"after": 2, "with": peak}))
    engine.submit(2, [5, 6], max_tokens=4)
    [message] = engine.run().values()
    assert message.startswith("after 2 tokens the logits processors silencing leave nothing to")
    assert f"largest logit is {peak};" in message
    assert (engine.finish[1], engine.finish[2]) == (RUNNING, LENGTH)


ARGUMENTS = [
    ("allowed_tokens", {"token_ids": []}, "token_ids is empty"),
    ("allowed_tokens", {"token_ids": [96]}, r"token 96, and the model's vocabulary is \[0, 96\)"),
    ("allowed_tokens", {"token_ids": ["a"]}, "Expected `int`, got `str`"),
    ("allowed_tokens", {"ids": [1]}, "unknown field `ids`"),
    ("disallowed_tokens", {"token_ids": list(range(96))}, "of the vocabulary, so none is left"),
    ("temperature_schedule", {"initial": 1, "final": 0, "warmup_tokens": 4}, "got 0"),
    ("temperature_schedule", {"initial": 1, "final": 1, "warmup_tokens": 0}, "at least 1, got 0"),
    ("json_schema", {"schema": {"type": "nonsense"}}, "json_schema"),
    ("grammar", {"lark": "start: :"}, "grammar"),
    ("raise", {}, "unknown logits processor 'raise'; this engine has allowed_tokens, bad_words"),
]


@pytest.mark.parametrize(("name", "arguments", "reported"), ARGUMENTS)
def test_invalid_processor_arguments_refuse_the_turn(
    engine: Engine, name: str, arguments: dict[str, Any], reported: str
) -> None:
    with pytest.raises(TurnRefused, match=reported):
        engine.submit(1, [5], LogitsProcessor(name, arguments), stop_token_ids=[EOS_TOKEN_ID])
    assert engine.scheduler.handles == []


def test_an_unparsable_processor_refuses_the_turn(engine: Engine) -> None:
    for text in ("", "[]", '{"name": 3}', "[" * 100_000):
        sampling = SamplingParams(max_tokens=1, logits_processors=[text])
        with pytest.raises(TurnRefused, match=r"is no processor .*; write it as \{"):
            engine.scheduler.submit(SubmitTurn(turn=1, token_ids=bytes(4), sampling=sampling))


def test_a_processor_travels_as_json_whose_keys_keep_their_order() -> None:
    one = LogitsProcessor("allowed_tokens", {"b": [1, 2.5], "a": {"y": None, "x": "é"}})
    reported = '{"name":"allowed_tokens","arguments":{"b":[1,2.5],"a":{"y":null,"x":"é"}}}'
    assert one.to_str() == reported
    assert LogitsProcessor.from_str(reported).to_str() == reported
    assert LogitsProcessor.from_str(one.to_str()) == one
    assert LogitsProcessor.from_str('{"name": "x"}') == LogitsProcessor("x")
    with pytest.raises(ConfigError, match="'x' can't be written as JSON"):
        LogitsProcessor("x", {"set": object()}).to_str()
    with pytest.raises(ConfigError, match="'x' can't be written as JSON: Out of range"):
        LogitsProcessor("x", {"bias": [math.nan]}).to_str()


def test_a_schemas_properties_are_written_in_its_order(engine: Engine, model: Path) -> None:
    pytest.importorskip("llguidance")
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {
        "type": "object",
        "properties": {"why": number, "answer": number},
        "required": ["why", "answer"],
        "additionalProperties": False,
    }
    processor = LogitsProcessor("json_schema", {"schema": schema})
    engine.submit(0, [5, 6], processor, max_tokens=60, stop_token_ids=[EOS_TOKEN_ID])
    engine.run()
    text = ModelTokenizer(model).get().decode(engine.tokens[0][:-1])
    assert list(json.loads(text)) == ["why", "answer"]


def test_a_grammar_too_deep_or_too_large_refuses_its_turn_and_no_process_ends(
    engine: Engine,
) -> None:
    pytest.importorskip("llguidance")

    def chain(rules: int) -> LogitsProcessor:
        names = [f'a{i}: "x" a{i + 1}' for i in range(rules)]
        return LogitsProcessor(
            "grammar", {"lark": "\n".join(["start: a0", *names, f'a{rules}: "y"'])}
        )

    engine.submit(0, [5], chain(3200), max_tokens=2, stop_token_ids=[EOS_TOKEN_ID])
    engine.run()
    assert len(engine.tokens[0]) == 2
    with pytest.raises(TurnRefused, match="bytes, and the limit is 65536"):
        engine.submit(1, [5], chain(5000), max_tokens=2, stop_token_ids=[EOS_TOKEN_ID])


def chained_terminals(count: int) -> LogitsProcessor:
    """Return a grammar that llguidance compiles in cubic time."""
    lines = [f'T{i}: T{i + 1} | "x{i}"' for i in range(count)]
    return LogitsProcessor("grammar", {"lark": "\n".join(["start: T0", *lines, f'T{count}: "y"'])})


COSTLY = {
    "49 KB of chained terminals": chained_terminals(2500),
    "1,500 pattern properties": LogitsProcessor(
        "json_schema",
        {"schema": {"patternProperties": {f"^p{i}_[a-z]*$": True for i in range(1500)}}},
    ),
    "gigabytes for 43 bytes": LogitsProcessor(
        "json_schema", {"schema": {"type": "integer", "multipleOf": 100_000_007}}
    ),
}


@pytest.mark.parametrize("processor", COSTLY.values(), ids=COSTLY)
def test_a_grammar_that_costs_too_much_to_compile_refuses_its_turn_and_the_next_is_compiled(
    processor: LogitsProcessor, engine: Engine
) -> None:
    pytest.importorskip("llguidance")
    requested = {"max_tokens": 2, "stop_token_ids": [EOS_TOKEN_ID]}
    for turn in range(2):  # the second time from memory
        with pytest.raises(TurnRefused, match=r"compilation took more than .* constrain less of"):
            engine.submit(turn, [5], processor, **requested)
    engine.submit(3, [5], LogitsProcessor("json_schema", {"schema": SCHEMA}), **requested)
    engine.run()
    assert len(engine.tokens[3]) == 2


def ambiguous(rules: int) -> LogitsProcessor:
    """Return a grammar whose mask takes the longer the more rules it has, after one token."""
    alternatives = " | ".join(["/[a-z]?/ s /[ -~]?/"] * rules)
    return LogitsProcessor("grammar", {"lark": f"start: /[ -~]/ s*\ns: {alternatives}"})


def test_a_grammar_whose_masks_take_too_long_ends_its_turn_and_no_other(
    either_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = either_engine
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "MASK_WALL_S", 0.02)
    found, compute = threading.Event(), MaskThread.compute

    def compute_for_long(self: MaskThread, work: Callable[[], bool]) -> bool:
        return compute(self, lambda: (work(), found.wait(TIMEOUT_S))[0])

    monkeypatch.setattr(MaskThread, "compute", compute_for_long)
    requested = {"max_tokens": 4, "stop_token_ids": [EOS_TOKEN_ID]}
    for turn in range(GIVEN_UP_MAX + 1):
        engine.submit(turn, [5], ambiguous(900), **requested)
    engine.submit(9, [5, 6], LogitsProcessor("json_schema", {"schema": SCHEMA}), **requested)
    refused = engine.run()
    found.set()
    assert sorted(refused) == list(range(GIVEN_UP_MAX + 1))
    for turn in range(GIVEN_UP_MAX):
        assert "not found within 0.02 s" in refused[turn]
    assert "still worked on; try again" in refused[GIVEN_UP_MAX]
    assert len(engine.tokens[9]) == 4


def test_a_turn_that_waits_for_its_grammar_can_be_cancelled_and_holds_up_no_other(
    engine: Engine,
) -> None:
    pytest.importorskip("llguidance")
    sampling = SamplingParams(
        max_tokens=2,
        stop_token_ids=[EOS_TOKEN_ID],
        logits_processors=[COSTLY["49 KB of chained terminals"].to_str()],
    )
    token_ids = np.array([5], "<i4").tobytes()
    for turn in (1, 2):
        message = SubmitTurn(turn=turn, token_ids=token_ids, sampling=sampling)
        engine.scheduler.submit(message)
    with pytest.raises(TurnRefused, match="turn handle 2 belongs to a turn that has not ended"):
        engine.scheduler.submit(message)
    engine.submit(3, [5, 6], max_tokens=4)
    assert engine.run() == {}
    assert len(engine.tokens[3]) == 4
    assert engine.scheduler.handles == [1, 2]
    engine.scheduler.cancel(1)
    ended = engine.scheduler.take_ended()
    assert ended is not None
    assert np.frombuffer(ended.turns, "<u4").tolist() == [1]
    futures.wait(engine.options.prepare(message), timeout=TIMEOUT_S)
    refused = engine.run()
    assert list(refused) == [2]
    assert "compilation took more than" in refused[2]


@pytest.mark.usefixtures("bad_modules")
@pytest.mark.parametrize(
    ("module", "reported"),
    [
        ("no_such_module", "module 'no_such_module': ModuleNotFoundError"),
        ("empty_processors", "has no attribute 'PROCESSORS'; the module must be importable"),
        ("odd_processors", r"PROCESSORS must map names to functions, got \['once'\]"),
        ("clashing_processors", "has a processor 'allowed_tokens', a name already used"),
    ],
)
def test_a_module_without_processors_is_refused_at_the_start(module: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        ProcessorRegistry([module])


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def test_a_json_schema_makes_every_turn_end_as_json_that_fits(engine: Engine, model: Path) -> None:
    pytest.importorskip("llguidance")
    processor = LogitsProcessor("json_schema", {"schema": SCHEMA})
    for turn in range(6):
        engine.submit(turn, [5, 6], processor, max_tokens=60, stop_token_ids=[EOS_TOKEN_ID])
    assert engine.run() == {}
    tokenizer = ModelTokenizer(model).get()
    said = set()
    for turn in range(6):
        assert (engine.finish[turn], engine.tokens[turn][-1]) == (STOP, EOS_TOKEN_ID)
        text = tokenizer.decode(engine.tokens[turn][:-1])
        value = json.loads(text)
        assert value.keys() == {"n", "ok"}
        assert 0 <= value["n"] <= 99
        assert isinstance(value["ok"], bool)
        said.add(text)
    assert len(said) > 1


def test_a_model_that_prefers_spaces_still_ends_its_json(engine: Engine, model: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizer = ModelTokenizer(model).get()
    (space,) = tokenizer.encode(" ", add_special_tokens=False).ids
    engine.submit(
        0,
        [5, 6],
        LogitsProcessor("json_schema", {"schema": SCHEMA}),
        max_tokens=240,
        stop_token_ids=[EOS_TOKEN_ID],
        logit_bias=[TokenBias(space, 100.0)],
    )
    assert engine.run() == {}
    assert engine.finish[0] == STOP
    text = tokenizer.decode(engine.tokens[0][:-1])
    assert json.loads(text).keys() == {"n", "ok"}
    assert text.count(" ") >= 24


def test_a_grammar_continues_where_a_moved_turn_stopped(engine: Engine, model: Path) -> None:
    pytest.importorskip("llguidance")
    processor = LogitsProcessor("grammar", {"lark": 'start: "ab" ("c" | "d")+ "."'})
    requested = {"stop_token_ids": [EOS_TOKEN_ID], "max_tokens": 9}
    engine.submit(1, [5, 6], processor, **requested)
    engine.run()
    whole = engine.tokens[1]
    for moved_after in range(1, len(whole)):
        sampling = SamplingParams(
            max_tokens=9 - moved_after,
            seed=1,
            stop_token_ids=[EOS_TOKEN_ID],
            logits_processors=[processor.to_str()],
        )
        context = np.array([5, 6, *whole[:moved_after]], "<i4").tobytes()
        engine.tokens[2], engine.logprobs[2] = [], []
        engine.admit(
            SubmitTurn(turn=2, token_ids=context, sampling=sampling, sampled_before=moved_after)
        )
        assert engine.run() == {}
        assert engine.tokens[2] == whole[moved_after:]
    text = ModelTokenizer(model).get().decode(whole)
    assert text.startswith("ab")
    assert engine.finish[1] in (STOP, LENGTH)


def test_without_the_library_a_grammar_is_refused_with_what_to_install(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(TurnRefused, match=r"pip install 'tidegate\[grammar\]'"):
        engine.submit(
            1, [5], LogitsProcessor("json_schema", {"schema": SCHEMA}), stop_token_ids=[0]
        )


def test_a_grammar_without_a_stop_token_is_refused(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(TurnRefused, match="ends by a stop token"):
        engine.submit(1, [5], LogitsProcessor("json_schema", {"schema": SCHEMA}))
