"""The three ways in, as processes: what they answer without torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cascade_train.config.groups import commands
from tests.warm.programs import warm_programs

TINY = ("model=c_tiny", "task=lora")
SHOWING = ("--cfg job", "--cfg job --resolve", "--info defaults")


def start(cwd: Path, *argv: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-m", "cascade_train", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy", "PIL", "webdataset", "accelerate")
ANSWERED = {
    **{f"{name} --help": 0 for name in commands()},
    **dict.fromkeys(("--help", *(f"{flag} {' '.join(TINY)}" for flag in SHOWING)), 0),
    **dict.fromkeys(("", "checkpoints ls nowhere", "exprot from=x"), 2),
    **{
        f"{' '.join(TINY)} {wrong}": 2
        for wrong in ("train.max_stepz=3", "train.precision=fp16", "data.urls=[a-{0..5}.tar]")
    },
}
"""Command lines, and the exit codes of their answers."""

ANSWER = f"""
import sys
from cascade_train.__main__ import launch
for line in sys.argv[1:]:
    code = launch(line.split())
    assert "hydra" in sys.modules
    sys.stderr.write(f"\\nanswer {{code}} {{[name for name in {HEAVY} if name in sys.modules]}}\\n")
"""


def test_answers_come_without_torch_and_leave_nothing(tmp_path: Path):
    command = [sys.executable, "-c", ANSWER, *ANSWERED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    answers = [line for line in done.stderr.splitlines() if line.startswith("answer ")]
    assert dict(zip(ANSWERED, answers, strict=True)) == {line: f"answer {code} []" for line, code in ANSWERED.items()}
    assert list(tmp_path.iterdir()) == []


def test_showing_a_configuration_imports_no_checks(tmp_path: Path):
    imported = start(tmp_path, "--cfg", "job", *TINY, flags=("-X", "importtime")).stderr
    assert "cascade_train.config.schema" in imported
    assert not [name for name in ("preflight", "components", "assembly", "config.help") if f"{name}\n" in imported]


def test_a_command_replaces_what_its_output_cannot_encode(tmp_path: Path):
    folder = tmp_path / "été"
    folder.mkdir()
    Image.new("RGB", (9, 9)).save(folder / "a.png")
    command = [sys.executable, "-m", "cascade_train", "pack", f"folder={folder}", f"out={folder}", "name=a"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "?t?/a-000000.tar" in done.stdout) == (0, True), done.stderr


def test_console_script_is_the_same_way_in(tmp_path: Path):
    script = Path(sys.executable).with_name("cascade-train")
    command = [script, "--cfg", "job", "--package", "run", "--resolve", *TINY]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "name: lora-c_tiny" in result.stdout


@pytest.mark.parametrize(("flags", "message"), [((), "Half does not define read"), (("-P",), "no module .* 'my_data'")])
def test_a_module_in_the_current_folder_is_found_by_the_console_script(
    tmp_path: Path, flags: tuple[str, ...], message: str
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cascade-train").write_text("from cascade_train.__main__ import main\nmain()\n")
    source = "from cascade_train.data.source import Source\nclass Half(Source):\n    def open(self): ...\n"
    (tmp_path / "my_data.py").write_text(source)
    chosen = (*TINY, "data._target_=my_data.Half", "run.allowed_packages=[my_data,cascade_train,torch]")
    command = [sys.executable, *flags, "bin/cascade-train", *chosen]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.search(message, result.stderr)


LEFT = """
import atexit, sys
import torch.distributed as dist
from cascade_train import __main__ as entry

if sys.argv[1] == "in a group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "waits for others")
entry.launch = lambda argv: print("reported", end=" ") or 3
sys.argv[1:] = sys.argv[2:]
entry.main()
"""


INTERRUPTED = """
import sys
from cascade_train import __main__ as entry

def launch(argv):
    raise KeyboardInterrupt

entry.launch = launch
sys.argv[1:] = ["plan"]
entry.main()
"""


def test_a_command_that_is_interrupted_while_it_imports_leaves_no_traceback():
    end = subprocess.run([warm_programs() / "python", "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("command", "group", "output"),
    [
        ("train", "in a group", "reported "),
        ("evaluate", "in a group", "reported "),
        ("train", "alone", "reported waits for others\n"),
    ],
)
def test_a_process_that_an_error_left_in_its_group_ends_at_once(command: str, group: str, output: str):
    python = warm_programs() / "python"
    end = subprocess.run([python, "-c", LEFT, group, command], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout) == (3, output), end.stderr
