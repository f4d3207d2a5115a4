"""Import graph of the source tree, and the layers that docs/architecture.md promises.

`tests/test_layers.py` checks it; `make graph` draws it into `docs/layers.svg`:

    python -m tests.layers docs/layers.svg

Imports inside functions and under ``TYPE_CHECKING`` count like any other.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("simulation",),
    ("integrations",),
    ("observability",),
    ("serving",),
    ("environments",),
    ("orchestrator", "engine"),
    ("policies", "kernels", "transport"),
)
"""Top-level folders from the top down. A folder imports only from layers below its own; policies,
kernels and transport import nothing of the project, and orchestrator and engine share only them."""

ROOMS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "observability": (
        "",  # observers.py, and what users name: recorded runs, progress, logs, trackers
        "dashboard",
        "metrics",
        "reports",
        "audit",
        "records",
    ),
    "serving": (
        "",  # vllm_server.py: one server of the APIs of vllm and sglang
        ("gateway", "vllm", "sglang", "tinker"),
        "control",
        "openai",
        "http",
    ),
    "orchestrator": (
        "trainer",
        "scheduler",
        "batches",
        "episodes",
        "weight_sync",
        "fleet",
        "journal",
        "telemetry",
        "settings",
        "core",
    ),
    "engine": (
        "external",
        "",  # worker.py, loop.py and link.py: the worker process
        "drafts",
        "scheduling",
        "ranks",
        "device",
        "execution",
        "sampling",
        "models",
        "weights",
        "memory",
    ),
    "simulation": (
        "",  # pytest_plugin.py: the fixtures of users' tests
        "planning",
        "run",
        "engine",
        "checks",
        "faults",
    ),
}
"""Rooms inside a folder, from the top down; a room imports only from rooms below it. Rooms in one
tuple are side by side: none imports another."""

UNNAMED_ROOMS = {
    "observability/": "observability/observers",
    "serving/": "serving/vllm_server",
    "simulation/": "simulation/pytest_plugin",
    "engine/": "engine/worker",
}
"""What the modules that lie in no room of their folder are drawn as."""

USERS_OF_THE_PUBLIC_API = {"cli", "integrations", "simulation"}
"""Folders that may also use `tidegate.NAME`, as a user's code does."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement."""

    importer: str
    """Path of the importing file, relative to the repository."""
    line: int
    imported: str
    """Path of the imported file, relative to the repository; `tidegate` for the public API."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def floors(folder: str) -> list[tuple[str, ...]]:
    """Return a folder's rooms from the top down, those side by side in one tuple."""
    return [(each,) if isinstance(each, str) else each for each in ROOMS[folder]]


def folders() -> list[str]:
    """Return the top-level folders, from the top down."""
    return [folder for layer in LAYERS for folder in layer]


@cache
def modules() -> Mapping[str, str]:
    """Return the path of each module of the tree by its dotted name."""
    found: dict[str, str] = {}
    for folder in folders():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            name = "tidegate." + relative.removesuffix(".py").replace("/", ".")
            found[name.removesuffix(".__init__")] = relative
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Return all imports between files of the tree."""
    known = modules()
    found: list[Import] = []
    for path in known.values():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            for name in _imported(node):
                if name == "tidegate":
                    found.append(Import(path, node.lineno, "tidegate"))  # type: ignore[attr-defined]
                elif name in known and known[name] != path:
                    found.append(Import(path, node.lineno, known[name]))  # type: ignore[attr-defined]
    return tuple(found)


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "tidegate":
            names = {f"tidegate.{alias.name}" for alias in node.names}
            return {"tidegate"} if names - {"tidegate.errors", "tidegate.testing"} else set()
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        return {name if name in modules() else node.module for name in whole}
    return set()


def room_of(path: str) -> str:
    """Return the room of a file: `orchestrator/core`, `engine/`, or the top-level folder."""
    folder, *below = path.split("/")
    if folder in ROOMS:
        return f"{folder}/{below[0] if len(below) > 1 else ''}"
    return folder


@cache
def ranks() -> Mapping[str, tuple[int, int]]:
    """Return each room's place from the top: the layer of its folder, and its floor in there."""
    found: dict[str, tuple[int, int]] = {}
    for layer, names in enumerate(LAYERS):
        for folder in names:
            if folder in ROOMS:
                for floor, rooms in enumerate(floors(folder)):
                    found |= {f"{folder}/{room}": (layer, floor) for room in rooms}
            else:
                found[folder] = (layer, 0)
    return found


def upward_imports() -> list[Import]:
    """Return the imports that point to the same floor or above, other than within a room."""
    return [each for each in imports() if not may_import(each.importer, each.imported)]


def may_import(importer: str, imported: str) -> bool:
    """Whether a file may import another: of its room, of a lower floor of its folder, or of a
    folder in a lower layer."""
    here = room_of(importer)
    if imported == "tidegate":
        return here in USERS_OF_THE_PUBLIC_API
    there = room_of(imported)
    (layer, floor), (layer_there, floor_there) = ranks()[here], ranks()[there]
    if here.split("/")[0] == there.split("/")[0]:
        return here == there or floor_there > floor
    return layer_there > layer


def cycles() -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not (Tarjan 1972)."""
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        if each.imported != "tidegate":
            graph[each.importer].add(each.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * len(modules()) + limit)
    try:
        for name in sorted(graph):
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def direct_edges() -> set[tuple[str, str]]:
    """Return the room-to-room imports that no chain of other rooms implies."""
    below: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        here, there = room_of(each.importer), room_of(each.imported)
        if here != there and each.imported != "tidegate":
            below[here].add(there)

    @cache
    def reachable(room: str) -> frozenset[str]:
        return frozenset(below[room]).union(*(reachable(other) for other in below[room]))

    return {
        (room, other)
        for room in list(below)
        for other in below[room]
        if not any(other in reachable(third) for third in below[room] - {other})
    }


def draw(target: Path) -> None:
    """Draw the rooms, and the imports between them that no others imply, as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tidegate"  # the same tree gives the same file
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    places: dict[str, tuple[float, float]] = {}
    y = 0.0
    for layer in LAYERS:
        depth = 0
        for column, folder in enumerate(layer):
            x = 9.0 * (column - (len(layer) - 1) / 2) if folder in ROOMS else 6.0 * (column - 1)
            if folder not in ROOMS:
                places[folder] = (x if len(layer) > 1 else 0.0, y)
                continue
            for row, rooms in enumerate(floors(folder)):
                for number, room in enumerate(rooms):
                    side = 4.2 * (number - (len(rooms) - 1) / 2)
                    places[f"{folder}/{room}"] = (x + side, y - row)
                depth = max(depth, row)
        y -= depth + 1.6
    figure, axes = pyplot.subplots(figsize=(11, -0.6 * y))
    for here, there in sorted(direct_edges()):
        axes.annotate(
            "",
            places[there],
            places[here],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#5d7f99",
                "lw": 0.9,
                "connectionstyle": "arc3,rad=0.12",
                "shrinkA": 12,
                "shrinkB": 12,
            },
        )
    for room, (x, height) in places.items():
        box = FancyBboxPatch(
            (x - 1.7, height - 0.28),
            3.4,
            0.56,
            boxstyle="round,pad=0.05",
            fc="#eef4f8",
            ec="#34566f",
        )
        axes.add_patch(box)
        label = UNNAMED_ROOMS.get(room, room)
        axes.text(x, height, label, ha="center", va="center", fontsize=9)
    axes.set_xlim(-9, 9)
    axes.set_ylim(y + 0.8, 1)
    axes.set_axis_off()
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


def sources(folder: str) -> list[Path]:
    """Return the Python files of a folder, which has some."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"{folder}/ has no code to check"
    return paths


def imported_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the dotted names that these nodes import."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
