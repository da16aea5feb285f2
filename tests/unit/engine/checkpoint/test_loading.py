"""What a save adds to the manifest for the retention's metric, and weights that load without the optimizer."""

import logging

import torch

from cascade_train.engine.checkpoint.folder import Retention, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore


def state(seed, optimizer=True):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=generator)
    phase = {"weights": {"optimizer": weight}, "ema": {"optimizer": weight / 2}}
    if optimizer:
        phase["optimizer"] = {"state": {"a": {"momentum": weight * 2}}, "param_groups": {"a.lr": 0.1}}
    return {"phases": {"train": phase}, "task": {"optimizer": {"seen": seed}}}


def test_weights_average_and_task_load_without_the_optimizers_state(world, tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(2, state(2), {"step": 2})
    loaded, expected = state(0, optimizer=False), state(2)
    assert store.load(path, loaded, optimizer=False) == {"step": 2}
    for kind in ("weights", "ema"):
        assert torch.equal(*(each["phases"]["train"][kind]["optimizer"] for each in (loaded, expected)))
    assert loaded["task"] == {"optimizer": {"seen": 2}}


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
