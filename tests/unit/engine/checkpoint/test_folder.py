"""Which checkpoints stay, and why."""

import json

import pytest

from cascade_train.engine.checkpoint.folder import Manifest, Retention, last_logged
from cascade_train.errors import ConfigError


def manifest(step, value=None, name=None):
    best = {} if value is None else {"best": {"metric": "validate/loss", "value": value, "step": step}}
    return Manifest(step=step, files={}, facts=best, name=name)


def kept(rule, manifests):
    return [step for step, reasons in rule.reasons({each.step: each for each in manifests}).items() if reasons]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": 2}, [8, 10]),
        ({"keep_last": 1, "keep_every_steps": 4}, [4, 8, 10]),
        ({"keep_every_steps": 4}, [2, 4, 6, 8, 10]),
    ],
)
def test_the_last_and_every_so_many_stay(rule, expected):
    assert kept(Retention(**rule), [manifest(step) for step in (10, 8, 6, 4, 2)]) == expected


@pytest.mark.parametrize(("mode", "expected"), [("min", [3, 5, 6]), ("max", [1, 2, 6])])
def test_the_best_by_a_metric_stay_and_of_equals_the_later(mode, expected):
    values = {1: 0.9, 2: 0.9, 3: 0.1, 4: 0.2, 5: 0.2, 6: 0.5}
    rule = Retention(keep_last=1, keep_best=2, best_metric="validate/loss", best_mode=mode)
    assert kept(rule, [manifest(step, value) for step, value in values.items()]) == expected


def test_checkpoints_without_the_metric_or_with_another_are_not_ranked():
    rule = Retention(keep_last=1, keep_best=1, best_metric="loss")
    assert kept(rule, [manifest(1, 0.1), manifest(2), manifest(3)]) == [3]


def test_a_name_keeps_a_checkpoint_and_every_reason_is_told():
    rule = Retention(keep_last=1, keep_every_steps=2, keep_best=1, best_metric="validate/loss")
    manifests = {1: manifest(1, name="good"), 2: manifest(2, 0.5), 3: manifest(3)}
    assert rule.reasons(manifests) == {1: ["named good"], 2: ["every 2", "number 1 by validate/loss"], 3: ["newest 1"]}


@pytest.mark.parametrize("key", ["keep_last", "keep_every_steps", "keep_best"])
def test_a_number_below_one_is_refused(key):
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}=0 must be at least 1, or null to switch it off"):
        Retention(**{key: 0})


def test_the_last_value_logged_up_to_a_step_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "loss": n / 2, **({"validate/loss": n * 1.0} if n % 3 == 0 else {})} for n in range(1, 9)]
    rows[6]["loss"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_logged(path, "validate/loss", step=8) == {"metric": "validate/loss", "value": 6.0, "step": 6}
    assert last_logged(path, "validate/loss", step=5) == {"metric": "validate/loss", "value": 3.0, "step": 3}
    assert last_logged(path, "loss", step=7) == {"metric": "loss", "value": 3.0, "step": 6}
    assert last_logged(path, "validate/loss", step=2) is None
    assert last_logged(path, "psnr", step=8) is None


def test_nothing_is_found_where_nothing_was_logged(tmp_path):
    assert last_logged(tmp_path / "absent", "loss", step=1) is None
    (tmp_path / "empty").touch()
    assert last_logged(tmp_path / "empty", "loss", step=1) is None
