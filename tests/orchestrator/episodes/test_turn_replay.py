"""Replay after a crash: an episode that does the same gets the same turns again."""

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.orchestrator.episodes.engine_double import QuietEngines
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

MODEL = ModelFiles(Path("none"), Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), (0,))
DEFAULTS = SamplingSettings(max_tokens=4, temperature=1.0, seed=7)


class Engines(QuietEngines):
    """Answers every new turn with one token, and counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[SamplingParams] = []
        self.rejoined = 0
        self.forks = 0

    async def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        self.asked.append(sampling)
        turn = Turn(rollout, sampling)
        rollout.turns.append(turn)
        turn.append(50 + len(rollout.turns), -1.0, 0, "engine-0")
        turn.finish_reason = "length"
        return turn

    async def rejoin(self, rollout: Rollout) -> Turn:
        self.rejoined += 1
        turn = rollout.turns[-1]
        turn.append(99, -1.0, 1, "engine-1")
        turn.finish_reason = "length"
        return turn

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        super().cut(rollout, turns=turns, tokens=tokens)
        rollout.cut(turns=turns)

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        branch = Rollout(rollout.rollout_id + 1 + len(rollout.branches), 0, 0)
        branch.branch_of, branch.fork_reason = rollout, reason
        rollout.branches = (*rollout.branches, branch)
        self.forks += 1
        return branch


async def solve(episode: Episode, observation: int = 5) -> list[list[int]]:
    """Episode of two turns, with an observation between them and one after."""
    episode.append([1, 2])
    first = await episode.generate()
    episode.append([observation])
    second = await episode.generate(max_tokens=2)
    episode.append([6])
    return [first.token_ids, second.token_ids, episode.token_ids]


async def lived() -> Rollout:
    """Make a rollout whose episode had two turns and was lost after the second."""
    rollout = Rollout(0, 0, 0)
    await solve(Episode(rollout, MODEL, Engines(), DEFAULTS))
    rollout.cut(turns=2)
    return rollout


async def test_an_episode_that_does_the_same_again_gets_the_same_and_samples_nothing() -> None:
    rollout, engines = await lived(), Engines()
    assert await solve(Episode(rollout, MODEL, engines, DEFAULTS)) == [
        [51],
        [52],
        [1, 2, 51, 5, 52, 6],
    ]
    assert (engines.asked, engines.cuts) == ([], [])


async def test_it_gets_the_same_in_a_group_that_was_split_since_and_has_another_number() -> None:
    rollout, engines = await lived(), Engines()
    rollout.group_id = 7
    await solve(Episode(rollout, MODEL, engines, DEFAULTS))
    assert (engines.asked, engines.cuts) == ([], [])


async def test_what_is_not_lived_through_yet_is_not_seen() -> None:
    episode = Episode(await lived(), MODEL, Engines(), DEFAULTS)
    assert episode.token_ids == []
    with pytest.raises(RuntimeError, match="append a prompt"):
        await episode.generate()
    episode.append([1])
    assert episode.token_ids == [1]
    episode.append([2])
    await episode.generate()
    assert episode.token_ids == [1, 2, 51]


async def test_another_observation_makes_it_continue_anew_from_there() -> None:
    rollout, engines = await lived(), Engines()
    assert (await solve(Episode(rollout, MODEL, engines, DEFAULTS), observation=8))[2] == [
        1, 2, 51, 8, 52, 6,
    ]  # fmt: skip
    assert engines.cuts == [(1, 3)]
    assert len(engines.asked) == 1


async def test_another_sampling_makes_it_continue_anew_from_there() -> None:
    rollout, engines = await lived(), Engines()
    episode = Episode(rollout, MODEL, engines, DEFAULTS)
    episode.append([1, 2])
    await episode.generate(max_tokens=3)
    assert engines.cuts == [(0, 2)]
    assert rollout.token_ids == array("i", [1, 2, 51])


async def test_a_turn_that_was_running_is_joined_not_begun_again() -> None:
    rollout, engines = await lived(), Engines()
    rollout.turns[-1].finish_reason = None
    assert (await solve(Episode(rollout, MODEL, engines, DEFAULTS)))[1] == [52, 99]
    assert (engines.rejoined, engines.asked, engines.cuts) == (1, [], [])


@pytest.mark.parametrize("reason", ["cancelled", "refused"])
async def test_a_turn_that_ended_in_an_exception_is_asked_for_again(reason: str) -> None:
    rollout, engines = await lived(), Engines()
    rollout.turns[-1].finish_reason = reason
    await solve(Episode(rollout, MODEL, engines, DEFAULTS))
    assert len(engines.asked) == 1


async def test_an_episode_that_returns_earlier_than_before_drops_later_turns() -> None:
    rollout, engines = await lived(), Engines()
    episode = Episode(rollout, MODEL, engines, DEFAULTS)
    episode.append([1, 2])
    await episode.generate()
    episode.end()
    assert rollout.token_ids == array("i", [1, 2, 51])
    assert len(rollout.turns) == 1


async def test_the_same_random_numbers_are_drawn_after_a_crash_as_before() -> None:
    whole, cut = Engines(), Engines()
    await solve(Episode(Rollout(0, 0, 0), MODEL, whole, DEFAULTS))
    rollout = await lived()
    rollout.cut(turns=1)
    await solve(Episode(rollout, MODEL, cut, DEFAULTS))
    assert whole.asked[1] == cut.asked[0]


async def explore(episode: Episode, branches: int = 2) -> list[list[int]]:
    """Episode of one turn, then one turn in each of some branches."""
    episode.append([1, 2])
    await episode.generate()
    forks = [episode.fork() for _ in range(branches)]
    for number, fork in enumerate(forks):
        fork.append([7 + number])
        await fork.generate()
    return [fork.token_ids for fork in forks]


async def test_forks_are_lived_through_again_in_their_order() -> None:
    rollout, engines = Rollout(0, 0, 0), Engines()
    before = await explore(Episode(rollout, MODEL, Engines(), DEFAULTS))
    assert await explore(Episode(rollout, MODEL, engines, DEFAULTS)) == before
    assert (engines.asked, engines.forks, engines.cuts) == ([], 0, [])
    assert [branch.fork_reason for branch in rollout.branches] == ["asked", "asked"]


async def test_a_branch_that_is_not_forked_again_is_left_with_nothing() -> None:
    rollout, engines = Rollout(0, 0, 0), Engines()
    await explore(Episode(rollout, MODEL, Engines(), DEFAULTS))
    episode = Episode(rollout, MODEL, engines, DEFAULTS)
    await explore(episode, branches=1)
    episode.end()
    assert [branch.sampled_tokens for branch in rollout.branches] == [1, 0]


async def test_branches_draw_random_numbers_of_their_own() -> None:
    engines = Engines()
    await explore(Episode(Rollout(0, 0, 0), MODEL, engines, DEFAULTS))
    assert len({sampling.seed for sampling in engines.asked}) == 3
