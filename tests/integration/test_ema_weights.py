"""An average that starts from given weights: exported as it began where nothing is added, and restored exactly."""

import re

import pytest
import torch

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL, exported_weights, once, read_metrics, torchrun, train

pytestmark = pytest.mark.slow

FINETUNE = (*SMALL_NETWORK, "task=finetune")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A run whose weights were drawn from another seed."""
    return train(tmp_path_factory.mktemp("given") / "run", *FINETUNE, "run.seed=5", "train.max_steps=1")


def test_the_export_is_the_given_average_moved_by_the_steps_taken(given, tmp_path):
    options = (*FINETUNE, "optimizer.lr=1e-3")
    average = exported_weights(train(tmp_path / "run", *options, "ema.decay=0.999999", f"ema.weights={given}"))
    began, trained = exported_weights(given), exported_weights(train(tmp_path / "plain", *options))
    for name, value in average.items():
        torch.testing.assert_close(value, began[name], atol=2e-5, rtol=0)
    assert any((value - trained[name]).abs().max() > 0.05 for name, value in average.items())


def test_a_resumed_run_keeps_the_average_it_had(given, tmp_path):
    options = (*FINETUNE, "ema.decay=0.5", f"ema.weights={given}")
    whole = train(tmp_path / "whole", *options)
    train(tmp_path / "part", *options, "train.max_steps=2")
    part = train(tmp_path / "part", *options)
    assert read_metrics(part) == read_metrics(whole)
    expected = exported_weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in exported_weights(part).items())


def test_a_short_run_exports_what_it_learnt_and_the_weights_themselves_where_asked(tmp_path, caplog):
    options = (*FINETUNE, "optimizer.lr=1e-3", "ema.decay=0.9999")
    trained = exported_weights(train(tmp_path / "plain", *FINETUNE, "optimizer.lr=1e-3"))
    run = train(tmp_path / "run", *options)
    assert "of the average" not in caplog.text
    average = exported_weights(run)
    constant = exported_weights(train(tmp_path / "constant", *options, "ema.ramp=false"))
    assert re.search(r"ema.decay=0.9999: .*after 4 updates, 0.04% of .*weights=trained", caplog.text)
    moved = {name: trained[name] - value for name, value in constant.items()}  # which holds hardly any of it
    kept = sum(float((average[name] - constant[name]).norm() ** 2) for name in moved)
    assert kept > 0.4 * sum(float(value.norm() ** 2) for value in moved.values())
    assert launch(["export", f"from={run}", "weights=trained", f"out={tmp_path / 'plain' / 'copy' / 'export'}"]) == 0
    assert all(torch.equal(trained[n], value) for n, value in exported_weights(tmp_path / "plain" / "copy").items())


@pytest.mark.parametrize("never", ["ema.every_steps=5", "ema.start_step=5", "ema.start_step=3 ema.every_steps=5"])
def test_an_average_without_an_update_is_refused(tmp_path, capfd, never):
    overrides = once(*SMALL, *FINETUNE, "ema.decay=0.9", *never.split(), f"run.dir={tmp_path / 'run'}")
    assert launch(overrides) == 2
    assert "would get no update in a run of 4 steps" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_ranks_that_share_the_weights_share_the_given_average(given, tmp_path):
    overrides = [*FINETUNE, "ema.decay=0.5", f"ema.weights={given}", "train.global_batch_size=8",
                 "train.max_steps=2", "sample.every_steps=null", "train.micro_batch_size=4"]  # fmt: skip
    done = torchrun(2, *overrides, "parallel=fsdp", "run.dir=two", cwd=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
    one = exported_weights(train(tmp_path / "one", *overrides))
    for name, value in exported_weights(tmp_path / "two").items():
        torch.testing.assert_close(value, one[name], atol=1e-4, rtol=1e-4)
