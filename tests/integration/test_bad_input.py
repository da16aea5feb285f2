"""What cannot train is refused in one paragraph, and a refused start leaves nothing."""

import io
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL, read_metrics, torchrun, train
from tests.warm.programs import warm_programs

pytestmark = pytest.mark.slow

FINETUNE = (*SMALL_NETWORK, "task=finetune")


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(buffer, "jpeg")
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def data_overrides(path):
    return [*FINETUNE, "data=webdataset", f"data.urls={path}", "data.num_workers=0"]


def test_a_directory_of_something_else_is_refused(tmp_path, capfd):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert launch([*SMALL, "task=finetune", f"run.dir={tmp_path}"]) == 2
    assert "not a run" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("workers", [2])
def test_too_many_unreadable_images_stop_the_run_and_are_listed(tmp_path, capfd, workers):
    tar = write_tar(tmp_path / "data.tar", pairs(40, broken=range(0, 40, 4)))
    overrides = [*data_overrides(tar), f"data.num_workers={workers}", "train.max_steps=20"]
    assert launch([*SMALL, *overrides, f"run.dir={tmp_path / 'run'}"]) == 1
    said = capfd.readouterr().err
    assert "unreadable" in said
    assert "0004" in said
    assert "Traceback" not in said


def pairs(count, broken):
    """Return the members of a tar of captioned pictures, some of which do not decode."""
    members = {}
    for index in range(count):
        damaged = jpeg()[:200]  # the header still says how large it is
        members |= {f"{index:04d}.jpg": damaged if index in broken else jpeg(), f"{index:04d}.txt": b"red"}
    return members


@pytest.mark.distributed
def test_ranks_that_do_not_divide_the_batch_are_refused_with_the_sizes_that_fit(tmp_path):
    done = torchrun(3, *SMALL, *FINETUNE, "run.dir=run", cwd=tmp_path, warm=True)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("train.global_batch_size=8")]
    assert len(said) == 1, "one rank speaks; what torchrun repeats of it at its end has a word before it"
    assert "6" in done.stderr
    assert "9" in done.stderr
    assert list(tmp_path.iterdir()) == []


IN_A_GROUP_OF_ITS_OWN = """
import os
os.setpgid(0, 0)
print(os.getpid(), flush=True)
from cascade_train.__main__ import main
main()
"""


def start(folder, *overrides):
    """Start an endless training in a process group, and return the process to talk to and the number of both."""
    options = [*SMALL, *overrides, "log.every_steps=1", "train.max_steps=100000", "run.dir=run"]
    command = [str(warm_programs() / "python"), "-c", IN_A_GROUP_OF_ITS_OWN, *options]
    training = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return training, int(training.stdout.readline())


def test_ctrl_c_ends_in_order_and_the_next_start_continues(tmp_path):
    training, group = start(tmp_path, *FINETUNE, "checkpoint.every_steps=1", "data.num_workers=1")
    try:
        assert any(line.startswith("step 1/") for line in training.stderr), "it ended before its first step"
        os.killpg(group, signal.SIGINT)  # as a terminal does: the data worker hears it too
        rest = training.communicate(timeout=60)[1].splitlines()
    finally:
        training.kill()
    assert training.returncode == 75
    lines = [line for line in rest if line and not line.startswith("step ")]
    assert len(set(rest)) == len(rest), "no line is said twice"
    assert lines[0].startswith("SIGINT: saves and stops after this step.")
    assert len(lines) == 2
    steps = len(read_metrics(tmp_path / "run"))
    assert lines[1] == f"Stopped by SIGINT at step {steps}; saved. The same command continues."
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps}").is_dir()
    train(tmp_path / "run", *FINETUNE, "checkpoint.every_steps=1", f"train.max_steps={steps + 1}")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, steps + 2))


def test_a_run_in_use_by_another_process_is_refused(tmp_path, capfd):
    run = train(tmp_path / "run", *FINETUNE, "train.max_steps=1")
    hold = (
        "import sys; from pathlib import Path; from cascade_train.engine.run.lock import RunLock;"
        f"RunLock(Path({str(run)!r})).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert launch([*SMALL, f"run.dir={run}", *FINETUNE]) == 2
        assert f"is in use by process {holder.pid}" in capfd.readouterr().err
        holder.stdin.close()
    train(run, *FINETUNE, "train.max_steps=2")


def test_a_full_disk_stops_the_run_which_then_starts_over(tmp_path, capfd):
    run = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, hard))  # as a disk that is full after that
    try:
        assert launch([*SMALL, "task=finetune", f"run.dir={run}"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr().err
    assert "GiB are free" in said
    assert "Traceback" not in said
    assert list((run / "checkpoints").iterdir()) == []
    train(run, "task=finetune")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]


def test_a_data_worker_that_is_killed_ends_the_run_in_one_line(tmp_path):
    tar = write_tar(tmp_path / "data.tar", pairs(8, broken=()))
    training, pid = start(tmp_path, *data_overrides(tar), "data.num_workers=2", "checkpoint.every_steps=null")
    try:
        assert any(line.startswith("step 1/") for line in training.stderr), "it ended before its first step"
        workers = [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        os.kill(workers[0], signal.SIGKILL)
        rest = training.communicate(timeout=60)[1].splitlines()
    finally:
        training.kill()
    assert training.returncode == 1
    (line,) = [line for line in rest if not line.startswith("step ")]
    assert "data worker process ended unexpectedly" in line
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "the other worker ends too"


def test_a_refusal_of_the_first_batch_leaves_no_run(tmp_path, capfd):
    given = ["task=controlnet", "filter=sr_effnet", "task.bottleneck=large", "model=c_tiny", "sample.every_steps=null"]
    assert launch([*given, "train.global_batch_size=2", "data.num_workers=0", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "task.filter.scale_factor=0.5: the stage cannot encode" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
