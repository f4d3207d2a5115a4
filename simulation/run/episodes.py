"""Scripted episodes of a simulated run: turns, tools, forks, scores, parks, failures and hangs.

An episode follows the script that the scenario draws for it, and checks that its context consists
of the tokens that it appended and the tokens that it was given.
"""

import asyncio
import contextlib
import random
from array import array
from collections.abc import Callable, Set
from weakref import WeakKeyDictionary

from tidegate.errors import EngineLost, InfrastructureFailed, RunClosed, TurnRefused
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.spec import TEMPERATURE_MAX
from tidegate.simulation.engine.turns import DEADLY_TOKEN
from tidegate.simulation.faults.scenario import Scenario, ScriptedTurn
from tidegate.transport.limits import FRAME_BYTES_MAX_BY_KIND

DEVIATION_SHARE = 0.15
"""Share of turns at which an episode of a crash-restart run deviates from its script.

The episode appends a token before or after the scripted tokens, or asks for one token fewer.
"""


TOO_LONG = array("i", bytes(FRAME_BYTES_MAX_BY_KIND["submit_turn"]))
"""Context with more tokens than any ``submit_turn`` message can hold."""


class SimulatedEpisodes:
    """Plays the episodes of a scenario according to their scripts."""

    def __init__(
        self,
        scenario: Scenario,
        context: SimulationContext,
        *,
        stopped: Set[int],
        live_version: Callable[[], int] = lambda: 0,
        is_patient: bool = False,
    ) -> None:
        """Create the episodes of one run.

        ``stopped``: rollouts whose episode the run has cancelled; the set changes during the run.
        ``live_version`` returns the oldest version that may answer a score request made now.
        With ``is_patient``, episodes give up no turn, whatever their script says.
        """
        self._stopped = stopped
        self._is_patient = is_patient
        self._scenario = scenario
        self._context = context
        self._coverage = context.coverage
        self._live_version = live_version
        self._expected_tokens: WeakKeyDictionary[Episode, list[int]] = WeakKeyDictionary()
        """Row -> its expected context: the tokens that its episode appended or was given."""

    async def play(
        self, episode: Episode, task: int, variation: random.Random | None = None
    ) -> float:
        """Play one episode and return its reward; ``variation`` draws its deviations."""
        script = self._scenario.script(task, episode.index)
        branch: asyncio.Task[None] | None = None
        try:
            for number, turn in enumerate(script.turns):
                if number == script.forks_before:
                    branch = self._fork(episode, script.branch, variation)
                await self._take_turn(episode, turn, variation)
            await self._end_as_scripted(episode, script.fate)
            if branch is not None:
                await branch
        finally:
            if branch is not None:
                branch.cancel()
                await asyncio.wait({branch})
                if not branch.cancelled():
                    branch.result()
        return script.reward

    def _fork(
        self, episode: Episode, turns: list[ScriptedTurn], variation: random.Random | None
    ) -> "asyncio.Task[None]":
        """Fork the episode here, and start a task that plays the branch's turns."""
        self._coverage.add(CoverageMark.FORKED)
        row = episode.fork()
        self._expected_tokens[row] = episode.token_ids

        async def play_branch() -> None:
            with contextlib.suppress(RunClosed):  # the rollout was given up, or is over
                for turn in turns:
                    if episode.rollout_id in self._stopped:
                        return  # its context was cut back; it is cancelled in the loop's next turn
                    await self._take_turn(row, turn, variation)

        return asyncio.get_running_loop().create_task(
            play_branch(), name=f"branch {row.rollout_id}"
        )

    async def _take_turn(
        self, row: Episode, turn: ScriptedTurn, variation: random.Random | None
    ) -> None:
        deviation = ""
        if variation is not None and variation.random() < DEVIATION_SHARE:
            deviation = variation.choice(("before", "after", "fewer"))
        given = [[2], turn.given] if deviation == "before" else [turn.given]
        given += [[2]] if deviation == "after" else []
        for tokens in given:
            self._append(row, tokens)
        self._check_context(row)
        max_tokens = max(1, turn.max_tokens - (deviation == "fewer"))
        timeout_s = None if self._is_patient else turn.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                generated = await row.generate(max_tokens=max_tokens)
            self._expected_tokens[row] += generated.token_ids
        except TimeoutError:
            self._coverage.add(CoverageMark.TURN_GIVEN_UP)
            self._expected_tokens[row] = row.token_ids  # whatever was sampled until then stays
        if turn.is_scored:
            await self._score_context(row, timeout_s)
        await asyncio.sleep(turn.tool_s)
        if turn.parks:
            await self._park(row)

    def _append(self, row: Episode, tokens: list[int]) -> None:
        row.append(tokens)
        self._expected_tokens.setdefault(row, []).extend(tokens)

    def _check_context(self, row: Episode) -> None:
        """End the simulation if a row's context differs from its expected context.

        Raises:
            AssertionError: the context differs. The event loop's exception handler is called as
                well, because an exception alone would only fail this episode.
        """
        is_expected = row.token_ids == self._expected_tokens[row]
        if not is_expected:
            error = AssertionError(
                f"row {row.rollout_id} has the context {row.token_ids}, but its episode appended "
                f"and was given {self._expected_tokens[row]}"
            )
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": str(error), "exception": error})
            raise error

    async def _score_context(self, row: Episode, timeout_s: float | None) -> None:
        """Request a score of the row's context, and check its log-probs and its version."""
        tokens, live = row.token_ids, self._live_version()
        if len(tokens) < 2:
            return
        try:
            async with asyncio.timeout(timeout_s):
                (score,) = await row.score([tokens], start=len(tokens) // 2)
        except (TimeoutError, EngineLost):
            self._coverage.add(CoverageMark.SCORE_MISSED)
            return
        self._coverage.add(CoverageMark.SCORED)
        assert score.version >= live, f"scored by v{score.version} when v{live} was live everywhere"
        content = self._context.ground_truth.content_of(score.version)
        expected = self._context.model.logprobs(array("i", tokens), score.start, content=content)
        assert score.logprobs.tolist() == expected, f"v{score.version} scores otherwise"
        if score.logprobs[-1] < -1.0:
            self._append(row, [3])  # the episode continues differently because of the score

    async def _park(self, row: Episode) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await row.park()
        if loop.time() > began_s:
            self._coverage.add(CoverageMark.PARKED)

    async def _end_as_scripted(self, episode: Episode, fate: str) -> None:
        match fate:
            case "hangs":
                self._coverage.add(CoverageMark.HUNG_EPISODE)
                await asyncio.get_running_loop().create_future()
            case "asks too much":
                self._coverage.add(CoverageMark.TURN_REFUSED)
                with contextlib.suppress(TurnRefused):
                    episode.append(TOO_LONG)
                await episode.generate(max_tokens=4, temperature=2 * TEMPERATURE_MAX)
            case "ends engines":
                episode.append([DEADLY_TOKEN])
                await episode.generate(max_tokens=4)
            case "raises once" if not episode.retries:
                self._coverage.add(CoverageMark.RAISED)
                raise InfrastructureFailed("meant to fail once")
            case "raises":
                self._coverage.add(CoverageMark.RAISED)
                raise ValueError("meant to fail")
