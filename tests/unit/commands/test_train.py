"""Missing files, wrong columns and folders that cannot be written are refused before anything is written."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REFUSED = {
    "data.urls=[a.tar] data.flip_prob=2": r"data\.flip_prob=2 must lie in",
    "data.path=nowhere": r"data\.path=nowhere is not a folder; paths are relative",
    "data.path=empty": r"c\.tar is not a readable tar file",
    "data.path=nowhere.csv": r"data\.path=nowhere\.csv is not there",
    "data.path=rows.csv": r"data\.image_column=image is no column of .*rows\.csv, which has file, text",
    "data.path=rows.jsonl": r"data\.caption_column=caption is no column of .*rows\.jsonl, which has image, text",
    "data.path=rows.parquet": r"data\.image_column=image is no column of .*rows\.parquet, which has file, text",
    "data.urls=[a.tar,b.tar]": r"data\.urls=a\.tar,b\.tar: 2 of 2 tar files not found",
    "data=regularised data@data.source=folder data.source.path=no data@data.regularisation=shapes": r"data\.path=no is",
    "data=mixture +data@data.sources.a=csv data.sources.a.path=no.csv": r"data\.path=no\.csv is not there",
    "optimizer._target_=os.system": r"optimizer\._target_=os\.system names the package 'os', which may not be loaded",
    "run.dir=rows.csv/run": r"run\.dir=.*rows\.csv/run cannot be made: Not a directory\. Remedy: a writable run\.dir",
    "run.dir=empty": r"run\.dir=.*empty exists, is not empty and is not a run",
}

SCRIPT = """
import os, sys
from cascade_train.__main__ import launch
for line in sys.argv[1:]:
    code = launch(["task=lora", "model=c_tiny", *line.split()])
    level = os.environ["TORCH_CPP_LOG_LEVEL"]  # which torch reads when it is imported
    sys.stderr.write(f"code {code}, logs {level}\\n---\\n")
"""


@pytest.mark.slow
def test_a_refused_start_leaves_nothing(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "c.tar").touch()
    (tmp_path / "rows.csv").write_text("file,text\na.jpg,x\n")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.jpg"}\n{"text": "x"}\n')
    pq.write_table(pa.table({"file": ["a.jpg"], "text": ["x"]}), tmp_path / "rows.parquet")
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-c", SCRIPT, *REFUSED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stderr.split("---\n")[:-1]
    for (line, message), text in zip(REFUSED.items(), said, strict=True):
        assert re.search(message, text), text
        assert text.endswith("code 2, logs ERROR\n"), f"{line}: {text}"
    assert sorted(tmp_path.iterdir()) == before
