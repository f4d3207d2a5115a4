"""Which segments of weights has this process open? They have no names, so they show only here."""

import os
from contextlib import suppress
from pathlib import Path


def weights_open() -> set[str]:
    """Files and mappings of them; what other programs keep in /dev/shm is no concern of ours."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself is closed by now
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {each for each in (*files, *mappings) if "memfd:tidegate-weights" in each}
