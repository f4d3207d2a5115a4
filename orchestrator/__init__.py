"""Orchestrator of a run: its scheduler, client handles, engine fleet, journal and settings.

Started by ``tidegate.serve`` and ``tidegate serve``, on a thread of the trainer's process. Talks to
engine processes over ZeroMQ only (``transport/``), and never imports ``engine/``.

A sampled token's way from an engine's decode step to the trainer's ``Batch``, module by module:

1. Engine: ``engine/loop.py`` runs the step that ``engine/scheduling/scheduler.py`` plans;
   ``engine/execution/runner.py`` computes and ``engine/sampling/sampling.py`` samples. The token is
   appended in ``engine/scheduling/sequences.py``, put into columns by
   ``engine/scheduling/step_columns.py``, and sent by ``engine/link.py``. Steps that only continue
   the turns of the step before are shorter: ``engine/scheduling/decode_batch.py`` appends and makes
   the columns, and ``kernels/layers.py`` samples for turns without options.
2. Wire: ``transport/messages.py`` (``Step``), ``transport/streams.py`` (replay, credit),
   ``transport/dealer.py``, ``transport/router.py``.
3. Arrival: ``scheduler/engine_side.py``, ``fleet/fleet.py``, ``core/step_checks.py``,
   ``scheduler/scheduler.py``, ``core/core.py``, ``core/turns.py``. ``core/filing.py`` appends the
   token to ``core/rollout.py``, and ``core/ledger.py`` counts it.
4. End of the turn and of the episode: ``episodes/episode.py``, ``episodes/generated_turn.py``,
   ``episodes/runner.py``, ``core/groups.py``.
5. Batch: ``policies/asynchrony.py`` and ``policies/consumption.py`` select it,
   ``core/hand_over.py`` keeps it, ``scheduler/trainer_side.py`` passes it to
   ``scheduler/batch_requests.py``, which offers it to ``trainer/batch_handle.py``, and
   ``batches/batches.py`` makes tensors.

The way of weights from ``publish()`` to an engine's swap:

1. Call: ``trainer/rollouts.py``, ``trainer/weight_updates.py``. ``core/weight_control.py`` gets
   all events of weights and pauses. The version is reserved by ``core/weight_versions.py``, whose
   commands ``weight_sync/control.py`` carries out; then ``weight_sync/state_dict.py`` and
   ``transport/weight_channels/`` write the tensors.
2. Messages ``start`` and ``update``: ``core/weight_content.py``, ``scheduler/engine_side.py``,
   ``fleet/fleet.py``, and the wire to ``engine/link.py`` and ``engine/loop.py``.
3. Staging, in a thread of the engine: ``engine/weights/staging.py``,
   ``engine/weights/weight_store.py``.
4. Release, once all engines have staged: ``core/target_versions.py``, ``core/core.py``.
5. Swap, after ``finish``: ``engine/scheduling/pauses.py`` says when, ``engine/loop.py`` and
   ``engine/execution/runner.py`` swap.
"""
