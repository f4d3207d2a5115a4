"""Checkpoints on disk: immutable PEFT directories, found again by their ``tinker://`` path.

    ROOT/RUN/weights/NAME/            adapter and optimizer state, to train on
    ROOT/RUN/sampler_weights/NAME/    adapter alone, to sample from

RUN is a model's id. A directory appears under its name when it is complete (written beside it,
synced, then renamed), and ``checkpoint.json`` in it says whose it is.
"""

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import msgspec

from tidegate.serving.tinker.journal import sync_file
from tidegate.serving.tinker.training import LoraSpec, UserError

log = logging.getLogger("tidegate")

CheckpointKind = Literal["weights", "sampler_weights"]
"""Purpose of a checkpoint, the second part of its path."""

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
    expires_s: float | None = None
    """Unix time from which on it counts as deleted; None: never."""
    user_metadata: dict[str, str] | None = None
    seq_id: int = 0
    """The model's request that wrote it."""
    is_ephemeral: bool = False
    """Whether it is of a sampling session, and ends with that."""

    @property
    def path(self) -> str:
        """Path by which clients name the checkpoint."""
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @property
    def spec(self) -> LoraSpec:
        """Shape of the adapter: rank and trained parts."""
        return LoraSpec(rank=self.rank, train_attn=self.train_attn, train_mlp=self.train_mlp)


class CheckpointStore:
    """Checkpoints of all tenants below one directory. Its methods block."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(
        self, facts: CheckpointFacts, write: Callable[[Path], None], *, replaces: bool = False
    ) -> Path:
        """Have ``write`` fill a new checkpoint's directory; return the directory.

        A request that wrote its checkpoint before the server was killed writes nothing again, even
        if the checkpoint was deleted since.

        Raises:
            UserError: the name cannot be a checkpoint's, or is taken and ``replaces`` is false.
        """
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        found = self._read(directory)
        if found is not None and found.seq_id >= facts.seq_id:
            return directory
        deleted = _deletion_of(directory)
        if deleted.exists() and int(deleted.read_text() or 0) >= facts.seq_id:
            return directory
        if found is not None and not replaces:
            raise UserError(
                f"{facts.path} exists, and checkpoints do not change; save under another name"
            )
        beside = directory.parent / f".{facts.name}.{secrets.token_hex(4)}"
        beside.mkdir(parents=True)
        try:
            write(beside)
            self._write_facts(beside, facts)
            for path in [*beside.iterdir(), beside]:
                sync_file(path)
            if directory.exists():
                shutil.rmtree(directory)
            os.rename(beside, directory)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        deleted.unlink(missing_ok=True)
        sync_file(directory.parent)
        return directory

    def hold(self, path: str, tenant: str, into: Path) -> tuple[CheckpointFacts, Path]:
        """Link a tenant's checkpoint of ``weights`` to the directory ``into``, which stays when the
        checkpoint is deleted; return its facts and ``into``. Harmless when repeated.

        Raises:
            UserError: the tenant has no such checkpoint.
        """
        if not into.exists():
            _, directory = self.find(path, tenant, kind="weights")
            beside = into.with_name(f".{into.name}")
            shutil.rmtree(beside, ignore_errors=True)
            shutil.copytree(directory, beside, copy_function=os.link)
            sync_file(beside)
            os.rename(beside, into)
            sync_file(into.parent)
        return msgspec.json.decode((into / FACTS_FILE).read_bytes(), type=CheckpointFacts), into

    def find(
        self, path: str, tenant: str, *, kind: CheckpointKind | None = None
    ) -> tuple[CheckpointFacts, Path]:
        """Return the facts and the directory of a tenant's checkpoint, of ``kind`` if given.

        Raises:
            UserError: the tenant has no such checkpoint.
        """
        run_id, found_kind, name = split_path(path)
        if kind not in (None, found_kind):
            raise UserError(
                f"{path} has no optimizer state to train on; name a checkpoint that save_state "
                f"wrote: tinker://RUN/{kind}/NAME"
            )
        directory = self._directory(run_id, found_kind, name)
        facts = self._read(directory)
        if facts is None or facts.tenant != tenant:
            raise UserError(
                f"there is no checkpoint {path} of yours; list_user_checkpoints names those that "
                "exist"
            )
        return facts, directory

    def of(self, tenant: str, run_id: str | None = None) -> list[CheckpointFacts]:
        """Return a tenant's checkpoints, of one run if it is given, the newest first."""
        if run_id is not None and not RUN_PATTERN.fullmatch(run_id):
            return []
        runs = [self._root / run_id] if run_id else sorted(self._root.glob("*:train:*"))
        found = (self._read(path.parent) for run in runs for path in run.glob(f"*/*/{FACTS_FILE}"))
        mine = [each for each in found if each is not None and each.tenant == tenant]
        return sorted(
            (each for each in mine if not each.is_ephemeral),
            key=lambda each: each.created_s,
            reverse=True,
        )

    def size_bytes(self, facts: CheckpointFacts) -> int:
        """Return the size of a checkpoint's files."""
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        return sum(path.stat().st_size for path in directory.glob("*"))

    def set_expiry(self, facts: CheckpointFacts, expires_s: float | None) -> None:
        """Change when a checkpoint counts as deleted."""
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        self._write_facts(directory, msgspec.structs.replace(facts, expires_s=expires_s))

    def remove_leftovers(self, sessions: Collection[str]) -> None:
        """Delete what an earlier server left: unfinished and expired checkpoints, and those of
        sampling sessions that are in none of these ``sessions``."""
        for kind in ("weights", "sampler_weights"):
            for path in self._root.glob(f"*:train:*/{kind}/*"):
                facts = self._read(path)
                session_id = path.parent.parent.name.partition(":")[0]
                if facts is None or (facts.is_ephemeral and session_id not in sessions):
                    self._remove_leftover(path)

    def _remove_leftover(self, path: Path) -> None:
        try:  # an expired one is not written again, either
            facts = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=CheckpointFacts)
        except (OSError, msgspec.MsgspecError):
            shutil.rmtree(path, ignore_errors=True)
            return
        try:
            self.remove(facts)
        except (OSError, UserError) as error:  # the next start tries again
            log.error("checkpoint=%s is not deleted: %s", path, error)

    def remove(self, facts: CheckpointFacts) -> None:
        """Delete a checkpoint for good; harmless if it is gone."""
        directory = self._directory(facts.run_id, facts.kind, facts.name)
        if not facts.is_ephemeral and directory.exists():
            _deletion_of(directory).write_text(str(facts.seq_id))
            sync_file(_deletion_of(directory))
            sync_file(directory.parent)
        shutil.rmtree(directory, ignore_errors=True)

    def _read(self, directory: Path) -> CheckpointFacts | None:
        """Return a directory's facts; None if it is no checkpoint, or no longer one."""
        try:
            facts = msgspec.json.decode((directory / FACTS_FILE).read_bytes(), type=CheckpointFacts)
        except (OSError, msgspec.MsgspecError):
            return None
        return None if facts.expires_s is not None and facts.expires_s <= time.time() else facts

    def _write_facts(self, directory: Path, facts: CheckpointFacts) -> None:
        beside = directory / f".{FACTS_FILE}"
        beside.write_bytes(msgspec.json.encode(facts))
        os.replace(beside, directory / FACTS_FILE)

    def _directory(self, run_id: str, kind: str, name: str) -> Path:
        if not NAME_PATTERN.fullmatch(name):
            raise UserError(
                f"a checkpoint's name is 1 to 128 letters, digits and _ . -, and does not begin "
                f"with a dot or dash, got {name!r:.200}"
            )
        return self._root / run_id / kind / name


def _deletion_of(directory: Path) -> Path:
    """Return the file that keeps a deleted checkpoint's ``seq_id``, because a restarted server
    carries out the request that wrote the checkpoint again."""
    return directory.with_name(f".{directory.name}.deleted")


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
