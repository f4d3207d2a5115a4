"""Raw log-probs and likeliest tokens reach the episode, whatever happened on the way."""

import math

import msgspec
import numpy as np
import pytest

from tests.orchestrator.core.driver import PROMPT, Driver, step
from tests.orchestrator.episodes.test_recollection import DEFAULTS, MODEL, Engines
from tidegate.errors import TurnRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import state as core_state
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.transport.messages import ABORT, RUNNING, STOP, TokenDetails
from tidegate.transport.sampling import LogitsProcessor, SamplingParams, TokenBias

ASKING = SamplingParams(max_tokens=8, top_logprobs=2, raw_logprobs=True)


def told(handle: int, *raw: float) -> TokenDetails:
    """Make two likeliest tokens for each raw log-prob; the second could not be sampled."""
    return TokenDetails(
        handle,
        np.array(raw, "<f4").tobytes(),
        np.array([[10 * n, 10 * n + 1] for n in range(len(raw))], "<i4").tobytes(),
        np.array([[value + 1, -np.inf] for value in raw], "<f4").tobytes(),
    )


def sample(
    driver: Driver, rollout: Rollout, tokens: list[int], details: list[float], finish: int = RUNNING
) -> None:
    """Sample tokens of a rollout's turn, with details."""
    place = driver.where(rollout)
    assert place is not None
    engine, handle = place
    event = step(engine, 0, [(handle, tokens, finish)])
    driver.do(
        ev.StepArrived(
            **{name: getattr(event, name) for name in event.__struct_fields__ if name != "details"},
            details=[told(handle, *details)] if details else [],
        )
    )


def asking_rollout(driver: Driver, sampling: SamplingParams = ASKING) -> Rollout:
    driver.join("a")
    driver.fill()
    rollout = next(iter(driver.running.values()))
    rollout.extend(PROMPT)
    driver.do(ev.TurnRequested(rollout.rollout_id, sampling))
    return rollout


def of(rollout: Rollout) -> GeneratedTurn:
    return GeneratedTurn(rollout.turns[-1], MODEL.tokenizer)


def test_details_are_filed_under_the_turn_that_asked_wherever_it_went_on() -> None:
    driver = Driver()
    rollout = asking_rollout(driver)
    sample(driver, rollout, [1], [-0.5])
    sample(driver, rollout, [2], [-0.25])
    sample(driver, rollout, [], [], ABORT)
    sample(driver, rollout, [3, 4], [-1.0, -2.0], STOP)
    turn = of(rollout)
    assert turn.token_ids == [1, 2, 3, 4]
    assert turn.raw_logprobs == [-0.5, -0.25, -1.0, -2.0]
    assert turn.top_logprobs == [{0: 0.5}, {0: 0.75}, {0: 0.0}, {10: -1.0}]


def test_a_journal_and_a_snapshot_bring_them_back() -> None:
    driver = Driver()
    rollout = asking_rollout(driver)
    sample(driver, rollout, [1], [-0.5])
    core = driver.new_core()
    for record in driver.records:
        replay(record, core)
    assert core_state.digest(core) == core_state.digest(driver.core)
    again = driver.new_core()
    core_state.load(core_state.save(core), again)
    assert core_state.digest(again) == core_state.digest(core)
    restored = again.rollout(rollout.rollout_id)
    assert restored is not None
    assert of(restored).raw_logprobs == [-0.5]
    assert of(restored).top_logprobs == [{0: 0.5}]


def test_a_turn_that_asked_for_nothing_keeps_nothing_whatever_an_engine_tells() -> None:
    driver = Driver()
    rollout = asking_rollout(driver, SamplingParams(max_tokens=8))
    sample(driver, rollout, [1], [-0.5])
    assert rollout.turns[-1].details is None
    assert (of(rollout).raw_logprobs, of(rollout).top_logprobs) == (None, None)


def test_an_engine_that_leaves_some_out_has_told_nothing() -> None:
    driver = Driver()
    rollout = asking_rollout(driver)
    sample(driver, rollout, [1], [-0.5])
    sample(driver, rollout, [2], [])
    assert (of(rollout).raw_logprobs, of(rollout).top_logprobs) == (None, None)


def test_an_engine_that_tells_more_than_was_asked_or_of_other_tokens_has_told_nothing() -> None:
    for details in ([-0.5, -0.5], [-0.5, -0.5, -0.5]):
        driver = Driver()
        rollout = asking_rollout(driver)
        sample(driver, rollout, [1], details)
        for token in (2, 3):  # by and by there are as many as tokens
            sample(driver, rollout, [token], [])
        assert (of(rollout).raw_logprobs, of(rollout).top_logprobs) == (None, None)
        assert rollout.turns[-1].details is not None
        assert len(rollout.turns[-1].details.top_ids) == 0


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
        logits_processors=[
            '{"name":"x","arguments":{"b":1,"a":2}}',
            '{"name":"y","arguments":{}}',
        ],
    )
    decode = msgspec.msgpack.Decoder(SamplingParams).decode
    assert decode(msgspec.msgpack.encode(asked)) == asked  # so a turn is known again after a crash


@pytest.mark.parametrize(
    ("options", "told"),
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
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(TurnRefused, match=told):
        await asked_by(**options)


async def test_a_seed_may_be_any_int_and_numbers_may_be_numpys() -> None:
    assert (await asked_by(seed=2**64 + 5)).seed == 5
    assert (await asked_by(seed=-1)).seed == 2**64 - 1
    asked = await asked_by(min_tokens=np.int64(3), min_p=np.float32(0.5), temperature=np.float64(2))
    assert (asked.min_tokens, asked.min_p, asked.temperature) == (3, 0.5, 2.0)


async def test_an_option_that_there_is_not_is_a_mistake_like_any() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_n'"):
        await asked_by(top_n=3)


def test_a_turn_that_asks_for_nothing_has_no_room_for_it() -> None:
    turn = Turn(Rollout(0, 0, 0), SamplingParams(max_tokens=3))
    assert turn.details is None


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
