"""Images, audio and video reach engines that read them, as references at their positions."""

import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidegate
from tests.orchestrator.core.driver import PROMPT, Driver, FakeEngine
from tests.orchestrator.episodes.chat_templates import add_chat_template
from tests.orchestrator.episodes.talking import Talk
from tidegate.engine.external.adapter import Capabilities
from tidegate.engine.external.turns import read_turn
from tidegate.engine.scheduling.sequences import EngineLimits, admit
from tidegate.errors import ChatRefused, ConfigError, TurnRefused
from tidegate.observability.records.trajectories import as_recorded, snapshot_rollout
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.event_log import NUMBERS, replay
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import ReplayCursor
from tidegate.testing import ScriptedEngine, ServeInTests
from tidegate.transport.images import collapsed
from tidegate.transport.media import DATA_URL_CHARS_MAX, MEDIA_MAX, Media, Placeholders
from tidegate.transport.messages import SamplingParams, SubmitTurn

CAT = Media("image", "https://host/cat.png")
PLACED = Media("image", "data:image/png;base64,AAAA", Placeholders(0, 3, "ab"))
END = "<|im_end|>"


def shown(words: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Make a user's message with media."""
    return {"role": "user", "content": [{"type": "text", "text": words}, *parts]}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


# ---------------------------------------------------------------- messages


async def test_parts_become_references_at_their_places_in_one_row(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml_seeing")
    messages = [shown("what?", image("https://host/cat.png"))]
    messages.append(await talk.say(f"cat{END}", messages))
    sound = {"type": "input_audio", "input_audio": {"data": "UklG", "format": "mp3"}}
    film = {"type": "video_url", "video_url": "/data/film.mp4"}
    messages.append(shown("and?", sound, film))
    await talk.say(f"meow{END}", messages)
    talk.check()
    first, second = talk.rollout.turns
    assert not talk.rollout.branches
    assert first.media == (CAT,)
    at = first.start + first.length
    assert second.media == (
        Media("audio", "data:audio/mp3;base64,UklG", at),
        Media("video", "/data/film.mp4", at),
    )
    assert talk.episode.media == [*first.media, *second.media]
    assert "what?<image><|im_end|>" in talk.text(talk.rollout)
    assert "https" not in talk.text(talk.rollout)


async def test_another_image_is_another_conversation_though_its_tokens_are_the_same(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "chatml_seeing")
    for name in ("cat", "dog"):
        await talk.say(f"a {name}{END}", [shown("what?", image(f"https://host/{name}.png"))])
    (branch,) = talk.rollout.branches
    assert branch.fork_reason.startswith("new_conversation")
    assert [each.url for each in branch.media] == ["https://host/dog.png"]
    start = branch.turns[0].start
    assert branch.token_ids[:start] == talk.rollout.token_ids[:start]


async def test_a_branch_has_what_was_shown_before_the_fork_and_no_more(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml_seeing")
    messages = [shown("what?", image("https://host/cat.png"))]
    messages.append(await talk.say(f"cat{END}", messages))
    await talk.say(f"x{END}", [*messages, shown("and", image("https://host/1.png"))])
    await talk.say(f"y{END}", [*messages, shown("and", image("https://host/2.png"))])
    (branch,) = talk.rollout.branches
    assert [each.url for each in branch.media] == ["https://host/cat.png", "https://host/2.png"]
    talk.check()


async def test_a_template_that_writes_references_out_is_refused(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "gemma")
    with pytest.raises(ChatRefused, match="chat template"):
        await talk.episode.generate(messages=[shown("what?", image("https://host/cat.png"))])
    assert not talk.rollout.token_ids


async def test_references_have_a_size_and_a_number(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml_seeing")
    large = "data:image/png;base64," + "A" * DATA_URL_CHARS_MAX
    with pytest.raises(ChatRefused, match="may have 1048576"):
        await talk.episode.generate(messages=[shown("?", image(large))])
    with pytest.raises(ChatRefused, match="may have 8192"):
        await talk.episode.generate(messages=[shown("?", image("https://" + "a" * 9000))])
    with pytest.raises(ConfigError, match=f"at most {MEDIA_MAX} media"):
        talk.episode.append("<image>", media=[CAT] * (MEDIA_MAX + 1))


# ---------------------------------------------------------------- runs


async def test_a_turn_goes_to_an_engine_that_reads_its_media(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine], tmp_path: Path
) -> None:
    blind, seeing = tidegate_engine(), tidegate_engine(media=("image",))

    async def solve(episode: tidegate.Episode, task: str) -> float:
        turn = await episode.generate(messages=[shown(task, image("https://host/cat.png"))])
        return float(turn.text == "a cat")

    model = add_chat_template(tmp_path / "model", "chatml_seeing")
    (model / "config.json").write_text("{}")
    async with tidegate_serve(model=model, engines=[blind, seeing], says="a cat") as rollouts:
        assert (await rollouts.evaluate(["a", "b", "c"], episode=solve)).rewards == [1.0] * 3
    assert not blind.requests
    assert [request.media for request in seeing.requests] == [(CAT,)] * 3


async def test_a_run_none_of_whose_engines_reads_a_kind_refuses_it_by_name(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(media=("image",)), tidegate_engine()]
    refusals: list[str] = []

    async def solve(episode: tidegate.Episode, task: str) -> float:
        episode.append(task, media=[Media("video", "/film.mp4"), CAT])
        with pytest.raises(TurnRefused) as refused:
            await episode.generate()
        refusals.append(str(refused.value))
        return 0.0

    async with tidegate_serve(engines=engines) as rollouts:
        await rollouts.evaluate(["?"], episode=solve)
        assert rollouts.statistics().ledger.error == 0
    assert "media of kind video, which no engine of this run reads" in refusals[0]
    assert not [request for engine in engines for request in engine.requests]


async def test_a_turn_waits_for_the_one_engine_that_reads_its_media_to_come_back(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    seeing = tidegate_engine(media=("image",), crashes_at_token=2, restart_s=5.0)

    async def solve(episode: tidegate.Episode, task: str) -> float:
        episode.append(task, media=[CAT])
        return float((await episode.generate(max_tokens=8)).text == "abcdef")

    async with tidegate_serve(engines=[tidegate_engine(), seeing], says="abcdef") as rollouts:
        assert (await rollouts.evaluate(["?"], episode=solve)).rewards == [1.0]
    assert [(request.said, request.media) for request in seeing.requests] == [
        ("", (CAT,)),
        ("ab", (CAT,)),
    ]


# ---------------------------------------------------------------- journal and records


@pytest.mark.parametrize("image", [CAT, PLACED], ids=["reference", "placed"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_media_outlive_a_crash(snapshot: bool, image: Media) -> None:
    driver = Driver()
    driver.join("blind")
    driver.engines["seeing"] = FakeEngine(0)
    driver.do(ev.EngineJoined("seeing", 0, 4, media=("image",)))
    driver.fill()
    rollout = next(iter(driver.running.values()))
    rollout.extend(PROMPT)
    driver.do(ev.TurnRequested(rollout.rollout_id, SamplingParams(max_tokens=3), (image,)))
    assert [turn.media for turn in driver.engines["seeing"].turns.values()] == [[image]]
    driver.die_and_resume(0, snapshot=snapshot)
    again = driver.core.rollout(rollout.rollout_id)
    assert again is not None
    assert again.media == [image]
    assert driver.core.turns.media_taken == {"image"}


def test_records_of_before_there_were_media_are_read() -> None:
    driver = Driver()
    driver.join("engine-0")
    driver.fill()
    rollout = next(iter(driver.running.values()))
    number = NUMBERS[ev.TurnRequested]
    added = array.array("i", PROMPT).tobytes()
    old = [number, rollout.rollout_id, SamplingParams(max_tokens=3), added]
    event, _ = replay(msgspec.msgpack.encode(old), driver.core)
    assert event == ev.TurnRequested(rollout.rollout_id, SamplingParams(max_tokens=3))
    assert rollout.token_ids.tolist() == PROMPT


def test_a_resumed_episode_that_shows_something_else_gets_another_turn() -> None:
    rollout = Rollout(0, 0, 0)
    rollout.extend(PROMPT)
    sampling = SamplingParams(max_tokens=3)
    turn = Turn(rollout, sampling, (CAT,))
    rollout.turns.append(turn)
    past = ReplayCursor(rollout)
    assert past.follows(array.array("i", PROMPT))
    assert past.next_turn(sampling, (CAT,)) is turn
    assert past.next_turn(sampling) is None


def test_content_of_data_urls_is_recorded_by_its_digest() -> None:
    rollout = Rollout(0, 0, 0)
    rollout.extend(PROMPT)
    media = (CAT, Media("image", "data:image/png;base64,AAAA", 2))
    turn = Turn(rollout, SamplingParams(max_tokens=3), media)
    rollout.turns.append(turn)
    taken = snapshot_rollout(rollout, task=None, advantage=None, consumed_version=None)
    (recorded,) = as_recorded(taken).turns
    assert recorded.media is not None
    assert '"url":"https://host/cat.png","at":0' in recorded.media
    assert "data:image/png;base64,sha256:" in recorded.media
    assert "AAAA" not in recorded.media


# ---------------------------------------------------------------- placeholders


def test_an_engine_that_repeats_placeholders_gets_one_for_each_image() -> None:
    context = [1, 9, 9, 9, 2, 9, 3, 9, 9]
    media = [
        Media("image", "data:,a", Placeholders(1, 3, "a")),
        Media("image", "https://host/b.png", 4),
        Media("image", "data:,c", Placeholders(7, 2, "c")),
    ]
    assert collapsed(context, media) == [1, 9, 2, 9, 3, 9]
    assert collapsed(context, []) == context


# ---------------------------------------------------------------- engines that don't


def test_engines_that_read_tokens_only_refuse_media() -> None:
    limits = EngineLimits(
        max_running_turns=1,
        max_step_tokens=8,
        num_blocks=8,
        block_tokens=8,
        context_tokens_max=64,
        vocab_size=64,
    )
    message = SubmitTurn(
        turn=0, token_ids=bytes(4), sampling=SamplingParams(max_tokens=1), media=[CAT]
    )
    able = Capabilities(engine="other 1.0", context_tokens_max=64, running_turns_max=1)
    with pytest.raises(TurnRefused, match="reads no image"):
        read_turn(message, 0, limits=limits, capabilities=able)
    with pytest.raises(TurnRefused, match="reads tokens only"):
        admit(message, limits, 0, None)  # type: ignore[arg-type]
