"""Checkpoints by the real SDK: saved, listed, loaded, expired and deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate

tinker = pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tests.serving.tinker_server.sdk_calls import new_client, train  # noqa: E402

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(model: Path, state: Path) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(model=model, engines=1, state_directory=state) as server:
        yield server


@pytest.fixture
def rest_client(service: Any) -> Any:
    return service.create_rest_client()


def trained_client(service: Any, model: Path, steps: int = 3) -> Any:
    client = new_client(service, model)
    train(client, steps)
    return client


def test_training_continues_from_a_checkpoint_as_if_it_had_not_stopped(
    service: Any, model: Path
) -> None:
    client = trained_client(service, model)
    path = client.save_state("third").result().path
    assert path == f"tinker://{client.model_id}/weights/third"
    expected = train(client, 3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 4
    assert train(resumed, 3) == expected
    fresh = service.create_training_client_from_state(path).result()
    losses = train(fresh, 3)
    assert losses[0] == expected[0]
    assert losses != expected  # Adam began anew


def test_a_checkpoint_is_loaded_as_the_first_request_of_a_model_only(
    service: Any, model: Path
) -> None:
    client = trained_client(service, model)
    path = client.save_state("loaded").result().path
    with pytest.raises(tinker.RequestFailedError, match="LoadWeights is not permitted after other"):
        client.load_state(path).result()
    other = new_client(service, model)
    other.load_state_with_optimizer(path).result()
    assert train(other) == train(client)
    sampler_path = client.save_weights_for_sampler("loaded").result().path
    with pytest.raises(tinker.BadRequestError, match="has no optimizer state to train on"):
        service.create_training_client_from_state(sampler_path).result()


def test_a_checkpoint_is_replaced_only_if_its_client_says_so(service: Any, model: Path) -> None:
    client = trained_client(service, model, steps=1)
    path = client.save_state("same").result().path
    train(client)
    with pytest.raises(tinker.RequestFailedError, match="exists, and checkpoints do not change"):
        client.save_state("same").result()
    assert client.save_state("same", overwrite=True).result().path == path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed) == train(client)


def test_runs_and_checkpoints_are_listed_with_what_the_sdk_shows_of_them(
    service: Any, rest_client: Any, model: Path
) -> None:
    client = trained_client(service, model, steps=1)
    before = rest_client.list_user_checkpoints(limit=1).result().cursor.total_count
    path = client.save_state("listed", user_metadata={"note": "first"}).result().path
    client.save_weights_for_sampler("listed", ttl_seconds=3600).result()
    client.save_weights_and_get_sampling_client().result()  # ephemeral: in no list

    of_run = {
        each.checkpoint_id: each
        for each in rest_client.list_checkpoints(client.model_id).result().checkpoints
    }
    assert of_run.keys() == {"weights/listed", "sampler_weights/listed"}
    training, sampler = of_run["weights/listed"], of_run["sampler_weights/listed"]
    assert (training.checkpoint_type, sampler.checkpoint_type) == ("training", "sampler")
    assert training.tinker_path == path
    assert training.user_metadata == {"note": "first"}
    assert training.size_bytes > sampler.size_bytes > 0  # it has the optimizer's state, too
    assert training.expires_at is None
    assert sampler.expires_at > sampler.time
    page = rest_client.list_user_checkpoints(limit=1, offset=1).result()
    assert [each.tinker_path for each in page.checkpoints] == [path]
    assert page.cursor.total_count == before + 2

    run = rest_client.get_training_run_by_tinker_path(path).result()
    assert run in rest_client.list_training_runs().result().training_runs
    assert (run.training_run_id, run.base_model, run.lora_rank) == (client.model_id, str(model), 4)
    assert run.last_checkpoint == training
    assert run.last_sampler_checkpoint == sampler
    info = rest_client.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (str(model), 4, False)
    session = rest_client.get_session(client.model_id.partition(":")[0]).result()
    assert client.model_id in session.training_run_ids
    assert len(session.sampler_ids) == 1


def test_a_deleted_or_expired_checkpoint_is_gone_and_its_name_is_free(
    service: Any, rest_client: Any, model: Path, state: Path
) -> None:
    client = trained_client(service, model, steps=1)
    paths = [client.save_state(name).result().path for name in ("kept", "deleted", "expired")]
    rest_client.delete_checkpoint_from_tinker_path(paths[1]).result()
    rest_client.set_checkpoint_ttl_from_tinker_path(paths[2], 0).result()
    left = rest_client.list_checkpoints(client.model_id).result().checkpoints
    assert [each.tinker_path for each in left] == paths[:1]
    assert not (state / client.model_id / "weights" / "deleted").exists()
    for path in paths[1:]:
        with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
            service.create_training_client_from_state(path).result()
        with pytest.raises(tinker.NotFoundError):
            rest_client.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="name the checkpoint as weights/NAME"):
        rest_client.delete_checkpoint(client.model_id, "kept").result()
    assert client.save_state("expired").result().path == paths[2]


@pytest.mark.parametrize("name", ["../escape", "a/b", ".hidden", "x" * 129])
def test_a_name_that_is_no_plain_name_is_refused(service: Any, model: Path, name: str) -> None:
    client = new_client(service, model)
    with pytest.raises(tinker.RequestFailedError, match="a checkpoint's name is 1 to 128 letters"):
        client.save_state(name).result()
