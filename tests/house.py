"""Size of the tree, and over how many files its ideas are spread: `python -m tests.house`.

Prints `name, value, unit` for each figure. Lines are those of tracked Python files; an import is
one of the project's own, as `tests/layers.py` reads them.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

import tidegate
from tests.layers import ROOT, folders, imports, modules
from tidegate.orchestrator.settings.config import RunSettings

IDEAS: Mapping[str, str] = {
    "a pause mode": r"[\"'](abort|keep|wait)[\"']|PauseMode",
    "routed experts": r"routed_experts",
    "kept tokens": r"kept_tokens|kept_ids|KeptTokens",
    "the channel shm": r"[\"']shm[\"']",
    "the channel relay": r"[\"']relay[\"']",
    "the channel cuda_ipc": r"[\"']cuda_ipc[\"']",
}
"""Ideas that few files should name, with the pattern of their names in the code."""


def tracked(*below: str) -> list[Path]:
    """Return the tracked Python files below these folders."""
    listed = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in below)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def lines_of(*below: str) -> int:
    """Return the number of lines of these folders."""
    return sum(len(path.read_text().splitlines()) for path in tracked(*below))


def product() -> list[str]:
    """Return the folders that are installed."""
    return [*folders(), "src"]


def modules_with_one_importer() -> int:
    """Return the number of modules that one other module imports, packages' `__init__` aside."""
    importers: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        importers[each.imported].add(each.importer)
    return sum(
        len(importers[path]) == 1 for path in modules().values() if not path.endswith("__init__.py")
    )


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield the classes of the installed folders."""
    for path in tracked(*product()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path, node


def settings_of(record: type[BaseModel]) -> int:
    """Return the number of settings of a record, each of those in its inner records counted."""
    count = 0
    for field in record.model_fields.values():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            count += settings_of(inner)
        else:
            count += 1
    return count


def rows() -> Iterator[tuple[str, int, str]]:
    """Yield the name, value and unit of each figure."""
    yield ("product", lines_of(*product()), "lines")
    yield ("tests", lines_of("tests"), "lines")
    yield ("benchmarks", lines_of("benchmarks"), "lines")
    yield ("product modules", len(tracked(*product())), "modules")
    yield ("modules with one importer", modules_with_one_importer(), "modules")
    found = list(classes())
    protocols = sum("Protocol" in map(ast.unparse, node.bases) for _, node in found)
    yield ("Protocols", protocols, "classes")
    texts = {path: path.read_text() for path in tracked(*product())}
    words = Counter(word for text in texts.values() for word in set(re.findall(r"\w+", text)))
    alone = sum(words[node.name] == 1 for _, node in found)
    yield ("classes named in their own file only", alone, "classes")
    yield ("settings", settings_of(RunSettings), "settings")
    yield ("public names", len(tidegate.__all__), "names")
    for idea, pattern in IDEAS.items():
        naming = sum(bool(re.search(pattern, text)) for text in texts.values())
        yield (f"naming {idea}", naming, "files")


if __name__ == "__main__":
    for name, value, unit in rows():
        sys.stdout.write(f"{name}, {value}, {unit}\n")
