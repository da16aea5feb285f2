"""Checkpoints that stay without their optimizer state."""

import logging

import pytest
import torch

from cascade_train.engine.checkpoint.folder import Retention, find_fault, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.errors import ConfigError

RULE = Retention(keep_last=1, keep_every_steps=2, keep_optimizer=False)


def state(seed, optimizer=True):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=generator)
    phase = {"weights": {"optimizer": weight}, "ema": {"optimizer": weight / 2}}
    if optimizer:
        phase["optimizer"] = {"state": {"a": {"momentum": weight * 2}}, "param_groups": {"a.lr": 0.1}}
    return {"phases": {"train": phase}, "task": {"optimizer": {"seen": seed}}}


def weights(loaded):
    phase = loaded["phases"]["train"]
    return phase["weights"]["optimizer"], phase["ema"]["optimizer"]


@pytest.fixture
def store(world, tmp_path):
    store = CheckpointStore(tmp_path, retention=RULE)
    for step in (2, 3, 4, 5):
        store.save(step, state(step), {"step": step})
    return store


def test_those_that_are_not_new_lose_it_and_the_newest_keeps_it(store):
    assert store.steps() == [2, 4, 5]
    has = {step: read_manifest(store.directory / f"step_{step}").has_optimizer for step in store.steps()}
    assert has == {2: False, 4: False, 5: True}
    sizes = {step: (store.directory / f"step_{step}" / "__0_0.distcp").stat().st_size for step in store.steps()}
    stamps = {step: read_manifest(store.directory / f"step_{step}").stamp for step in store.steps()}
    assert len(set(stamps.values())) == 3
    assert stamps[2] == read_manifest(store.directory / "step_2").weights, "as it was saved"
    assert sizes[2] == sizes[4] < 0.75 * sizes[5]


@pytest.mark.parametrize("step", [2, 4, 5])
def test_weights_average_and_task_are_what_they_were(store, step):
    path = store.directory / f"step_{step}"
    assert find_fault(path) is None
    loaded = state(0, optimizer=False)
    assert store.load(path, loaded, optimizer=False) == {"step": step}
    assert all(torch.equal(a, b) for a, b in zip(weights(loaded), weights(state(step)), strict=True))
    assert loaded["task"] == {"optimizer": {"seen": step}}


def test_a_run_cannot_continue_from_it_and_is_told_why(store):
    with pytest.raises(ConfigError, match=r"step_4 has no optimizer state any more .* Remedy: a later checkpoint"):
        store.load(store.directory / "step_4", state(0))


def test_the_newest_to_continue_from_has_its_optimizer(store, caplog):
    (store.directory / "step_5" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert store.newest() is None
    assert "step_4 has no optimizer state any more and is skipped" in caplog.text
    assert store.newest(has_optimizer=False) == store.directory / "step_4"


def test_a_damaged_one_is_not_copied_into_one_that_verifies(world, tmp_path, caplog):
    store = CheckpointStore(tmp_path, retention=RULE)
    store.save(2, state(2), {})
    file = tmp_path / "step_2" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING):
        store.save(3, state(3), {})
    assert "the optimizer state of step 2 could not be dropped: " in caplog.text
    assert "keeps its optimizer state, because it is damaged: __0_0.distcp does not match" in caplog.text
    assert read_manifest(tmp_path / "step_2").has_optimizer
    assert find_fault(tmp_path / "step_2") is not None
    assert store.steps() == [2, 3]


def test_a_metric_that_was_never_logged_is_said_once(world, tmp_path, caplog):
    rule = Retention(keep_last=1, keep_best=1, best_metric="validate/loss")
    store = CheckpointStore(tmp_path / "checkpoints", retention=rule, metrics=tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with caplog.at_level(logging.WARNING):
        store.save(1, state(1), {})
        store.save(2, state(2), {})
    assert caplog.text.count("has no such value up to step") == 1
    assert "up to step 1" in caplog.text
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0, "validate/loss": 0.25}\n')
    path = store.save(4, state(4), {"step": 4})
    assert read_manifest(path).facts == {"step": 4, "best": {"metric": "validate/loss", "value": 0.25, "step": 3}}
    store.save(5, state(5), {})
    assert store.steps() == [5], "of equals the later one is the best"
