"""What commands refuse, in words, and that they write no file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from tests.unit.data.test_folder import write

COMMAND_FIRST = "is a command and comes first: cascade-train"
REFUSED = {
    "exprot from=x": r"'exprot' is not a command\. Did you mean export\? Commands: cache, checkpoints,",
    "trian task=lora": r"'trian' is not a command\. Did you mean train\?",
    "foo": r"'foo' is not a command\. Commands: cache, checkpoints, compare, download, evaluate, export,",
    "-m train": f"'train' {COMMAND_FIRST} train …",
    "--cfg job train": f"'train' {COMMAND_FIRST} train …",
    "task=lora generate": f"'generate' {COMMAND_FIRST} generate …",
    "generate prompts": "'prompts' is not an argument. Write key=value",
    "checkpoints lss": r"checkpoints lss is unknown\. Did you mean ls\?",
    "checkpoints root": "Write: cascade-train checkpoints ls root",
    "report run=root": "needs a run, without a key: root",
    "inspect model=c_tiny data.path=root/*.png": r"Give the folder of the pictures: data\.path=root",
    "index model=c_tiny data.urls=a.tar task_index=2 task_count=2": r"task_index=2 must lie in \[0, task_count=2\)",
    "index model=c_tiny data.urls=a.tar processes=0": "processes=0 must be at least 1",
    "index model=c_tiny data=shapes": "data: this indexes tars that are neither piped nor compressed",
    "index model=c_tiny data.urls='pipe:cat a.tar'": "data: this indexes tars that are neither piped nor compressed",
    "inspect model=c_tiny read=0": "read=0 must be 1 or more",
    "inspect model=c_tiny pictures=0": "pictures=0 must be 1 or more",
    "inspect model=c_tiny faults=[ugly]": "faults=ugly is unknown; choose one of unreadable, duplicates, empty",
    "inspect model=c_tiny data=folder data.path=absent": "data.path=absent is not a folder",
    "pack folder=absent out=tars": "folder=absent is not a folder",
    "pack folder=root out=tars": "^folder=root: no picture can be read: not a picture of a known format",
    "pack folder=. out=tars samples_per_shard=0": "samples_per_shard=0 must be at least 1: it is how many",
    "pack folder=. out=tars name=a/b": "name=a/b must be a file name without dots",
    """pack folder=. "out='a {b,c}'" """: r"out=a \{b,c\}: data\.urls expands braces in paths; choose a folder",
    "pack folder=. out=tars caption_from=title": "^caption_from=title is unknown; choose one of",
    "pack folder=.": "out is not set: Folder to write into",
    "plan task=lora model=c_tiny device=tpu": "device=tpu is unknown; choose one of h100, h200, a100, rtx4090",
    "plan task=lora model=c_tiny ranks=3": "cannot be split equally over 3 ranks",
    "recipe import nowhere.yaml out=experiment/a.yaml": "nowhere.yaml is no regular file that can be read",
    "shapes": "out is not set: Folder to write into",
    "shapes out=x samples=0": "samples=0 must be greater than 0",
    "shapes out=x image_size=4": "image_size=4 must be at least 16: shapes need as many pixels",
    "shapes out=x samples_per_shard=0": "samples_per_shard=0 must be at least 1: a tar holds that many pictures",
}
FAILED = {
    "inspect model=c_tiny out=/proc/no/page.html data.samples=4": "out=/proc/no/page.html cannot be written",
    "pack folder=. out=/proc/tars": "out=/proc/tars: ",
    "shapes out=/proc/x samples=1": r"out=/proc/x cannot be written: \[Errno ",
}
"""What the machine does not allow, which ends with 1."""


@pytest.mark.parametrize("line", [*REFUSED, *FAILED])
def test_what_cannot_be_done_is_explained_and_no_file_is_written(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.png")
    write(tmp_path / "root/a.png", b"no picture")
    monkeypatch.chdir(tmp_path)
    assert launch(shlex.split(line)) == (1 if line in FAILED else 2)
    said = capsys.readouterr().err
    assert re.search((REFUSED | FAILED)[line], said), said
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".png", ".npz"}, "pictures, an index"
