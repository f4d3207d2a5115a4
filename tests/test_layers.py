"""Tests of the layers in docs/architecture.md: who may import whom, read from the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import (
    ROOMS,
    ROOT,
    cycles,
    floors,
    folders,
    imported_names,
    may_import,
    sources,
    upward_imports,
)

pytestmark = pytest.mark.wire

THIRD_PARTY: dict[str, set[str]] = {
    "policies": {"torch"},
    # opentelemetry only where a program uses it, for the trace headers of calls and requests; PIL
    # and transformers only for models that read images
    "transport": {
        "PIL",
        "msgspec",
        "numpy",
        "opentelemetry",
        "safetensors",
        "torch",
        "transformers",
        "zmq",
        "zstandard",
    },
    "kernels": {"torch", "triton", "numpy"},
}
"""Third-party packages that the lowest layer may import."""

DECIDING = ("policies", "orchestrator/core", "engine/scheduling")
"""Folders of the deciding parts; other rooms wait for them."""

FORBIDDEN = {"asyncio", "time", "random", "socket", "threading", "uuid", "zmq"}
"""Modules that the deciding parts must not import: no I/O, no clock and no randomness."""


def imports(path: Path) -> list[str]:
    return imported_names(ast.walk(ast.parse(path.read_text())))


def test_every_import_between_rooms_points_downward() -> None:
    upward = [str(each) for each in upward_imports()]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    ("importer", "imported", "may"),
    [
        ("serving/gateway/app.py", "serving/openai/requests.py", True),
        ("serving/gateway/app.py", "serving/gateway/sessions.py", True),
        ("serving/gateway/app.py", "serving/vllm/app.py", False),  # side by side
        ("serving/sglang/app.py", "serving/vllm/app.py", False),
        ("serving/openai/requests.py", "serving/control/routes.py", False),
        ("serving/vllm_server.py", "serving/sglang/app.py", True),
        ("observability/metrics/catalogue.py", "observability/dashboard/app.py", False),
        ("observability/dashboard/app.py", "serving/http/server.py", True),
        ("serving/http/server.py", "observability/logs.py", False),
        ("engine/worker.py", "orchestrator/core/core.py", False),
    ],
)
def test_rooms_import_rooms_of_lower_floors_only(importer: str, imported: str, may: bool) -> None:
    assert may_import(importer, imported) is may


def test_no_modules_import_each_other() -> None:
    assert cycles() == []


def test_every_folder_and_room_is_in_the_table_of_layers() -> None:
    for folder in ROOMS:
        there = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert there == {room for floor in floors(folder) for room in floor} - {""}, folder
    linked = {path.name for path in (ROOT / "src" / "tidegate").iterdir() if path.is_symlink()}
    assert linked == set(folders())


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_the_lowest_layer_depends_on_nothing_it_was_not_given(folder: str) -> None:
    for path in sources(folder):
        roots = {module.split(".")[0] for module in imports(path)}
        strangers = roots - sys.stdlib_module_names - THIRD_PARTY[folder] - {"tidegate"}
        assert not strangers, f"{path.relative_to(ROOT)} must not import {sorted(strangers)}"


def test_only_the_channels_that_torch_carries_import_torch_and_only_once_they_are_used() -> None:
    for path in sources("transport"):
        tree = ast.parse(path.read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        at_once = imported_names(at_import)
        assert not any(name.split(".")[0] == "torch" for name in at_once), path
        if any(name.split(".")[0] == "torch" for name in imports(path)):
            assert path.name.startswith(("collective", "cuda_")), path


@pytest.mark.parametrize("folder", DECIDING)
def test_what_decides_has_no_clock_no_randomness_and_no_io(folder: str) -> None:
    for path in sources(folder):
        assert not {m.split(".")[0] for m in imports(path)} & FORBIDDEN, path


def test_every_module_that_a_docstring_names_by_its_folder_exists() -> None:
    rooms = {room for folder in ROOMS for floor in floors(folder) for room in floor}
    owners = {*folders(), *rooms} - {""}
    paths = [path for folder in folders() for path in sources(folder)]
    known = {
        "/".join(path.parts[start:])
        for path in (each.relative_to(ROOT) for each in paths)
        for start in range(len(path.parts))
    }
    named = [
        (name, path.relative_to(ROOT).as_posix())
        for path in paths
        for name in re.findall(r"``((?:[a-z_]+/)+[a-z_0-9]+\.py)``", path.read_text())
        if name.split("/")[0] in owners
    ]
    assert len(named) > 50
    assert not [each for each in named if each[0] not in known]


def test_kernels_is_no_package_of_its_own() -> None:
    """A root package `kernels` would shadow Hugging Face's, which transformers probes for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tidegate", "torch"),
        ("tidegate.orchestrator.trainer.rollouts", "torch"),
        ("tidegate.cli", "torch"),
        ("tidegate.orchestrator.core.core", "zmq"),
        ("tidegate.orchestrator.core.core", "asyncio"),
        ("tidegate.engine.worker", "tidegate.orchestrator"),
        ("tidegate.orchestrator.trainer.rollouts", "tidegate.engine"),
        ("tidegate.orchestrator.trainer.rollouts", "tidegate.observability"),
        ("tidegate.orchestrator.trainer.rollouts", "pyarrow"),
        ("tidegate.orchestrator.trainer.remote.rollouts", "tidegate.orchestrator.scheduler"),
    ],
)
def test_importing_one_thing_does_not_load_another(module: str, unwanted: str) -> None:
    code = f"import {module}, sys; sys.exit({unwanted!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{module} loads {unwanted}: {done.stderr.decode()[-500:]}"


def test_no_folder_of_tests_hides_a_package_that_tests_ask_for() -> None:
    """pytest puts test folders on the path, so a folder there would become a package of its
    name."""
    asked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"importorskip\(\s*\"(\w+)", path.read_text())
    }
    assert "ray" in asked
    hiding = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert asked & hiding == set()
