"""Which other versions is an archived one made of? What stands beside its tensors, to be read back.

It knows no tensors. A whole set of the model's tensors alone has no such file.
"""

from pathlib import Path

import msgspec

from tidegate.errors import AuditError
from tidegate.transport.regular_files import read_regular

PARTS_FILE = "parts.json"


class ArchivedAdapter(msgspec.Struct, frozen=True):
    """Where an adapter's tensors are."""

    version: int
    """They are archived with this one."""
    scale: float


class WeightParts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a version is, beside the tensors archived with it."""

    over: int | None = None
    """The version that they are laid over; None: they are a whole set."""
    is_adapter: bool = False
    """Whether they are an adapter's instead of the model's."""
    adapters: dict[str, ArchivedAdapter] = {}
    """The LoRA adapters that the version has, by name."""

    @property
    def file_name(self) -> str:
        """What the tensors' file is called: not what a whole set is, for it would be loaded as one
        and what it lacks be made up."""
        if self.is_adapter:
            return "adapter.safetensors"
        return "model.safetensors" if self.over is None else "part.safetensors"

    def write(self, directory: Path) -> None:
        """Leave this beside the tensors, if there is anything to say."""
        if self != WHOLE:
            (directory / PARTS_FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, directory: Path) -> "WeightParts":
        """What stands beside the tensors in ``directory``.

        Raises:
            AuditError: it can't be read.
        """
        path = directory / PARTS_FILE
        if not path.is_file():
            return WHOLE
        try:
            return msgspec.json.decode(read_regular(path), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise AuditError(f"{path} can't be read: {error}") from None


WHOLE = WeightParts()
"""A whole set, and nothing beside it."""
