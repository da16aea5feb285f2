"""A run that is killed and continued equals one that never stopped."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
import yaml

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.assembly import run as build
from cascade_train.engine.loop import Trainer
from cascade_train.engine.lr_schedule import CosineDecaySchedule
from cascade_train.errors import RunError
from tests.integration.runs import SMALL, cut_back, exported_weights, read_metrics, train
from tests.unit.data import tars
from tests.unit.engine.test_tracking import read_events
from tests.unit.models.stages import untrained
from tests.unit.tasks.test_finetune import OBJECTIVES as WITHOUT_STATE
from tests.warm.programs import warm_programs

pytestmark = pytest.mark.slow

FINETUNE = (*SMALL_NETWORK, "task=finetune")
KILLED_IN_STEP = 4
SCRIPT = f"""
import os, signal, sys
from cascade_train.engine.loop import Trainer
from cascade_train.engine.lr_schedule import CosineDecaySchedule

train_step = Trainer.train_step

def killed(self, micro_batches):
    if self.step + 1 == {KILLED_IN_STEP}:
        self.store.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, micro_batches)

Trainer.train_step = killed
from cascade_train.__main__ import launch
sys.exit(launch(sys.argv[1:]))
"""
LONG = (*FINETUNE, "train.max_steps=8", "ema.decay=0.9", "objective=adaptive", "train.micro_batch_size=4")


IN_SHAPES = (
    "model.image_size=96",
    "data=webdataset",
    "data.aspect_ratios=[1/1,2/3,1/2]",
    "validate.share=0.2",
    "validate.every_steps=4",
)


def pictures_in_shapes(folder):
    """Write a tar of 60 pictures of five shapes."""
    sizes = [(96, 96), (96, 100), (64, 128), (144, 96), (90, 200)]
    members = [
        member
        for key in range(60)
        for member in ((f"{key:02d}.png", tars.picture(*sizes[key % 5], tint=4 * key)), (f"{key:02d}.txt", b"a circle"))
    ]
    return f"data.urls={tars.write(folder / 'shapes.tar', members)}"


def test_a_run_goes_on_from_another_folder_with_another_patience(tmp_path, monkeypatch):
    pictures = tmp_path / "here" / "pictures"
    pictures.mkdir(parents=True)
    for number in range(8):
        (pictures / f"a star {number}.png").write_bytes(tars.picture(64, 64, tint=9 * number))
    command = (*FINETUNE, "data=folder", "data.num_workers=0", "objective=adaptive")
    monkeypatch.chdir(pictures.parent)
    run = train(tmp_path / "run", *command, "data.path=pictures", "train.max_steps=2")
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["path"] == str(pictures)
    monkeypatch.chdir(tmp_path)
    patient = ("data.max_wait_seconds=1200", "data.max_unreadable_share=0.5", f"data.path={pictures}")
    train(run, *command, *patient)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]


def test_killed_after_step_three_of_eight_and_continued_gives_the_same_run(tmp_path):
    """With workers, on pictures of several shapes; without either: test_resume_exact.py."""
    overrides = [*LONG, "data.num_workers=2", *IN_SHAPES, pictures_in_shapes(tmp_path)]
    whole = train(tmp_path / "whole", *overrides)
    killed = tmp_path / "killed"
    done = subprocess.run(
        [str(warm_programs() / "python"), "-c", SCRIPT, *SMALL, *overrides, f"run.dir={killed}"],
        env=dict(os.environ),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (killed / "export").exists()
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step_2"]
    train(killed, *overrides)
    assert read_metrics(killed) == read_metrics(whole)
    weights = exported_weights(killed)
    assert all(torch.equal(weight, weights[name]) for name, weight in exported_weights(whole).items())


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A finished run with all of its checkpoints, which nobody changes."""
    return train(tmp_path_factory.mktemp("origin") / "run", *FINETUNE, "checkpoint.keep_last=null")


def test_the_newest_checkpoint_that_verifies_is_taken(origin, tmp_path, caplog):
    whole = train(tmp_path / "whole", *FINETUNE, "train.max_steps=6", "checkpoint.keep_last=null")
    run = shutil.copytree(origin, tmp_path / "run")
    damaged = next(path for path in (run / "checkpoints" / "step_4").iterdir() if path.suffix == ".distcp")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    train(run, *FINETUNE, "train.max_steps=6", "checkpoint.keep_last=null")
    assert damaged.name in caplog.text
    assert read_metrics(run) == read_metrics(whole)


def test_a_new_run_starts_from_a_named_checkpoint(origin, tmp_path):
    step_2 = origin / "checkpoints" / "step_2"
    branch = train(tmp_path / "branch", *FINETUNE, f"run.resume={step_2}", "run.name=branch")
    assert [row["step"] for row in read_metrics(branch)] == [3, 4]
    assert read_metrics(branch) == read_metrics(origin)[2:]


def test_adapters_in_an_untrained_network_are_warned_about(tmp_path, caplog):
    run = train(tmp_path / "run", *SMALL_NETWORK, "task=lora", "train.max_steps=1")
    assert "its last layer begins at zero" in caplog.text
    assert read_metrics(run)[0]["grad_norm"] == 0.0


OBJECTIVES = ["adaptive", "edm"]
OF_STABLE_DIFFUSION = ["ddpm"]


def test_every_objective_is_among_those_that_continue(repository):
    """Those that keep nothing between steps are divided into micro-batches without a run."""
    elsewhere = ["autoencoder_kl", "ddpm_min_snr", "preview", "vqgan"]  # in test_resume_exact.py and files of their own
    stateless = [name for names in WITHOUT_STATE.values() for name in names]
    found = sorted(path.stem for path in (repository / "conf" / "objective").glob("[!_]*.yaml"))
    assert found == sorted([*OBJECTIVES, *OF_STABLE_DIFFUSION, *elsewhere, *stateless])


@pytest.mark.parametrize("objective", [*OBJECTIVES, *OF_STABLE_DIFFUSION])
def test_objectives_continue_with_other_micro_batches_and_workers(tmp_path, objective):
    network = (*untrained("sd_tiny"), "task=finetune") if objective in OF_STABLE_DIFFUSION else FINETUNE
    overrides = [*network, f"objective={objective}", "optimizer.lr=1e-3", "train.max_steps=2"]
    whole = train(tmp_path / "whole", *overrides, "train.micro_batch_size=4", "checkpoint.every_steps=1")
    begun = cut_back(whole, tmp_path / "parts", 1)
    parts = train(begun, *overrides, "train.micro_batch_size=2", "data.num_workers=1")
    for one, other in zip(read_metrics(whole), read_metrics(parts), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_optimizer_settings_of_the_new_start_count(origin, tmp_path):
    def rows(change):
        return read_metrics(train(cut_back(origin, tmp_path / change, 2), *FINETUNE, change))

    same, faster, decaying = read_metrics(origin), rows("optimizer.lr=2e-3"), rows("optimizer.weight_decay=5000")
    assert [row["lr"] for row in faster] == [1e-4, 1e-4, 2e-3, 2e-3]
    for changed in (faster, decaying):
        assert changed[2] == {**same[2], "lr": changed[2]["lr"]}, "the loss of step 3 precedes its update"
        assert changed[3]["grad_norm"] != pytest.approx(same[3]["grad_norm"], rel=1e-3)


STEEP = ("lr_scheduler.warmup_steps=0", "lr_scheduler.min_factor=0")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with an average, which others continue from the checkpoint of its second step."""
    return train(tmp_path_factory.mktemp("stopped") / "run", *FINETUNE, "ema.decay=0.9")


def test_a_changed_schedule_length_and_cadence_are_applied_and_recorded(stopped, tmp_path):
    changed = {"train.max_steps": [4, 5], "log.every_steps": [10, 1], "train.max_grad_norm": [1.0, 0.5]}
    run = cut_back(stopped, tmp_path / "run", 2)
    given = [f"{key}={new}" for key, (_, new) in changed.items()]
    train(run, *FINETUNE, "ema.decay=0.9", "lr_scheduler=cosine", *STEEP, *given)
    before, after = read_metrics(stopped), read_metrics(run)
    assert after[:2] == before[:2]
    assert after[2] == {**before[2], "lr": after[2]["lr"]}, "what step 3 measures precedes its update"
    cosine = CosineDecaySchedule(warmup_steps=0, min_factor=0.0)
    expected = [1e-4, 1e-4, *(1e-4 * cosine.factor(step, 5) for step in (3, 4, 5))]
    assert [row["lr"] for row in after] == pytest.approx(expected)
    (line,) = map(json.loads, (run / "config_history.jsonl").read_text().splitlines())
    assert line["step"] == 2
    assert {key: line["changes"][key] for key in changed} == changed
    assert {"lr_scheduler._target_", "run.dir"} < line["changes"].keys()


def test_a_changed_decay_of_the_average_changes_the_average_alone(stopped, tmp_path):
    run = train(cut_back(stopped, tmp_path / "run", 2), *FINETUNE, "ema.decay=0.2")
    assert read_metrics(run) == read_metrics(stopped)
    average, other = exported_weights(stopped), exported_weights(run)
    assert sum(not torch.equal(value, other[name]) for name, value in average.items()) > len(average) / 2


def test_an_average_cannot_begin_or_end_and_the_refusal_shows_the_difference(stopped, tmp_path, capfd):
    run = cut_back(stopped, tmp_path / "run", 2)
    assert launch([*SMALL, f"run.dir={run}", *FINETUNE, "optimizer.lr=1"]) == 2
    assert "holds a run of another config:\n  ema.decay: 0.9 -> None\nRemedy" in capfd.readouterr().err
    assert read_metrics(run) == read_metrics(stopped)
    assert not (run / "config_history.jsonl").exists()


def test_a_run_that_died_before_its_first_checkpoint_starts_over_with_its_metrics_and_tracker(tmp_path, monkeypatch):
    stopping = [*FINETUNE, "tracker=tensorboard", "checkpoint.every_steps=null", "log.every_steps=1"]
    die_in_step(monkeypatch, 3)
    assert launch([*SMALL, f"run.dir={tmp_path / 'run'}", *stopping]) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    monkeypatch.undo()
    run = train(tmp_path / "run", *stopping)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert [each.step for each in read_events(run / "tensorboard").Scalars("loss")] == [1, 2, 3, 4]


def die_in_step(monkeypatch, number):
    train_step = Trainer.train_step

    def dying(self, micro_batches):
        if self.step + 1 == number:
            raise RunError("a stroke of lightning")
        return train_step(self, micro_batches)

    monkeypatch.setattr(Trainer, "train_step", dying)


def test_a_run_that_died_before_its_exports_writes_them_at_the_next_start(origin, tmp_path, monkeypatch):
    def die(*_):
        raise RunError("a stroke of lightning")

    monkeypatch.setattr(build, "write_exports", die)
    assert launch([*SMALL, f"run.dir={tmp_path / 'run'}", *FINETUNE]) == 1
    monkeypatch.undo()
    run = train(tmp_path / "run", *FINETUNE)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    weights = exported_weights(origin)
    assert all(torch.equal(value, weights[name]) for name, value in exported_weights(run).items())


def test_epochs_end_a_run_and_more_of_them_continue_it(tmp_path):
    overrides = [*FINETUNE, "data.samples=24", "train.max_steps=100"]
    assert len(read_metrics(train(tmp_path / "run", *overrides, "train.max_epochs=1"))) == 3
    assert len(read_metrics(train(tmp_path / "run", *overrides, "train.max_epochs=2"))) == 6


def test_examples_to_see_end_a_run_and_more_of_them_continue_it(tmp_path):
    overrides = [*FINETUNE, "train.max_steps=100"]
    assert len(read_metrics(train(tmp_path / "run", *overrides, "data.num_examples_to_see=17"))) == 3
    assert len(read_metrics(train(tmp_path / "run", *overrides, "data.num_examples_to_see=32"))) == 4


def test_samples_that_other_batches_have_seen_count(tmp_path):
    overrides = [*FINETUNE, "data.samples=16", "data.on_change=restart"]
    train(tmp_path / "run", *overrides, "train.max_steps=3", "train.global_batch_size=2")
    run = train(tmp_path / "run", *overrides, "train.max_steps=100", "train.max_epochs=2")
    assert [row["samples_seen"] for row in read_metrics(run)] == [2, 4, 6, 14, 22, 30, 38]


def test_other_batches_and_other_shapes_are_refused_or_continue_by_choice(tmp_path, capfd, caplog):
    overrides = [*FINETUNE, *IN_SHAPES[:3], pictures_in_shapes(tmp_path), "data.num_workers=0"]
    run = train(tmp_path / "run", *overrides, "train.max_steps=2")
    other = [*overrides, "data.aspect_ratios=[1/1,1/2]", "train.max_steps=4", "train.global_batch_size=4"]
    assert launch([*SMALL, f"run.dir={run}", *other]) == 2
    refused = capfd.readouterr().err
    assert "data.aspect_ratios[1]: 2/3 -> 1/2" in refused
    assert "train.global_batch_size: 8 -> 4" in refused
    train(run, *other, "data.on_change=restart")
    assert [row["samples_seen"] for row in read_metrics(run)] == [8, 16, 20, 24]
    assert "epoch 1 begins." in caplog.text
    smaller = [*overrides, "train.max_steps=6", "train.global_batch_size=2", "data.on_change=restart"]
    train(run, *smaller, "data.aspect_ratios=[1/1,1/2]")
    assert "Epoch 1 continues with global batches of 2." in caplog.text
