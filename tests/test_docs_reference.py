"""Tests that the generated reference has every public name, setting, option, metric and error."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tidegate
from tests.site_hooks import generated_pages, hook
from tidegate import errors
from tidegate.cli import app
from tidegate.observability.metrics.catalogue import METRICS
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport import messages

ROOT = Path(__file__).parent.parent


def page(name: str) -> str:
    return generated_pages()[f"reference/{name}.md"]


def rows(name: str) -> set[str]:
    """Return what the first column of the page's tables names."""
    return {
        code
        for line in page(name).splitlines()
        if line.startswith("| `")
        for code in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    }


def test_every_public_name_has_an_entry_and_a_line_in_the_index() -> None:
    pages = generated_pages()
    entries = {n for text in pages.values() for n in re.findall(r"^::: ([\w.]+)", text, re.M)}
    for name in tidegate.__all__:
        thing = getattr(tidegate, name)
        assert f"| [`{name}`]" in page("index") or thing is tidegate.TidegateError
        path = f"{thing.__module__}.{thing.__qualname__}"
        assert path in entries or thing is tidegate.TidegateError


def test_every_setting_has_a_row_with_what_it_means() -> None:
    flat = RunSettings.model_construct(model=Path("m")).by_flat_name()
    assert set(flat) <= rows("settings")
    bare = [line for line in page("settings").splitlines() if re.search(r"\|\s+\|$", line)]
    assert bare == ["| setting | type | range | default | |"] * page("settings").count("| setting ")


def test_every_option_that_a_command_lists_in_its_help_has_a_row() -> None:
    commands = set(re.findall(r"^## `tidegate ([\w-]+)`", page("commands"), re.M))
    help_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert commands == set(re.findall(r"^  ([a-z]+)  ", help_text, re.M))
    for command in commands - {"demo", "bench", "engine"}:
        printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).output
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", printed, re.M)) - {"--help"}
        assert options <= rows("commands"), command


def test_programs_that_parse_their_own_options_are_there_with_them() -> None:
    assert "--block-tokens" in page("commands")
    assert "--weights-directory" in page("commands")
    assert "--correction" in page("commands")


def test_every_metric_has_a_row() -> None:
    assert rows("metrics") == {metric.name for metric in METRICS}


def test_every_error_has_an_entry_and_stands_in_the_tree() -> None:
    defined = {
        name
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and thing.__module__ == errors.__name__
    }
    tree, _, entries = page("errors").partition("## ")
    assert set(re.findall(r"^(?:## )?(\w+) \{#", entries, re.M)) == defined
    assert set(re.findall(r"^[│├└─ ]*(\w+)", tree.partition("```text\n")[2], re.M)) >= defined


def test_every_wire_message_has_an_entry_and_every_field_a_row() -> None:
    for message in hook("reference").message_types():
        anchor = f"{{#{message.__module__}.{message.__name__}}}"
        entry = page("messages").partition(anchor)[2].partition("\n## ")[0]
        assert entry
        for field in message.__struct_fields__:
            assert f"| `{field}` |" in entry, (message, field)
    names = {each.__name__ for each in hook("reference").message_types()}
    assert {"Hello", "Step", "SubmitTurn", "Welcome"} <= names
    assert str(messages.Hello.__doc__) in page("messages")


def test_roles_become_links_or_code() -> None:
    replaced = hook("reference").on_page_content
    for role, path in (
        (":meth:`Rollouts.publish`", "tidegate.orchestrator.trainer.rollouts.Rollouts.publish"),
        (":class:<code>Step</code>", "tidegate.transport.messages.Step"),
    ):
        code = path.rpartition(".")[2]
        link = f'<autoref optional identifier="{path}"><code>{code}</code></autoref>'
        assert replaced(f"see {role}") == f"see {link}"
    assert replaced(":mod:`tidegate.no.such`") == "<code>tidegate.no.such</code>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; skipped without the packages of ``make site``, which runs these tests."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make site` installs it")
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return directory


@pytest.mark.slow
def test_every_public_name_and_member_has_an_anchor_that_the_search_finds(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    anchors = {entry["location"].partition("#")[2] for entry in found}
    missing = []
    for thing in hook("reference").public_objects().values():
        path = f"{thing.__module__}.{thing.__qualname__}"
        members = hook("reference").public_members(thing) if inspect.isclass(thing) else []
        wanted = [path, *(f"{path}.{member}" for member in members)]
        missing += [each for each in wanted if each not in anchors]
    assert missing == []


@pytest.mark.slow
def test_settings_options_metrics_and_errors_are_in_the_search(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = set(re.findall(r"[\w-]+", " ".join(f"{e['title']} {e['text']}" for e in found)))
    wanted = rows("settings") | rows("metrics")
    wanted |= {name for name in rows("commands") if name.startswith("--")}
    wanted |= {error.__name__ for error in hook("reference").error_types()}
    assert wanted <= words


@pytest.mark.slow
def test_no_page_shows_a_sphinx_role(site: Path) -> None:
    role = re.compile(r":(?:class|func|meth|mod|attr|data|exc):(?:`|<code)")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    assert [str(each.relative_to(site)) for each in pages if role.search(each.read_text())] == []
