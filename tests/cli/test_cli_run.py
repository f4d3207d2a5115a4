"""`tidegate run`: TOML files, overrides, and error messages that suggest what was meant."""

import json
import sys
from pathlib import Path

import pytest

from tests.models import make_model_directory
from tidegate.cli import command
from tidegate.cli.program import read_program
from tidegate.cli.run import overrides
from tidegate.errors import ConfigError
from tidegate.policies.routing import SessionAffinity

pytestmark = pytest.mark.wire

ROOT = Path(__file__).parent.parent.parent

MODULE = '''
"""A user's own module, beside the file."""

import itertools


def questions(first: int = 0):
    return (f"{n}+1=" for n in itertools.count(first))


async def solve(episode, task, *, words: int = 4) -> float:
    episode.append(task)
    turn = await episode.generate(max_tokens=words)
    return float(len(turn.token_ids))


def train(rollouts, tasks, episode, *, batches: int, rate: float = 0.1):
    rewards = []
    for batch in rollouts.batches(itertools.islice(tasks, 2 * batches), episode=episode):
        rewards.append(batch.rewards.mean().item())
    return {"reward_after": rewards[-1], "rate": rate, "batches_seen": len(rewards)}


async def train_async(rollouts, tasks, episode):
    return None


EVENS = [0, 2, 4]
'''

CONFIG = """
[run]
model = "{model}"
group_size = 2
groups_per_batch = 2
max_tokens = 4
run_directory = "{run}"

[tasks]
use = "{module}:questions"
first = 3

[episode]
use = "{module}:solve"

[trainer]
use = "{module}:train"
batches = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TOML file with a module beside it, as a user's would be; its name is unique per test."""
    module = f"users_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.format(model=tmp_path / "model", run=tmp_path / "run", module=module))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return path


def status_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tidegate", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_run_uses_the_files_values_with_overrides_and_writes_a_report(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_directory(config.parent / "model")
    flags = ["--set", "trainer.rate=0.5", "--run.group-size", "3"]
    assert status_of(["run", str(config), *flags], monkeypatch) == 0
    run = config.parent / "run"
    assert capsys.readouterr().out == f"report: {run / 'report.md'}\n"
    record = json.loads((run / "run.json").read_text())
    assert record["settings"]["group_size"] == 3
    assert (record["extra"]["rate"], record["extra"]["batches_seen"]) == (0.5, 2)
    assert json.loads((run / "report.json").read_text())["rollouts_trained"] == 2 * 2 * 3


def test_check_runs_nothing_and_shows_every_setting(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["run", str(config), "--check"], monkeypatch) == 0
    output = capsys.readouterr().out
    assert "run.group_size = 2\n" in output
    assert f"the run would be recorded in {config.parent / 'run'}" in output
    assert not (config.parent / "run").exists()


def test_the_example_file_is_valid() -> None:
    program = read_program(ROOT / "examples" / "run.toml", ["run.max_staleness=4"])
    assert program.is_async
    assert program.settings.staleness.max_staleness == 4
    assert program.settings.records.run_directory is not None
    assert program.settings.records.run_directory.name.startswith("run-")


@pytest.mark.parametrize(
    ("override", "output"),
    [
        ("run.engins=4", "no such setting; did you mean 'engines'?"),
        ("run.engines=-1", "engines=-1: Input should be greater than or equal to 0"),
        ("runs.engines=4", "there is no section [runs]; did you mean 'run'?"),
        ("engines=4", "must be SECTION.KEY=VALUE"),
        ("run.engines", "must be SECTION.KEY=VALUE"),
        ("run.engines.more=1", "engines={'more': 1}"),
        ("run.weights.puase_mode=keep", "no such setting; did you mean 'pause_mode'?"),
        ("run.staleness.group_size=3", "group_size is set twice, by itself and in staleness"),
        ("run.records.run_directory=runs", "run_directory is set twice, by itself and in records"),
        (
            "run.placement.routing_policy.use=tidegate.policies.routing:NoAffinity",
            "'SessionAffinity'?",
        ),
        ("tasks.furst=1", "tasks.furst: no such argument; did you mean 'first'?"),
        ("tasks.first=[]", "tasks.first = []: Input should be a valid integer"),
        ("episode.word=2", "episode.word: no such argument; did you mean 'words'?"),
        ("trainer.batches=many", "trainer.batches = 'many': Input should be a valid integer"),
        ("trainer.use=train", "must be 'module:name'"),
        ("trainer.use=no_such_module:train", "there is no module 'no_such_module'"),
        ("trainer.use=json:lods", "json has no 'lods'; did you mean 'loads'?"),
        ("trainer.use=json:loads", "must take (rollouts, tasks, episode)"),
        ("episode.use=json:loads", "must be an `async def` of (episode, task)"),
        (
            "run.routing_policy.use=tidegate.policies.routing:NoAffinity",
            "did you mean 'SessionAffinity'?",
        ),
    ],
)
def test_a_misspelt_key_is_refused_with_its_place_and_a_suggestion(
    config: Path, override: str, output: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_program(config, [override])
    assert output in str(refused.value)


def test_a_missing_value_is_named(config: Path) -> None:
    config.write_text(config.read_text().replace("batches = 2", ""))
    with pytest.raises(ConfigError, match=r"trainer\.batches is missing"):
        read_program(config)
    config.write_text(config.read_text().partition("[trainer]")[0])
    with pytest.raises(ConfigError, match="trainer is missing"):
        read_program(config)


def test_a_table_with_a_class_becomes_an_object_and_tasks_may_be_a_list(config: Path) -> None:
    text = config.read_text().replace("first = 3", "").replace(":questions", ":EVENS")
    config.write_text(text.replace(":train", ":train_async").replace("batches = 2", ""))
    routing = "run.routing_policy={use='tidegate.policies.routing:SessionAffinity', margin_turns=3}"
    program = read_program(config, [routing, "run.seed=1"])
    assert program.settings.placement.routing_policy == SessionAffinity(margin_turns=3)
    assert list(program.make_tasks()) == [0, 2, 4]
    assert program.is_async


def test_settings_may_be_grouped_in_tables_of_their_records(config: Path) -> None:
    text = config.read_text().replace('run_directory = "', 'records.run_directory = "')
    tables = """
[run.weights]
pause_mode = "abort"
[run.placement]
routing_policy = {use = "tidegate.policies.routing:SessionAffinity", margin_turns = 3}
[tasks]"""
    config.write_text(text.replace("[tasks]", tables))
    settings = read_program(config, ["run.weights.engines_per_update_wave=2"]).settings
    assert (settings.weights.pause_mode, settings.weights.engines_per_update_wave) == ("abort", 2)
    assert settings.placement.routing_policy == SessionAffinity(margin_turns=3)
    assert settings.records.run_directory == config.parent / "run"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--run.engines", "4"], ["run.engines=4"]),
        (["--run.max-tokens=4", "--trainer.a", "b=c"], ["run.max_tokens=4", "trainer.a=b=c"]),
    ],
)
def test_flags_are_the_same_as_assignments(flags: list[str], found: list[str]) -> None:
    assert overrides(flags) == found


@pytest.mark.parametrize("flags", [["more"], ["--engines", "4"], ["--run.engines"]])
def test_a_flag_without_a_section_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        overrides(flags)
