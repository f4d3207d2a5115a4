"""File beside an archived weight version that names the other versions it consists of.

The publish path writes it, and `tidegate audit` and the recorder read it. A version that is a whole
set of the model's own tensors has no such file. The file is JSON.
"""

from pathlib import Path

import msgspec

from tidegate.errors import AuditError
from tidegate.transport.regular_files import read_regular

PARTS_FILE = "parts.json"


class ArchivedAdapter(msgspec.Struct, frozen=True):
    """Where an adapter's tensors are archived."""

    version: int
    """Version whose archive holds the adapter's tensors."""
    scale: float


class WeightParts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """References of an archived version to the tensors of other versions that complete it."""

    over: int | None = None
    """Version that this version's tensors replace a part of; its other tensors stay. None if the
    tensors are a whole set."""
    is_adapter: bool = False
    """Whether the tensors belong to an adapter instead of the model."""
    adapters: dict[str, ArchivedAdapter] = {}
    """LoRA adapters of the version, by name."""

    @property
    def file_name(self) -> str:
        """Name of the tensors' file. A part is not named ``model.safetensors``. Under that name
        `transformers` would load it as a whole model, and initialise the tensors that it lacks at
        random."""
        if self.is_adapter:
            return "adapter.safetensors"
        return "model.safetensors" if self.over is None else "part.safetensors"

    def write(self, directory: Path) -> None:
        """Write the file beside the tensors, unless they are a whole set without adapters."""
        if self != WHOLE:
            (directory / PARTS_FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, directory: Path) -> "WeightParts":
        """Return the parts of the version archived in ``directory``.

        Raises:
            AuditError: the file can't be read.
        """
        path = directory / PARTS_FILE
        if not path.is_file():
            return WHOLE
        try:
            return msgspec.json.decode(read_regular(path), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise AuditError(f"{path} can't be read: {error}") from None


WHOLE = WeightParts()
"""A whole set without adapters."""
