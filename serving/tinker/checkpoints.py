"""Checkpoints on disk: immutable PEFT directories, found again by their ``tinker://`` path.

    ROOT/RUN/weights/NAME/            adapter and optimizer state, to train on
    ROOT/RUN/sampler_weights/NAME/    adapter alone, to sample from

RUN is a model's id. A directory appears under its name when it is complete (written beside it,
synced, then renamed), and ``checkpoint.json`` in it says whose it is. :mod:`app` uses the store.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from tidegate.serving.tinker.training import UserError

CheckpointKind = Literal["weights", "sampler_weights"]
"""What a checkpoint is for, as the second part of its path says."""

SCHEME = "tinker://"

FACTS_FILE = "checkpoint.json"

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
"""Names of checkpoints: one path segment, which is no hidden file."""

RUN_PATTERN = re.compile(r"[0-9a-f\-]{1,64}:train:[0-9]{1,9}")


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint's ``checkpoint.json``."""

    run_id: str
    """Id of the model that it is of."""
    kind: CheckpointKind
    name: str
    tenant: str
    steps: int
    """Optimizer steps in the weights."""
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    created_s: float
    """Unix time."""
    user_metadata: dict[str, str] | None = None
    is_ephemeral: bool = False
    """Whether it is of a sampling session, and ends with that."""

    @property
    def path(self) -> str:
        """Path by which clients name the checkpoint."""
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


class CheckpointStore:
    """Checkpoints of all tenants below one directory. Its methods block."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, facts: CheckpointFacts, write: Callable[[Path], None]) -> Path:
        """Have ``write`` fill a new checkpoint's directory; return the directory.

        Raises:
            UserError: the name cannot be a checkpoint's, or is taken.
        """
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        if directory.exists():
            raise UserError(
                f"{facts.path} exists, and checkpoints do not change; save under another name"
            )
        beside = directory.parent / f".{facts.name}.{secrets.token_hex(4)}"
        beside.mkdir(parents=True)
        try:
            write(beside)
            (beside / FACTS_FILE).write_bytes(msgspec.json.encode(facts))
            _sync(beside)
            os.rename(beside, directory)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        _sync_file(directory.parent)
        return directory

    def find(self, path: str, tenant: str) -> tuple[CheckpointFacts, Path]:
        """Return the facts and the directory of a tenant's checkpoint.

        Raises:
            UserError: the tenant has no such checkpoint.
        """
        run_id, kind, name = split_path(path)
        directory = self._directory(run_id, kind, name)
        facts = self._read(directory)
        if facts is None or facts.tenant != tenant:
            raise UserError(f"there is no checkpoint {path}")
        return facts, directory

    def remove(self, facts: CheckpointFacts) -> None:
        """Delete a checkpoint; harmless if it is gone."""
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        shutil.rmtree(directory, ignore_errors=True)

    def _read(self, directory: Path) -> CheckpointFacts | None:
        try:
            return msgspec.json.decode((directory / FACTS_FILE).read_bytes(), type=CheckpointFacts)
        except (OSError, msgspec.MsgspecError):
            return None

    def _directory(self, run_id: str, kind: str, name: str) -> Path:
        if not NAME_PATTERN.fullmatch(name):
            raise UserError(
                f"a checkpoint's name is 1 to 128 letters, digits and _ . -, and does not begin "
                f"with a dot or dash, got {name!r:.200}"
            )
        return self._root / run_id / kind / name


def split_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Return run, kind and name of a checkpoint's path.

    Raises:
        UserError: it is no path of a checkpoint.
    """
    run_id, _, rest = path.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    if path.startswith(SCHEME) and RUN_PATTERN.fullmatch(run_id) and NAME_PATTERN.fullmatch(name):
        if kind == "weights":
            return run_id, "weights", name
        if kind == "sampler_weights":
            return run_id, "sampler_weights", name
    raise UserError(
        f"{path!r:.300} is no checkpoint; one is tinker://RUN/weights/NAME, or "
        f"tinker://RUN/sampler_weights/NAME to sample from"
    )


def _sync(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        _sync_file(path)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
