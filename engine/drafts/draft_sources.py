"""Creates the draft source that the ``--speculative-method`` setting names.

The setting is ``lookup``, ``rollouts`` or ``draft:DIRECTORY``.
"""

from pathlib import Path

from tidegate.engine.drafts.draft_model import ModelDrafts
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.drafts.rollouts import RolloutDrafts
from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.served_model import DtypeChoice, OwnModel, ServedModel, open_model
from tidegate.engine.memory.out_of_memory import blame_memory
from tidegate.engine.scheduling.drafts import DraftSource
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import ConfigError


def open_drafts(
    name: str, model: ServedModel, limits: EngineLimits, dtype: DtypeChoice, runner: Runner
) -> DraftSource:
    """Create the draft source ``name`` for an engine that serves ``model`` with ``runner``.

    Raises:
        ConfigError: there is no such source, or it does not suit the model.
        ModelError: the draft model cannot be computed.
    """
    if not isinstance(model, OwnModel):
        raise ConfigError(
            f"speculative_method={name!r} can't speed up {model.architecture}, which {model.code} "
            "computes one token at a time; leave it out"
        )
    kind, _, directory = name.partition(":")
    if name == "lookup":
        return LookupDrafts()
    if name == "rollouts":
        return RolloutDrafts()
    if kind == "draft" and directory:
        return _model_drafts(Path(directory), model, limits, dtype, runner)
    raise ConfigError(
        "speculative_method must be 'lookup', 'rollouts' or 'draft:DIRECTORY' of a smaller model, "
        f"got {name!r}"
    )


def _model_drafts(
    path: Path, model: OwnModel, limits: EngineLimits, dtype: DtypeChoice, served: Runner
) -> ModelDrafts:
    small = open_model(path, dtype)
    if not isinstance(small, OwnModel):
        raise ConfigError(
            f"speculative_method='draft:{path}': {small.code} computes {small.architecture} one "
            "token at a time; take a draft model of a family that Tidegate computes itself"
        )
    if small.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_method='draft:{path}': its vocabulary has {small.vocab_size} tokens, the "
            f"model's {model.vocab_size}; take a smaller model of the same family"
        )
    with blame_memory(doing=f"for the KV cache of {path}", remedy="lower num_kv_blocks"):
        runner = small.make_runner(num_blocks=limits.num_blocks, block_tokens=limits.block_tokens)
    model.draft = small
    small.attach_to(served.weights, runner.weights)
    return ModelDrafts(runner, small.context_tokens_max, served)
