"""Coverage-guided fuzzing of the frame decoders with ``atheris``, which is installed separately.

``pip install atheris`` into a virtual environment beside Tidegate, then ``python -m
benchmarks.fuzz_atheris -runs=1000000``; options are libFuzzer's. Not a dependency, because its
wheels exist for some versions of Python and Linux only. A command that no module imports. Built on
``fuzz_fleet.py``, ``fuzz_frames.py`` and atheris.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["tidegate"]):
    from benchmarks.fuzz_fleet import FuzzedFleet
    from benchmarks.fuzz_frames import (
        ENGINE_EXAMPLES,
        ORCHESTRATOR_EXAMPLES,
        FrameMaker,
        LiveState,
    )
    from tidegate.errors import BadFrame
    from tidegate.transport.messages import decode_from_orchestrator, encode

FRAMES_PER_FLEET = 10_000
"""Frames after which the fleet is recreated, so that a finding does not depend on a long
history."""


class Target:
    """Fuzz target: an engine's decoder, and a whole fleet and core."""

    def __init__(self) -> None:
        self._fleet = FuzzedFleet(seed=0)
        self._frames = 0

    def __call__(self, frame: bytes) -> None:
        """Process one frame; any exception but BadFrame is a finding."""
        with contextlib.suppress(BadFrame):
            decode_from_orchestrator(frame)
        self._frames += 1
        if self._frames % FRAMES_PER_FLEET == 0:
            self._fleet = FuzzedFleet(seed=0)
        self._fleet.receive(b"healthy", frame)


def mutate(frame: bytes, bytes_max: int, seed: int) -> bytes:
    """Mutate a frame by libFuzzer, which mutates bytes without MessagePack's structure, or by our
    mutator."""
    if seed % 2:
        return bytes(atheris.Mutate(frame, len(frame)))
    return FrameMaker(seed, ENGINE_EXAMPLES).mutate(frame)[:bytes_max]


def main() -> None:
    """Start fuzzing from one valid message of each kind."""
    with tempfile.TemporaryDirectory() as directory:
        for number, example in enumerate((*ENGINE_EXAMPLES, *ORCHESTRATOR_EXAMPLES)):
            frame = encode(example(LiveState(engine="healthy", turns=[0, 1])))
            (Path(directory) / str(number)).write_bytes(frame)
        atheris.Setup([*sys.argv, directory], Target(), custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
