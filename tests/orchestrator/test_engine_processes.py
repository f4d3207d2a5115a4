"""Does a run let go of an engine's process once, and of nothing else?"""

import asyncio
import os
import sys
from pathlib import Path

from tidegate.orchestrator.fleet.processes import EngineProcess, end_all

ENDS_WHEN_LET = """
import signal, sys

def end(*_):
    open(sys.argv[2]).read(1)
    print("was let")
    sys.exit()

signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
signal.pause()
"""
"""An engine that tells when it is there, and asked to end does so on somebody's word."""


async def test_who_waits_twice_for_a_process_closes_nobody_elses_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = EngineProcess("engine-0", [sys.executable, "-c", ""], tmp_path / "log")
    ended = asyncio.Event()
    process.watch(asyncio.get_running_loop(), lambda _: ended.set())
    async with asyncio.timeout(60):
        await ended.wait()
    process.join()
    other, _ = ends = os.pipe()
    try:
        process.join()
        process.unwatch(asyncio.get_running_loop())
        assert os.fstat(other)
    finally:
        for end in ends:
            os.close(end)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_the_loop_goes_on_while_an_engine_takes_its_time_to_end(tmp_path: Path) -> None:
    there, word = tmp_path / "there", tmp_path / "word"
    for fifo in (there, word):
        os.mkfifo(fifo)
    command = [sys.executable, "-c", ENDS_WHEN_LET, str(there), str(word)]
    process = EngineProcess("engine-0", command, tmp_path / "log")
    await asyncio.to_thread(there.read_text)
    end = os.open(word, os.O_RDWR)  # so that neither side waits for the other to open it
    try:
        asyncio.get_running_loop().call_soon(os.write, end, b".")
        await end_all([process])
    finally:
        os.close(end)
    assert not process.is_running
    assert process.log.read_text() == "was let\n"  # not killed, as what never ends is
