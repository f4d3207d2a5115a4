"""A run of a pretrained model that is killed, and resumed from its journal."""

import json
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.mortal_trainer import live
from tests.smollm2 import DIRECTORY, needs_smollm2
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.recording import read_trajectories
from tidegate.orchestrator.journal.replay import replay_journal

pytestmark = [pytest.mark.wire, needs_smollm2]

TASKS = ["Who are you?", "Name a river."]

TRAINER = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file
import tidegate
from tests.mortal_trainer import save

model, directory, tasks = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
path = directory / "checkpoint.json"
state = json.loads(path.read_text()) if path.exists() else None
loaded = load_file(model / "model.safetensors")

async def answer(episode, task):
    turn = await episode.generate(messages=[{"role": "user", "content": task}], max_tokens=8)
    return float(len(turn.message["content"]))

with tidegate.serve_sync(
    model=model, engines=1, group_size=2, groups_per_batch=1, max_staleness=1, num_kv_blocks=64,
    run_directory=directory, journal=True, resume=state or True,
) as rollouts:
    def trained(version):
        return {"model.norm.weight": loaded["model.norm.weight"] * 1.05**version}

    if rollouts.is_resumed:  # as the checkpoint has it: what was published last may be lost
        rollouts.publish(loaded | trained(rollouts.version))
    for batch in rollouts.batches(tasks, episode=answer):
        state = rollouts.state_dict(trained=batch)
        save(path, state)
        rollouts.publish(trained(rollouts.version + 1), batches=[batch], partial=True)
        rollouts.ack(state)
        sys.stdout.write("acknowledged\\n")
        sys.stdout.flush()
        sys.stdin.readline()
"""


def test_each_token_of_a_killed_run_is_trained_once_with_the_tag_of_its_weights(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    for batches, status in ((1, -9), (None, 0)):
        arguments = [str(DIRECTORY), str(run), json.dumps(TASKS)]
        command = [sys.executable, "-c", TRAINER, *arguments]
        process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        live(process, batches)
        assert process.returncode == status
    trained = [each.task for each in read_trajectories(run) if each.state == "trained"]
    assert Counter(trained) == dict.fromkeys(map(json.dumps, TASKS), 2)
    assert replay_journal(run).difference is None
    report = audit_run(run / "part-1")  # which has what the killed process sampled of its batches
    assert report.agrees, report.lines()
    assert report.tokens_agreeing == report.tokens > 0
