"""The real lm-eval scores texts over the server: `make test-lm-eval`."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import tidegate
from tests.models import EOS_TOKEN

PYTHON = os.environ.get("TIDEGATE_LM_EVAL_PYTHON", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON, reason="TIDEGATE_LM_EVAL_PYTHON must name a Python with lm-eval"
    ),
]

PAIRS = [
    ["The capital of France is", " Paris"],
    ["The capital of France is", " London, of course"],
    ["2 + 2 =", " 4"],
    ["Who", "?"],
]


def test_lm_evals_log_likelihoods_are_the_models(
    server: tidegate.VLLMServer, model: Path, tmp_path: Path
) -> None:
    import transformers

    shutil.copy(model / "tokenizer.json", tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("lm_eval_scores.py")
    done = subprocess.run(
        [PYTHON, str(script), server.url, str(tmp_path), json.dumps(PAIRS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    scores = json.loads(done.stdout.splitlines()[-1])
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for (context, continuation), (logprob, is_greedy) in zip(PAIRS, scores, strict=True):
        whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
        start = len(tokenizer.encode(context, add_special_tokens=False).ids)
        with torch.no_grad():
            expected = torch.log_softmax(reference(torch.tensor([whole])).logits[0].float(), -1)
        rows, ids = expected[start - 1 : -1], torch.tensor(whole[start:])
        assert logprob == pytest.approx(rows.gather(1, ids[:, None]).sum().item(), abs=1e-3)
        assert is_greedy == bool((rows.argmax(-1) == ids).all())
