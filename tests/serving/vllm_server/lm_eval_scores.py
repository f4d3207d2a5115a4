"""Script of a Python with lm-eval: scores continuations by its ``local-completions`` model."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main() -> None:
    url, model, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    scorer = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="tiny",
        tokenizer=model,
        tokenizer_backend="huggingface",
        batch_size=2,
        max_length=512,
    )
    asked = [Instance("loglikelihood", {}, tuple(pair), index) for index, pair in enumerate(pairs)]
    sys.stdout.write(json.dumps(scorer.loglikelihood(asked)) + "\n")


if __name__ == "__main__":
    main()
