"""Claiming a run directory, what is refused, and what a run says about where it ran."""

import contextlib
import json
import shutil
import signal
import subprocess
from copy import deepcopy

import pytest
import torch
import yaml

from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.run import directory as module
from cascade_train.engine.run.directory import claim, claimed
from cascade_train.errors import ConfigError, Interrupted, RunError
from cascade_train.signals import Signals

CONFIG = {
    "run": {"name": "lora-c_tiny", "resume": "auto", "seed": 0},
    "train": {"max_steps": 8, "max_epochs": None, "global_batch_size": 8},
    "optimizer": {"lr": 1e-5},
    "data": {"urls": ("a.tar", "b.tar"), "num_workers": 0},
    "compile": "off",
}


def changed(**dotted):
    config = deepcopy(CONFIG)
    for key, value in dotted.items():
        node, _, name = key.rpartition("__")
        (config[node] if node else config)[name] = value
    return config


@pytest.fixture
def directory(world, tmp_path):
    return tmp_path / "runs" / "one"


def save(directory, *steps, finished=False):
    store = CheckpointStore(directory / "checkpoints")
    saved = [store.save(step, {"a": torch.zeros(3)}, {"finished": finished}) for step in steps][-1]
    if finished:
        (directory / "export").mkdir(exist_ok=True)
        (directory / "export" / "exported.json").write_text(json.dumps({"step": steps[-1]}) + "\n")
    return saved


def go_on(directory, config=CONFIG, resume="auto"):
    """Claim a run and record its start."""
    run = claim(directory, config=config, resume=resume)
    run.record_start({})
    run.lock.release()
    return run


def damage(path):
    (path / "manifest.json").unlink()


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.name != ".lock")


def history(directory):
    return [json.loads(line) for line in (directory / "config_history.jsonl").read_text().splitlines()]


def test_a_new_run_has_its_config_and_environment(directory):
    run = claim(directory, config=CONFIG, resume="auto")
    assert run.path == directory
    assert (run.resume_from, run.finished, run.created) == (None, False, True)
    assert listing(directory.parent) == ["one", "one/config.yaml", "one/environment.json"]
    saved = yaml.safe_load((directory / "config.yaml").read_text())
    assert saved == {**CONFIG, "data": {"urls": ["a.tar", "b.tar"], "num_workers": 0}}
    assert json.loads((directory / "environment.json").read_text())["ranks"] == 1


def test_a_run_continues_from_its_newest_checkpoint_that_verifies(directory):
    claim(directory, config=CONFIG, resume="auto")
    save(directory, 2, 4, 6)
    damage(directory / "checkpoints" / "step_6")
    run = go_on(directory)
    assert run.resume_from == directory / "checkpoints" / "step_4"
    assert (run.finished, run.created) == (False, False)
    assert [(line["step"], line["changes"]) for line in history(directory)] == [(4, {})]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(directory):
    claim(directory, config=CONFIG, resume="auto")
    damage(save(directory, 2))
    with pytest.raises(RunError, match=r"none of the checkpoints in .* verifies \(steps \[2\]\)"):
        claim(directory, config=CONFIG, resume="auto")


def test_never_refuses_a_run_that_is_there(directory):
    claim(directory, config=CONFIG, resume="auto").lock.release()
    before = listing(directory)
    with pytest.raises(ConfigError, match=r"already holds a run and run\.resume=never.*another run\.name"):
        claim(directory, config=CONFIG, resume="never")
    assert listing(directory) == before
    assert not (directory / ".lock").exists()


def test_another_config_is_refused_with_the_difference(directory):
    claim(directory, config=CONFIG, resume="auto")
    save(directory, 2)
    before = listing(directory), (directory / "config.yaml").read_text()
    other = changed(train__global_batch_size=16, data__urls=["c.tar"], optimizer__lr=3e-4)
    with pytest.raises(
        ConfigError,
        match=r"holds a run of another config:\n  data\.urls\[0\]: a\.tar -> c\.tar\n"
        r"  train\.global_batch_size: 8 -> 16\nRemedy: another run\.name",
    ):
        claim(directory, config=other, resume="auto")
    assert (listing(directory), (directory / "config.yaml").read_text()) == before


def test_a_start_that_trained_nothing_may_be_repeated_with_another_config(directory):
    claim(directory, config=CONFIG, resume="auto")
    run = go_on(directory, changed(train__global_batch_size=16))
    assert (run.resume_from, run.finished) == (None, False)
    assert yaml.safe_load((directory / "config.yaml").read_text())["train"]["global_batch_size"] == 16


def test_a_claim_ends_with_its_block(directory):
    for _ in range(2):
        with claimed(directory, config=CONFIG, resume="auto"):
            assert (directory / ".lock").is_file()
        assert not (directory / ".lock").exists()
    with contextlib.suppress(ZeroDivisionError), claimed(directory, config=CONFIG, resume="auto"):
        raise ZeroDivisionError
    assert directory.exists()
    assert not (directory / ".lock").exists()


@pytest.mark.parametrize("moment", ["write_durably", "describe_environment", "RunLock.acquire", "from_rank_zero"])
def test_a_signal_during_the_claim_leaves_nothing(directory, monkeypatch, moment):
    owner = module.RunLock if "." in moment else module
    name = moment.rpartition(".")[2]
    original = getattr(owner, name)

    def signalled(*args):
        result = original(*args)
        signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, signalled)
    directory.parent.mkdir()
    with pytest.raises(Interrupted), Signals(), claimed(directory, config=CONFIG, resume="auto"):
        raise AssertionError("the claim was to end")
    assert list(directory.parent.iterdir()) == []


def test_a_signal_leaves_a_run_that_was_there(directory):
    claim(directory, config=CONFIG, resume="auto").lock.release()
    with pytest.raises(Interrupted), Signals(), claimed(directory, config=CONFIG, resume="auto"):
        signal.raise_signal(signal.SIGUSR2)
    assert (directory / "config.yaml").is_file()


def test_of_two_that_make_a_directory_at_once_one_is_refused(directory, monkeypatch):
    def overtaken(path, text):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text("of another")

    monkeypatch.setattr(module, "write_durably", overtaken)
    with pytest.raises(ConfigError, match=r"was made by another process just now"):
        claim(directory, config=CONFIG, resume="auto")
    assert listing(directory.parent) == ["one", "one/config.yaml"]


def test_a_config_that_is_damaged_is_a_run_error(directory):
    claim(directory, config=CONFIG, resume="auto")
    for text in ("", "a: [", "- 1"):
        (directory / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml is damaged .*put back a whole copy"):
            claim(directory, config=CONFIG, resume="auto")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_a_run_is_refused_and_left_alone(directory, kind):
    directory.parent.mkdir()
    if kind == "file":
        directory.write_text("mine")
    else:
        directory.mkdir()
        (directory / "thesis.tex").write_text("mine")
    before = listing(directory.parent)
    with pytest.raises(ConfigError, match=r"exists, is not empty and is not a run \(it has no config\.yaml\)"):
        claim(directory, config=CONFIG, resume="auto")
    assert listing(directory.parent) == before


def test_a_finished_run_says_so_and_is_left_alone(directory):
    claim(directory, config=CONFIG, resume="auto")
    path = save(directory, 8, finished=True)
    before = listing(directory)
    run = claim(directory, config=changed(compile="regional"), resume="auto")
    assert run.finished
    assert run.resume_from == path
    assert listing(directory) == before


def test_a_raised_limit_is_remembered_until_a_checkpoint_was_saved_under_it(directory):
    first = go_on(directory)
    save(directory, 8, finished=True)
    first.record_exports(8)
    for max_steps in (16, 16, 12):
        assert not go_on(directory, changed(train__max_steps=max_steps)).finished
    assert claim(directory, config=changed(train__max_steps=8), resume="auto").finished
    save(directory, 12, finished=True)
    claim(directory, config=changed(train__max_steps=12), resume="auto").record_exports(12)
    assert claim(directory, config=changed(train__max_steps=12), resume="auto").finished
    assert not claim(directory, config=changed(train__max_steps=13), resume="auto").finished


def test_a_run_is_as_before_where_a_start_that_would_continue_it_fails(directory):
    go_on(directory)
    save(directory, 2)
    before = {name: (directory / name).read_bytes() for name in listing(directory) if (directory / name).is_file()}
    run = claim(directory, config=changed(optimizer__lr=1e-4), resume="auto")
    with pytest.raises(ConfigError, match="another model"), run.withdrawn_on_failure():
        raise ConfigError("the checkpoint is of another model")
    assert {name: (directory / name).read_bytes() for name in before} == before
    assert len(listing(directory)) == len(before) + 2, "and the folders of checkpoints"


def test_a_run_requeued_with_its_origin_continues_from_its_own_checkpoint(directory):
    first = directory.with_name("first")
    claim(first, config=CONFIG, resume="auto")
    origin = str(save(first, 4))
    config = changed(run__resume=origin)
    claim(directory, config=config, resume=origin)
    assert claim(directory, config=config, resume=origin).resume_from == first / "checkpoints" / "step_4"
    own = save(directory, 6)
    assert claim(directory, config=config, resume=origin).resume_from == own
    shutil.rmtree(origin)  # as by the other run, which trains on and keeps its newest
    assert claim(directory, config=config, resume=origin).resume_from == own
    assert go_on(directory).resume_from == own
    assert claim(directory, config=config, resume=origin).resume_from == own, "also after a start by auto"


def test_a_run_without_a_checkpoint_that_began_elsewhere_begins_anew_with_a_warning(directory, caplog):
    first = directory.with_name("first")
    claim(first, config=CONFIG, resume="auto")
    origin = str(save(first, 4))
    claim(directory, config=changed(run__resume=origin), resume=origin)
    assert claim(directory, config=CONFIG, resume="auto").resume_from is None
    assert f"began from run.resume={origin} and has no checkpoint of its own" in caplog.text


def test_an_origin_that_would_lose_newer_checkpoints_is_refused(directory):
    claim(directory, config=CONFIG, resume="auto")
    newest = save(directory, 2, 4)
    assert claim(directory, config=CONFIG, resume=str(newest)).resume_from == newest
    with pytest.raises(ConfigError, match=r"has its own newer step_4, which would be lost. Remedy: run\.resume=auto"):
        claim(directory, config=CONFIG, resume=str(directory / "checkpoints" / "step_2"))
    assert newest.exists()


def test_an_origin_must_exist_and_verify(directory, tmp_path):
    with pytest.raises(ConfigError, match="is neither auto, never, nor a directory that exists"):
        claim(directory, config=CONFIG, resume=str(tmp_path / "missing"))
    empty_run = tmp_path / "empty"
    claim(empty_run, config=CONFIG, resume="auto")
    with pytest.raises(ConfigError, match="is a run without checkpoints"):
        claim(directory, config=CONFIG, resume=str(empty_run))
    checkpoint = save(empty_run, 2)
    next(checkpoint.glob("*.distcp")).unlink()
    with pytest.raises(ConfigError, match="is not a checkpoint that verifies: .* cannot be read"):
        claim(directory, config=CONFIG, resume=str(checkpoint))
    assert not directory.parent.exists()


@pytest.mark.parametrize("error", [ConfigError("a"), RunError("b"), KeyError("c")])
def test_a_start_that_fails_after_the_claim_leaves_nothing(directory, error):
    run = claim(directory, config=CONFIG, resume="auto")
    (directory / "tensorboard").mkdir()
    (directory / "tensorboard" / "events").write_text("")
    with pytest.raises(type(error)), run.withdrawn_on_failure():
        raise error
    assert not directory.exists()


def test_metrics_are_cut_to_a_step_and_torn_lines_dropped(directory, caplog):
    run = claim(directory, config=CONFIG, resume="auto")
    run.cut_metrics(3)
    whole = [json.dumps({"step": step, "loss": 0.1 * step}) + "\n" for step in range(1, 6)]
    run.metrics_path.write_text("".join(whole) + '{"step": 6, "lo')
    run.cut_metrics(3)
    assert run.metrics_path.read_text() == "".join(whole[:3])
    assert "line 6 of" in caplog.text
    run.cut_metrics(0)
    assert run.metrics_path.read_text() == ""


@pytest.mark.parametrize(("grid", "stays"), [("step_0", False), ("step_2", True)])
def test_the_grid_before_the_first_step_is_nothing_to_lose(directory, grid, stays):
    run = claim(directory, config=CONFIG, resume="auto")
    (run.samples / grid).mkdir(parents=True)
    run.withdraw()
    assert directory.exists() is stays


@pytest.mark.parametrize("made", [True, False])
def test_a_link_to_an_empty_folder_becomes_a_run(world, tmp_path, made):
    target, link = tmp_path / "target", tmp_path / "link"
    if made:
        target.mkdir()
    link.symlink_to(target)
    run = claim(link, config=CONFIG, resume="auto")
    assert (run.path, link.is_symlink(), (target / "config.yaml").is_file()) == (link, True, True)
    run.lock.release()
    run.withdraw()
    assert not target.exists()


def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    code = tmp_path / "code.py"
    code.write_text("a = 1\n")
    assert module._git_commit.__wrapped__(code) is None, "not tracked, as in a venv inside a checkout"
    git("add", "code.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert module._git_commit.__wrapped__(code) == commit
    code.write_text("a = 2\n")
    assert module._git_commit.__wrapped__(code) == f"{commit}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._git_commit.__wrapped__(code) is None, "without git"
