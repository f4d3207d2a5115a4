"""`tidegate run`: TOML files, overrides, and error messages that suggest what was meant."""

import contextlib
import importlib
import importlib.util
import json
import logging
import stat
import sys
import tomllib
from pathlib import Path

import pytest

from tests.command_line import tidegate
from tests.models import make_model_directory
from tidegate.cli import run as run_command
from tidegate.cli.program import Program, read_program
from tidegate.cli.run import overrides
from tidegate.cli.toml_file import toml_lines, toml_value
from tidegate.errors import ConfigError
from tidegate.observability.records.evaluations import read_evaluations
from tidegate.observability.trackers import WandB
from tidegate.orchestrator.settings.config import RECORDS
from tidegate.policies.routing import SessionAffinity

pytestmark = pytest.mark.wire

ROOT = Path(__file__).parent.parent.parent

MODULE = '''
"""A user's own module, beside the file."""

import itertools
import json


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


def write(figures, path):
    with open(path, "a") as file:
        file.write(json.dumps(dict(figures)) + "\\n")


def interrupted(rollouts, tasks, episode, *, batches: int):
    for batch in rollouts.batches(itertools.islice(tasks, 4), episode=episode):
        raise KeyboardInterrupt


async def train_async(rollouts, tasks, episode):
    return None


EVENS = [0, 2, 4]
EVALUATED = ["1+1=", "2+2="]


def train_and_publish(rollouts, tasks, episode, *, batches: int):
    from safetensors.torch import load_file

    weights = load_file(rollouts.settings.model / "model.safetensors")
    for batch in rollouts.batches(list(itertools.islice(tasks, 2 * batches)), episode=episode):
        rollouts.publish(weights)
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


def test_run_uses_the_files_values_with_overrides_and_writes_a_report(config: Path) -> None:
    make_model_directory(config.parent / "model")
    ended = tidegate("run", config, "--set", "trainer.rate=0.5", "--run.group-size", "3")
    run = config.parent / "run"
    assert ended[:2] == (0, f"report: {run / 'report.md'}\n")
    shown = ended.err.splitlines()
    assert f"records: {run}" in shown
    assert [line.split()[:2] for line in shown if line.startswith("batch")] == [
        ["batch", "1"],
        ["batch", "2"],
    ]
    assert shown[-1].startswith("ended: 2 batches, v0")
    record = json.loads((run / "run.json").read_text())
    assert record["settings"]["group_size"] == 3
    assert (record["extra"]["rate"], record["extra"]["batches_seen"]) == (0.5, 2)
    assert json.loads((run / "report.json").read_text())["rollouts_trained"] == 2 * 2 * 3


def test_a_run_whose_groups_were_all_dropped_says_why_and_ends_as_a_failure(config: Path) -> None:
    make_model_directory(config.parent / "model")
    module = config_module(config)
    flags = ["--run.group_filter.use", "tidegate:DynamicSampling"]
    ended = tidegate("run", config, "--trainer.use", f"{module}:train_and_publish", *flags)
    assert ended.status == 1
    why = (
        "the tasks are used up, and no group was kept of the last 8 rollouts (8 as zero_variance); "
        "group_filter=DynamicSampling drops every group: see what the episode solve "
        f"({config.parent / module}.py:12) returns"
    )
    assert f"error: no batch was made of any task: {why}" in ended.err.splitlines()
    (stuck,) = json.loads((config.parent / "run" / "run.json").read_text())["statistics"]["stuck"]
    assert (stuck["kind"], stuck["where"]) == ("learning", why)
    assert why in (config.parent / "run" / "report.md").read_text()


def test_check_runs_nothing_and_prints_a_complete_file_that_means_the_same(config: Path) -> None:
    routing = "run.routing_policy={use='tidegate.policies.routing:SessionAffinity', margin_turns=3}"
    status, complete, err = tidegate("run", config, "--check", "--set", routing)
    assert status == 0
    assert not (config.parent / "run").exists()
    assert err.startswith("warning: the file is valid, but the run could not start now")
    tables = tomllib.loads(complete)
    assert tables["run"].keys() == {"model", *RECORDS}
    assert tables["run"]["staleness"]["group_size"] == 2
    assert tables["trainer"]["rate"] == 0.1  # a default of the user's function
    assert "# dashboard_address is not set\n" in complete
    config.with_name("complete.toml").write_text(complete)
    again = read_program(config.with_name("complete.toml"))
    assert settings_of(again) == settings_of(read_program(config, [routing]))
    assert again.file.trainer.arguments == {"batches": 2, "rate": 0.1}


def test_a_complete_file_leaves_out_settings_that_a_policy_decides(config: Path) -> None:
    policy = "run.staleness_policy={use='tidegate.policies.rounds:Synchronous',groups_per_batch=2}"
    config.write_text(config.read_text().replace("groups_per_batch = 2", ""))
    program = read_program(config, [policy])
    config.with_name("complete.toml").write_text("\n".join(toml_lines(program)))
    assert settings_of(read_program(config.with_name("complete.toml"))) == settings_of(program)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('a "b"\n\x7f\\', '"a \\"b\\"\\n\\u007f\\\\"'),
        ({"a b": [1, True, 0.5]}, '{"a b" = [1, true, 0.5]}'),
        ({1, 2}, None),
        ([None], None),
    ],
)
def test_values_are_written_as_toml_reads_them_or_not_at_all(value: object, text: str) -> None:
    assert toml_value(value) == text
    if text is not None:
        assert tomllib.loads(f"value = {text}") == {"value": value}


def test_an_override_replaces_a_setting_wherever_the_file_has_it(config: Path) -> None:
    flat = read_program(config, ["run.staleness.group_size=3"]).settings
    assert flat.staleness.group_size == 3
    text = config.read_text().replace("group_size = 2", "staleness.group_size = 2")
    config.write_text(text)
    assert read_program(config, ["run.group_size=5"]).settings.staleness.group_size == 5


def test_batches_reach_the_files_function_and_json_log(config: Path) -> None:
    make_model_directory(config.parent / "model")
    module = config_module(config)
    figures = config.parent / "figures.jsonl"
    config.write_text(
        f"{config.read_text()}\n[on_batch]\nuse = '{module}:write'\npath = '{figures}'\n"
        "[logging]\njson = true\n"
    )
    logger = logging.getLogger("tidegate")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        ended = tidegate("run", config)
    finally:
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])
    assert ended.status == 0
    rewards = [json.loads(line)["reward"] for line in figures.read_text().splitlines()]
    assert len(rewards) == 2
    logged = [json.loads(line) for line in ended.err.splitlines()]  # all are JSON
    batches = [line for line in logged if line.get("batch") == "trained"]
    assert [line["reward"] for line in batches] == rewards
    assert all("staleness_p50" in line for line in batches)  # digits are part of a field's name
    assert {line["run"] for line in batches} == {"run"}


def test_evaluated_tasks_are_recorded_before_between_and_after(config: Path) -> None:
    make_model_directory(config.parent / "model")
    module = config_module(config)
    section = f"\n[evaluation]\nuse = '{module}:EVALUATED'\nevery_versions = 2\n"
    config.write_text(config.read_text().replace(":train", ":train_and_publish") + section)
    flags = ["--trainer.batches", "3", "--run.max-staleness", "0"]
    assert tidegate("run", config, *flags).status == 0
    run = config.parent / "run"
    points = read_evaluations(run)
    assert [(each.version, each.batches, each.tasks) for each in points] == [
        (0, 0, 2),
        (2, 2, 2),
        (3, 3, 2),
    ]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["held_out_reward" in row for row in rows] == [True, False, True]
    assert json.loads((run / "report.json").read_text())["reward_after"] == points[-1].reward


def test_an_evaluation_of_endlessly_many_tasks_is_refused(config: Path) -> None:
    make_model_directory(config.parent / "model")
    config.write_text(
        f"{config.read_text()}\n[evaluation]\nuse = '{config_module(config)}:questions'\n"
        "every_versions = 2\n"
    )
    ended = tidegate("run", config)
    assert ended.status == 2
    assert "gives more than 100000 tasks" in ended.err


def test_a_folder_that_a_tracker_left_is_not_taken_for_its_package(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    (config.parent / "wandb").mkdir()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="needs the package 'wandb', which is not installed"):
        read_program(config, ["logging.wandb={}"])
    with pytest.raises(ConfigError, match="pip install wandb"):
        WandB()


def test_the_runs_directory_is_private_whatever_writes_there_first(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = read_program(config, ["logging.json=true"])
    monkeypatch.setattr(
        "tidegate.observability.logs.log_as_json", lambda run: logging.NullHandler()
    )
    with contextlib.ExitStack() as trackers:
        run_command._on_batch(program, trackers)
    assert stat.S_IMODE((config.parent / "run").stat().st_mode) == 0o700


def test_resume_needs_a_journal_and_then_continues_in_its_directory(config: Path) -> None:
    """The first run is interrupted, and says how it is continued."""
    make_model_directory(config.parent / "model")
    run = config.parent / "run"
    ended = tidegate("run", config, "--resume", run)
    assert ended.status == 2
    assert "has no journal.db" in ended.err
    flags = ["--trainer.use", config_module(config) + ":interrupted", "--run.journal", "true"]
    ended = tidegate("run", config, *flags)
    assert ended.status == 130
    *_, summary, report, resume = ended.err.splitlines()
    assert summary.startswith("ended: 1 batches")
    assert report.startswith(f"interrupted; `tidegate report {run}`")
    assert resume == f"`tidegate run {config} --resume {run}` continues the run"
    ended = tidegate("run", config, "--resume", run)
    assert ended.status == 0
    assert f"records: {run}\n" in ended.err
    assert (run / "part-1" / "run.json").exists()


def settings_of(program: Program) -> dict[str, object]:
    """Return the settings by name: records compare which fields were set, too."""
    return program.settings.by_flat_name()


def config_module(config: Path) -> str:
    return read_program(config).file.tasks.use.partition(":")[0]


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
        ("run.engines=-1", "engines=-1: must be greater than or equal to 0"),
        ("runs.engines=4", "there is no section [runs]; did you mean 'run'?"),
        ("engines=4", "must be SECTION.KEY=VALUE"),
        ("run.engines", "must be SECTION.KEY=VALUE"),
        ("run.engines.more=1", "engines={'more': 1}"),
        ("run.weights.puase_mode=keep", "no such setting; did you mean 'pause_mode'?"),
        ("run.records=3", "run.records = 3 must be a table of settings"),
        ("logging.wanbd={}", "logging.wanbd: no such log; did you mean 'wandb'?"),
        ("evaluation.use=tasks", "evaluation.every_versions is missing"),
        ("logging.json=2", "logging.json = 2 must be true or false"),
        ("logging.wandb=true", "logging.wandb = True must be a table of options"),
        ("on_batch.use=json:nothing", "json has no 'nothing'"),
        ("tasks.furst=1", "tasks.furst: no such argument; did you mean 'first'?"),
        ("tasks.first=[]", "tasks.first = []: must be a valid integer"),
        ("episode.word=2", "episode.word: no such argument; did you mean 'words'?"),
        ("trainer.batches=many", "trainer.batches = 'many': must be a valid integer"),
        ("tasks.use=builtins:range", "tasks.use names <class 'range'>, whose parameters can't"),
        ("run.routing_policy.use=builtins:range", "run.routing_policy.use names <class 'range'>"),
        ("trainer.use=train", "must be 'module:name'"),
        ("trainer.use=no_such_module:train", "there is no module 'no_such_module'"),
        ("trainer.use=json:lods", "json has no 'lods'; did you mean 'loads'?"),
        ("trainer.use=json:loads", "must take (rollouts, tasks, episode)"),
        ("episode.use=json:loads", "must be an `async def` of (episode, task)"),
        (
            "run.placement.routing_policy.use=tidegate.policies.routing:NoAffinity",
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


def test_flags_are_the_same_as_assignments_and_need_a_section() -> None:
    assert overrides(["--run.engines", "4"]) == ["run.engines=4"]
    flags = ["--run.max-tokens=4", "--trainer.a", "b=c"]
    assert overrides(flags) == ["run.max_tokens=4", "trainer.a=b=c"]
    for wrong in (["more"], ["--engines", "4"], ["--run.engines"]):
        with pytest.raises(ConfigError):
            overrides(wrong)
