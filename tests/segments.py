"""Lists the anonymous weight segments that this process has open."""

import os
from contextlib import suppress
from pathlib import Path


def weights_open() -> set[str]:
    """Return the open files and mappings of weight segments, ignoring other programs' shared
    memory."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own descriptor is closed by now
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {each for each in (*files, *mappings) if "memfd:tidegate-weights" in each}
