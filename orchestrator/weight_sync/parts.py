"""File beside an archived weight version that names the other versions it consists of.

The recorder writes it, and `tidegate audit` reads it. A version all of whose tensors lie beside it,
and are the model's own, has no such file. The file is JSON.
"""

from pathlib import Path

import msgspec

from tidegate.errors import AuditError
from tidegate.transport.messages import TensorSpec
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
    patch_of: int | None = None
    """Version whose whole set becomes this version's by the tensors of this file. None if the file
    has all of them."""
    patches: tuple[TensorSpec, ...] = ()
    """Tensors of the file that are patches; the others are whole."""
    equal: dict[str, str] = {}
    """Tensors of a whole set that the file omits, with the one whose bytes each has."""
    linked: dict[str, int] = {}
    """CRC-32 of the files that are hard links to the model directory's, by name."""

    @property
    def is_whole_set(self) -> bool:
        """Whether the version is a whole set of the model's tensors, maybe kept as a patch."""
        return self.over is None and not self.is_adapter

    @property
    def needed(self) -> set[int]:
        """Versions that this version can't be loaded without; may have itself."""
        found = {self.over, self.patch_of, *(entry.version for entry in self.adapters.values())}
        return {version for version in found if version is not None}

    @property
    def file_name(self) -> str:
        """Name of the tensors' file. A part is not named ``model.safetensors``. Under that name
        `transformers` would load it as a whole model, and initialise the tensors that it lacks at
        random."""
        if self.is_adapter:
            return "adapter.safetensors"
        if self.patch_of is not None:
            return "patch.safetensors"
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
