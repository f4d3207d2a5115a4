"""Token attachments reach the episode, whatever happened on the way; and sampling options."""

import math

import msgspec
import numpy as np
import pytest

from tests.orchestrator.core.driver import PROMPT, Driver, step
from tests.orchestrator.episodes.test_turn_replay import DEFAULTS, MODEL, Engines
from tidegate.errors import TurnRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import snapshot_codec as core_state
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.transport.attachments import ATTACHMENTS, Attachment, AttachmentKind
from tidegate.transport.messages import ABORT, RUNNING, STOP
from tidegate.transport.sampling import (
    AttachmentOptions,
    LogitsProcessor,
    SamplingParams,
    TokenBias,
)

ASKING = SamplingParams(max_tokens=8, top_logprobs=2, raw_logprobs=True)
ROUTED = SamplingParams(max_tokens=8, routed_experts=True)
LAYERS, PER_TOKEN = 3, 2


def of_tokens(*raw: float, start: int = 0) -> list[Attachment]:
    """Make two top tokens for each raw log-prob; the second could not be sampled."""
    ids = np.array([[10 * n, 10 * n + 1] for n in range(len(raw))], "<i4").tobytes()
    top = np.array([[value + 1, -np.inf] for value in raw], "<f4").tobytes()
    return [
        Attachment(0, "raw_logprobs", start, "float32", np.array(raw, "<f4").tobytes()),
        Attachment(0, "top_ids", start, "int32", ids, [2]),
        Attachment(0, "top_logprobs", start, "float32", top, [2]),
    ]


def of_positions(start: int, *firsts: int, dtype: str = "uint8") -> Attachment:
    """Make the routed experts of positions from ``start`` on; each position's begin with one of
    ``firsts``."""
    experts = np.array([expert_ids(first) for first in firsts], dtype).tobytes()
    return Attachment(0, "routed_experts", start, dtype, experts, [LAYERS, PER_TOKEN])  # type: ignore[arg-type]


def expert_ids(first: int) -> list[list[int]]:
    return [[first, first + layer] for layer in range(LAYERS)]


def sample(
    driver: Driver,
    rollout: Rollout,
    tokens: list[int],
    attachments: list[Attachment],
    finish: int = RUNNING,
) -> None:
    """Sample tokens of a rollout's turn, with attachments."""
    place = driver.where(rollout)
    assert place is not None
    engine, handle = place
    own = [msgspec.structs.replace(each, turn=handle) for each in attachments]
    event = step(engine, 0, [(handle, tokens, finish)])
    driver.do(msgspec.structs.replace(event, attachments=own))


def asking_rollout(driver: Driver, sampling: SamplingParams = ASKING) -> Rollout:
    driver.join("a")
    driver.fill()
    rollout = next(iter(driver.running.values()))
    rollout.extend(PROMPT)
    driver.do(ev.TurnRequested(rollout.rollout_id, sampling))
    return rollout


def of(rollout: Rollout) -> GeneratedTurn:
    return GeneratedTurn(rollout.turns[-1], MODEL.tokenizer)


def test_attachments_are_stored_with_the_turn_wherever_it_continued() -> None:
    driver = Driver()
    rollout = asking_rollout(driver)
    sample(driver, rollout, [1], of_tokens(-0.5))
    sample(driver, rollout, [2], of_tokens(-0.25, start=1))
    sample(driver, rollout, [], [], ABORT)
    sample(driver, rollout, [3, 4], of_tokens(-1.0, -2.0), STOP)
    turn = of(rollout)
    assert turn.token_ids == [1, 2, 3, 4]
    assert turn.raw_logprobs == [-0.5, -0.25, -1.0, -2.0]
    assert turn.top_logprobs == [{0: 0.5}, {0: 0.75}, {0: 0.0}, {10: -1.0}]
    assert turn.top_logprobs_from(3) == [{10: -1.0}]


def by_teacher(*logprobs: float) -> Attachment:
    values = np.array(logprobs, "<f4").tobytes()
    return Attachment(0, "teacher_logprobs", 0, "float32", values)


def test_a_teachers_scores_are_stored_with_a_turn_that_requested_no_attachments() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8))
    sample(driver, rollout, [1, 2], [], STOP)
    driver.do(ev.TurnsScored(rollout.rollout_id, [by_teacher(-1.0, -2.0)]))
    driver.do(ev.TurnsScored(rollout.rollout_id, [by_teacher(-3.0, -4.0)]))
    core = driver.new_core()
    core_state.load(core_state.save(driver.core), core)
    for each in (driver.core, core):
        restored = each.rollout(rollout.rollout_id)
        assert restored is not None
        attachments = restored.turns[0].attachments
        assert attachments is not None
        values = attachments.entries("teacher_logprobs", 2)
        assert values is not None
        assert values.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("sampling", [ASKING, ROUTED])
def test_a_journal_and_a_snapshot_restore_them(sampling: SamplingParams) -> None:
    driver = Driver()
    rollout = asking_rollout(driver, sampling)
    attachments = of_tokens(-0.5) if sampling is ASKING else [of_positions(0, 1, 2)]
    sample(driver, rollout, [1], attachments)
    if sampling is ROUTED:
        sample(driver, rollout, [2], [of_positions(0, 7, 8, 9)])
    driver.do(ev.TurnsScored(rollout.rollout_id, [by_teacher(-2.0)]))
    core = driver.new_core()
    for record in driver.records:
        replay(record, core)
    assert core_state.digest(core) == core_state.digest(driver.core)
    again = driver.new_core()
    core_state.load(core_state.save(core), again)
    assert core_state.digest(again) == core_state.digest(core)
    restored = again.rollout(rollout.rollout_id)
    assert restored is not None
    if sampling is ASKING:
        assert of(restored).raw_logprobs == [-0.5]
        assert restored.turns[0].attachments is not None
        assert restored.turns[0].attachments.entries("teacher_logprobs", 1) == [-2.0]
        assert of(restored).top_logprobs == [{0: 0.5}]
    else:
        reports = of(restored).routed_expert_reports
        assert [report.entries[:, 0, 0].tolist() for report in reports] == [[1, 2], [7, 8, 9]]


def test_a_turn_that_requests_nothing_stores_nothing_whatever_an_engine_reports() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8))
    sample(driver, rollout, [1], [*of_tokens(-0.5), of_positions(0, 1, 2)])
    assert rollout.turns[-1].attachments is None
    turn = of(rollout)
    assert (turn.raw_logprobs, turn.top_logprobs, turn.kept_tokens) == (None, None, None)
    assert turn.routed_experts is None


def test_only_what_was_requested_is_stored() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8, raw_logprobs=True))
    sample(driver, rollout, [1], [*of_tokens(-0.5), of_positions(0, 1, 2)])
    turn = of(rollout)
    assert (turn.raw_logprobs, turn.top_logprobs, turn.routed_experts) == ([-0.5], None, None)


@pytest.mark.parametrize(
    "reports",
    [
        [of_tokens(-0.5), []],  # nothing for the second token
        [[], of_tokens(-0.5, start=1)],  # nothing for the first
        [of_tokens(-0.5), of_tokens(-0.5, start=2)],
        [of_tokens(-0.5)[1:], of_tokens(-0.5, start=1)[2:]],
    ],
)
def test_attachments_that_lack_a_token_are_not_returned(reports: list[list[Attachment]]) -> None:
    driver = Driver()
    rollout = asking_rollout(driver)
    for token, attachments in enumerate(reports):
        sample(driver, rollout, [token], attachments)
    assert (of(rollout).raw_logprobs, of(rollout).top_logprobs) == (None, None)


def test_another_number_of_top_tokens_than_requested_is_not_returned() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8, top_logprobs=1))
    sample(driver, rollout, [1], of_tokens(-0.5))
    assert of(rollout).top_logprobs is None


def test_kept_tokens_come_with_their_token_or_in_an_earlier_message() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8, top_p=0.9, kept_tokens=True))

    def kept(*sets: list[int], start: int = 0) -> Attachment:
        ids = np.array([i for ids in sets for i in ids], "<i4").tobytes()
        counts = np.array([len(ids) for ids in sets], "<u4").tobytes()
        return Attachment(0, "kept_ids", start, "int32", ids, counts=counts)

    sample(driver, rollout, [1], [kept([1, 5, 6])])
    sample(driver, rollout, [], [kept([2], [], start=1)])
    assert of(rollout).kept_tokens == [[1, 5, 6]]
    sample(driver, rollout, [2, 3], [])
    assert of(rollout).kept_tokens == [[1, 5, 6], [2], []]
    # An engine that is lost after sending a set ahead samples the token again elsewhere.
    sample(driver, rollout, [], [kept([7, 8], start=3)])
    driver.do(ev.EngineLeft("a", is_crash=True))
    driver.join("b")
    sample(driver, rollout, [9], [kept([9, 10, 11])], STOP)
    assert of(rollout).kept_tokens == [[1, 5, 6], [2], [], [9, 10, 11]]


def test_experts_of_a_recomputed_prefix_are_the_new_ones_and_both_reports_are_known() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, ROUTED)
    prompt = len(PROMPT)
    sample(driver, rollout, [1], [of_positions(0, *range(prompt))])
    sample(driver, rollout, [2], [of_positions(prompt, 50)])
    sample(driver, rollout, [3], [of_positions(0, *range(100, 100 + prompt + 2))])
    sample(driver, rollout, [4], [of_positions(prompt + 2, 60)], STOP)
    turn = of(rollout)
    first, second = turn.routed_expert_reports
    assert first.entries[:, 0, 0].tolist() == [*range(prompt), 50]
    assert second.entries[:, 0, 0].tolist() == [*range(100, 100 + prompt + 2), 60]
    assert turn.routed_experts is not None
    np.testing.assert_array_equal(turn.routed_experts, second.entries)
    assert turn.routed_experts.shape == (prompt + 3, LAYERS, PER_TOKEN)


def test_experts_that_are_computed_again_alike_are_stored_once() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, ROUTED)
    sample(driver, rollout, [1], [of_positions(0, 1, 2, 3)])
    sample(driver, rollout, [], [of_positions(0, 1, 2)])  # the first part of a long report
    sample(driver, rollout, [2], [of_positions(2, 3, 4)])
    [report] = of(rollout).routed_expert_reports
    assert report.entries[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_experts_with_a_gap_or_of_another_model_are_not_returned_as_one() -> None:
    for second in (of_positions(3, 9), of_positions(2, 9, dtype="uint16")):
        driver = Driver()
        rollout = asking_rollout(driver, ROUTED)
        sample(driver, rollout, [1], [of_positions(0, 1, 2)])
        sample(driver, rollout, [2], [second])
        turn = of(rollout)
        assert turn.routed_experts is None
        assert len(turn.routed_expert_reports) == 2


async def asked_by(**options: object) -> SamplingParams:
    """Return the sampling parameters that ``generate`` makes of its keywords."""
    engines = Engines()
    episode = Episode(Rollout(0, 0, 0), MODEL, engines, DEFAULTS)
    episode.append([1])
    await episode.generate(**options)  # type: ignore[arg-type]
    return engines.asked[0]


async def test_generate_takes_every_option_by_name() -> None:
    asked = await asked_by(
        temperature=0.5,
        seed=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: 1, 3: -2.0},
        min_tokens=2,
        stop_strings=("</a>",),
        top_logprobs=3,
        raw_logprobs=True,
        kept_tokens=True,
        routed_experts=True,
        hidden_states=True,
        logits_processors=[LogitsProcessor("x", {"b": 1, "a": 2}), '{"name": "y"}'],
    )
    assert asked == SamplingParams(
        max_tokens=4,
        temperature=0.5,
        stop_token_ids=[0],
        seed=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=[TokenBias(3, -2.0), TokenBias(7, 1.0)],
        min_tokens=2,
        stop_strings=["</a>"],
        top_logprobs=3,
        raw_logprobs=True,
        kept_tokens=True,
        routed_experts=True,
        hidden_states=True,
        logits_processors=[
            '{"name":"x","arguments":{"b":1,"a":2}}',
            '{"name":"y","arguments":{}}',
        ],
    )
    decode = msgspec.msgpack.Decoder(SamplingParams).decode
    assert decode(msgspec.msgpack.encode(asked)) == asked  # so a turn is known again after a crash


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"min_p": "0.1"}, "Expected `float`, got `str` - at `.*min_p`"),
        ({"logit_bias": {"a": 1.0}}, "Expected `int`, got `str`"),
        ({"logit_bias": [3]}, "no attribute 'items'"),
        ({"stop_strings": "</a>"}, "stop_strings must be a list, got '</a>'"),
        ({"stop_strings": [3]}, "Expected `str`, got `int`"),
        ({"logits_processors": ["json"]}, "'json' is no processor"),
        (
            {"logits_processors": [LogitsProcessor("x", {"f": print})]},
            "'x' can't be written as JSON",
        ),
        (
            {"logits_processors": [LogitsProcessor("x", {"f": "y" * 5_000_000})]},
            "bytes of options, where",
        ),
        ({"min_p": math.nan}, "must be finite, got nan"),
        ({"logit_bias": {3: math.inf}}, "must be finite, got inf"),
        ({"min_tokens": 2**64}, "no engine can read"),
        ({"top_k": 2**40}, "top_k must be within 2147483647 of 0, got 1099511627776"),
        ({"logit_bias": {2**40: 1.0}}, "the largest token id must be within"),
        ({"stop_strings": ["\ud800"]}, "no engine can read"),
    ],
)
async def test_an_option_that_no_engine_could_read_is_refused_by_name(
    options: dict[str, object], reported: str
) -> None:
    with pytest.raises(TurnRefused, match=reported):
        await asked_by(**options)


async def test_a_seed_may_be_any_int_and_numbers_may_be_numpys() -> None:
    assert (await asked_by(seed=2**64 + 5)).seed == 5
    assert (await asked_by(seed=-1)).seed == 2**64 - 1
    asked = await asked_by(min_tokens=np.int64(3), min_p=np.float32(0.5), temperature=np.float64(2))
    assert (asked.min_tokens, asked.min_p, asked.temperature) == (3, 0.5, 2.0)


async def test_an_option_that_there_is_not_is_a_mistake_like_any() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_n'"):
        await asked_by(top_n=3)


@pytest.mark.parametrize("kind", [kind for kind in ATTACHMENTS.values() if kind.option])
def test_the_option_of_each_attachment_requests_it_by_its_axis(kind: AttachmentKind) -> None:
    assert kind.option in AttachmentOptions.__annotations__
    sampling = msgspec.convert({"max_tokens": 1, kind.option: 1}, SamplingParams, strict=False)
    assert sampling.requests_attachments
    assert (sampling.requests_tokens, sampling.requests_positions) == (
        kind.axis == "token",
        kind.axis == "position",
    )


def test_recorded_options_are_read_by_the_names_that_an_older_version_gave_them() -> None:
    options = SamplingParams(max_tokens=3, logits_processors=['{"name": "x"}'])
    older = {"max_tokens": 3, "processors": ['{"name": "x"}']}
    assert SamplingParams.from_record(older) == options
    assert SamplingParams.from_record(msgspec.to_builtins(options)) == options


def test_a_snapshot_is_read_by_the_names_that_an_older_version_gave_sampling_options() -> None:
    driver = Driver()
    driver.join("a")
    driver.fill()
    options = SamplingParams(max_tokens=3, logits_processors=['{"name": "x"}'])
    for rollout in driver.running.values():
        driver.do(ev.TurnRequested(rollout.rollout_id, options))
    now = core_state.save(driver.core)
    assert b"\xb1logits_processors" in now  # a MessagePack string of 17 bytes
    older = now.replace(b"\xb1logits_processors", b"\xaaprocessors")
    core = driver.new_core()
    core_state.load(older, core)
    assert core_state.save(core, is_replayed=True) == now

    with pytest.raises(ValueError, match="cannot decode a saved state"):
        core_state.load(now.replace(b'\x91\xad{"name": "x"}', b"\x03"), core)
