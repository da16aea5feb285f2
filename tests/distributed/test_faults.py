"""What breaks is said with its place and its remedy, and the next start ends as a run in which nothing ever broke.

Beside these: a rank that is killed or hangs (test_stopping.py), a loss that is not finite (test_modes.py), and many
kills at random moments (test_soak.py).
"""

from dataclasses import dataclass

import pytest
import torch

from bench.soak_ranks import SMALL_NETWORK
from tests.distributed.test_modes import fork, said
from tests.integration.runs import exported_weights, read_metrics
from tests.unit.data import tars
from tests.unit.data.loopback import BUCKET, faulty_s3, point_at

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

IN_LOOP = "checkpoint.asynchronous=false"
"""For faults after a save: it is over when `save` returns."""
S3 = f"data.urls=s3://{BUCKET}/set.tar"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the starts after it.

    Attributes:
        hook: breaks something, in fault_hooks.py.
        codes: how the ranks end.
        words: what is said, in parts.
        overrides: of this run and the next starts.
        next_starts: hook, exit code and words of each start that follows.
    """

    hook: str | None
    codes: int | list[int]
    words: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    next_starts: tuple[tuple[str | None, int, str], ...] = ((None, 0, "Continuing at step 2"),)


FAULTS = {
    "killed_while_writing": Fault(
        hook="kill_while_writing",
        codes=[1, -9],
        words=("The connection to another rank was lost", "The same command continues"),
    ),
    "killed_while_publishing": Fault(
        hook="kill_while_publishing",
        codes=[-9, 1],
        words=("The connection to another rank was lost", "The same command continues"),
        next_starts=(("truncate_newest", 0, "step_4 is damaged and skipped: __1_0.distcp has"),),
    ),
    "disk_full": Fault(
        hook="fill_disk",
        codes=1,
        words=("a checkpoint could not be written to", "No space left on device') on rank 1. Remedy: free space"),
    ),
    "not_writable": Fault(
        hook="forbid_writing",
        codes=1,
        words=("no checkpoint can be written to", "Permission denied", "Remedy: make it writable"),
        overrides=(IN_LOOP,),
        next_starts=(
            ("heed_modes", 2, "is not writable: [Errno 13] Permission denied"),
            ("allow_writing", 0, "Continuing at step 2"),
        ),
    ),
    "worker_killed": Fault(
        hook="kill_a_worker_of_rank_one",
        codes=1,
        words=("[rank 1] A data worker process ended unexpectedly", "lower data.num_workers"),
        overrides=("data.num_workers=1", IN_LOOP),
    ),
    "connection_cut": Fault(hook=None, codes=0, words=(), overrides=("data.num_workers=1", S3), next_starts=()),
    "connection_lost": Fault(
        hook="lose_connection",
        codes=1,
        words=(f"reading s3://{BUCKET}/set.tar failed 8 times", "bytes"),
        overrides=(S3, IN_LOOP),
        next_starts=(("restore_connection", 0, "Continuing at step 2"),),
    ),
}


def starts(name):
    """Yield, of a fault's starts, their names, hooks, exit codes and words."""
    fault = FAULTS[name]
    yield name, fault.hook, fault.codes, fault.words
    for number, (hook, code, word) in enumerate(fault.next_starts, start=1):
        yield f"start_{number}@{name}", hook, code, (word,)


def all_runs(tar):
    """Return what `fork` runs, and how it ends."""
    common = (
        *("task=finetune", *SMALL_NETWORK, "train.global_batch_size=4", "train.max_steps=5", "ema.decay=0.9"),
        *("data=webdataset", f"data.urls={tar}", "data.num_workers=0", "log.every_steps=1"),
    )
    runs, codes = {"whole": (2, None, common)}, {}
    for fault in FAULTS:
        for name, hook, code, _ in starts(fault):
            runs[name] = (2, hook and f"fault_hooks.{hook}", (*common, *FAULTS[fault].overrides))
            codes[name] = code
    return runs, codes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks said."""
    folder = tmp_path_factory.mktemp("faults")
    tar = tars.write(folder / "set.tar", tars.samples(range(12)))
    answers = iter(range(10**6))

    def next_fault():
        is_cut = next(answers) % 3 == 2 or (folder / "connection_is_lost").exists()
        return "cut" if is_cut else None

    with faulty_s3(tar.read_bytes()) as server, pytest.MonkeyPatch.context() as patch:
        server.next_fault = next_fault
        point_at(patch, server.endpoint)
        patch.setenv("XDG_CACHE_HOME", str(folder / "home"))
        done = fork(folder, *all_runs(tar))
        assert len(server.ranges) > 20
    return done


@pytest.mark.parametrize("name", [start for fault in FAULTS for start, *_ in starts(fault)])
def test_every_end_is_explained(runs, name):
    (words,) = [words for start, _, _, words in starts(name.rpartition("@")[2]) if start == name]
    heard = said(runs, name)
    assert [word for word in words if word not in heard] == [], heard
    assert "Traceback" not in heard


@pytest.mark.parametrize("name", FAULTS)
def test_the_next_start_ends_as_a_run_that_was_never_disturbed(runs, name):
    assert read_metrics(runs / name) == read_metrics(runs / "whole")
    weights = exported_weights(runs / name)
    assert all(torch.equal(weight, weights[key]) for key, weight in exported_weights(runs / "whole").items())
    assert [path.name for path in sorted((runs / name / "checkpoints").iterdir())] == ["step_4", "step_5"]
