"""Who may import whom: docs/architecture.md's floors, read off the source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS: dict[str, set[str]] = {
    "policies": set(),
    "transport": set(),
    "kernels": set(),
    "engine": {"kernels", "transport"},
    "orchestrator": {"policies", "transport"},
}
"""Folder -> folders below it. The two on top never meet but on the wire."""

THIRD_PARTY: dict[str, set[str]] = {
    "policies": {"torch"},
    "transport": {"msgspec", "numpy", "safetensors", "torch", "zmq"},
    "kernels": {"torch", "triton", "numpy"},
}
"""What the ground floor may import from outside the standard library."""

FORBIDDEN = {"asyncio", "time", "random", "socket", "threading"}
"""No I/O, no clock and no chance in policies."""


def imports(path: Path) -> list[str]:
    return imports_of(ast.walk(ast.parse(path.read_text())))


def imports_of(nodes: Iterable[ast.AST]) -> list[str]:
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return modules


def sources(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"{folder}/ has no code to check"
    return paths


@pytest.mark.parametrize("folder", FLOORS)
def test_a_folder_imports_only_from_the_floors_below(folder: str) -> None:
    for path in sources(folder):
        parts = [module.split(".") for module in imports(path)]
        ours = {part[1] for part in parts if part[0] == "tidegate" and len(part) > 1}
        strangers = (ours & FLOORS.keys()) - FLOORS[folder] - {folder}
        assert not strangers, f"{path.relative_to(ROOT)} must not import {sorted(strangers)}"


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_the_ground_floor_depends_on_nothing_it_was_not_given(folder: str) -> None:
    for path in sources(folder):
        roots = {module.split(".")[0] for module in imports(path)}
        strangers = roots - sys.stdlib_module_names - THIRD_PARTY[folder] - {"tidegate"}
        assert not strangers, f"{path.relative_to(ROOT)} must not import {sorted(strangers)}"


def test_only_the_channels_that_torch_carries_import_torch_and_only_once_they_are_used() -> None:
    for path in sources("transport"):
        tree = ast.parse(path.read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        at_once = imports_of(at_import)
        assert not any(name.split(".")[0] == "torch" for name in at_once), path
        if any(name.split(".")[0] == "torch" for name in imports(path)):
            assert path.name.startswith(("collective", "cuda_")), path


def test_policies_have_no_clock_no_chance_and_no_io() -> None:
    for path in sources("policies"):
        assert not {m.split(".")[0] for m in imports(path)} & FORBIDDEN, path


def test_kernels_is_no_package_of_its_own() -> None:
    """A root package `kernels` would shadow Hugging Face's, which transformers probes for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tidegate", "torch"),
        ("tidegate.orchestrator.serve", "torch"),
        ("tidegate.orchestrator.cli", "torch"),
        ("tidegate.orchestrator.core.core", "zmq"),
        ("tidegate.orchestrator.core.core", "asyncio"),
        ("tidegate.engine.worker", "tidegate.orchestrator"),
        ("tidegate.orchestrator.serve", "tidegate.engine"),
        ("tidegate.orchestrator.serve", "pyarrow"),
        ("tidegate.orchestrator.serve", "tidegate.orchestrator.observing.dashboard"),
    ],
)
def test_importing_one_thing_does_not_load_another(module: str, unwanted: str) -> None:
    code = f"import {module}, sys; sys.exit({unwanted!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{module} loads {unwanted}: {done.stderr.decode()[-500:]}"


def test_no_folder_of_tests_hides_a_package_that_tests_ask_for() -> None:
    """pytest puts tests/ on the path: a folder there is a package of its name, where none is."""
    asked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"importorskip\(\s*\"(\w+)", path.read_text())
    }
    assert "ray" in asked
    assert {name for name in asked if (ROOT / "tests" / name).is_dir()} == set()
