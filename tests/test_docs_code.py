"""Tests that run the code blocks of the documentation, unless a block says why not.

Python runs in virtual time over simulated engines, the blocks of a page one after another. What a
reader need not see is in comments of the page's source, right before a block:

    <!-- before: … -->   code that is run first        <!-- after: … -->   and code that is run then
    <!-- not run: why -->   it is compiled only         <!-- run: pytest -->   (at the top) as tests

Of shell blocks the commands, options and make targets must exist.
"""

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tidegate
from tidegate.cli import app
from tidegate.testing import ServeInTests, VirtualTime

pytestmark = pytest.mark.wire

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

LANGUAGES = {"python", "sh", "toml", "text", "json", "yaml"}

FENCE = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!-- *([a-z ]+):(.*?)-->", re.DOTALL)

LOOKS_LIKE_CODE = re.compile(
    r"^    (?:import |from \w+ import|async |await |def |class |with |tidegate |make |pip |python )"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, with the instructions in the comments before it."""

    page: Path
    line: int
    language: str
    code: str
    said: dict[str, str]

    @property
    def name(self) -> str:
        """Page and line, for test ids and tracebacks."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        said = {kind.strip(): body.strip("\n") for kind, body in COMMENT.findall(found[1])}
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(page, line, found[2], found[3], said)


ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL if block.language == "python"]
SHELL = [block for block in ALL if block.language == "sh"]
AS_TESTS = [page for page in PAGES if "<!-- run: pytest -->" in page.read_text()]
TO_RUN = sorted({b.page for b in PYTHON if "not run" not in b.said} - set(AS_TESTS))


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_are_pages_with_code() -> None:
    assert len(PYTHON) >= 10
    assert len(SHELL) >= 5
    assert ROOT / "README.md" in TO_RUN


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_block_says_its_language_and_nothing_that_is_code_hides_in_an_indented_one(
    page: Path,
) -> None:
    assert [b.name for b in blocks(page) if b.language not in LANGUAGES] == []
    outside = FENCE.sub("", page.read_text())
    assert [line for line in outside.splitlines() if LOOKS_LIKE_CODE.match(line)] == []


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles_and_names_what_tidegate_has(block: Block) -> None:
    compile_block(block.code, block.name)
    for name in re.findall(r"\btidegate\.([A-Za-z]\w*)", block.code):
        assert hasattr(tidegate, name) or importlib.util.find_spec(f"tidegate.{name}"), name
    if "not run" in block.said:
        assert len(block.said["not run"].split()) > 3, "say why"


@pytest.mark.parametrize("page", TO_RUN, ids=relative)
def test_a_pages_python_runs_on_simulated_engines(
    page: Path,
    tidegate_serve: ServeInTests,
    tidegate_virtual_time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tidegate, "serve", tidegate_serve)
    monkeypatch.setattr(tidegate, "serve_sync", tidegate_serve.sync)
    tidegate_virtual_time.run(run_all(page))


async def run_all(page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language != "python" or "not run" in block.said:
            continue
        for code in (block.said.get("before", ""), block.code, block.said.get("after", "")):
            result = eval(compile_block(code, block.name), names)
            if inspect.isawaitable(result):
                await result


def compile_block(code: str, name: str) -> Any:
    return compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", AS_TESTS, ids=relative)
def test_a_page_of_tests_passes(page: Path, tmp_path: Path) -> None:
    code = "\n\n".join(block.code for block in blocks(page) if block.language == "python")
    (tmp_path / "test_page.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


# ---------------------------------------------------------------- shell


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_a_shell_blocks_commands_and_options_exist(block: Block) -> None:
    if "not run" in block.said:
        assert len(block.said["not run"].split()) > 3, "say why"
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words.pop(0)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    program, rest = Path(words[0]).name, words[1:]
    match program:
        case "tidegate":
            check_tidegate(rest)
        case "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in targets, rest
        case "python":
            assert rest[0] == "-m", rest
            assert importlib.util.find_spec(rest[1]) is not None, rest
        case "pip":
            check_extras(rest)
        case "pytest":
            assert [p for p in rest if p.endswith(".py") and not (ROOT / p).exists()] == []
        case "cd" | "git" | "mkdir":
            pass
        case _:
            pytest.fail(f"no check for {program!r}; mark the block as not run, and say why")


def check_tidegate(arguments: list[str]) -> None:
    """Parse the arguments as the command does, without running it."""
    group = typer.main.get_command(app)
    with group.make_context("tidegate", [], resilient_parsing=True) as context:
        command = group.get_command(context, arguments[0])  # type: ignore[attr-defined]
        assert command is not None, f"there is no tidegate {arguments[0]}"
        options = [each for each in arguments[1:] if each != "--help"]
        with command.make_context(arguments[0], options, parent=context):
            pass


def check_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"tidegate\[(\w+)\]", " ".join(arguments)):
        assert extra in project["optional-dependencies"], extra
