"""Two ranks that commit a18770c stopped go on as it would have."""

from pathlib import Path

import pytest

from tests.frozen.frozen_set import HERE, assert_went_on, copy_as_if_made_there, reads_checkpoints, stopped, unpack
from tests.integration.runs import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@reads_checkpoints
def test_two_ranks_go_on_as_they_would_have(tmp_path: Path) -> None:
    commands = copy_as_if_made_there(unpack(tmp_path / "unpacked"), tmp_path / "set")
    run = tmp_path / "set" / "pair"
    expected = stopped(run)
    weights = str(HERE / "tiny_weights")  # of the package that was; today's has others
    for file in ("config.yaml", "weights.json"):
        (run / file).write_text((run / file).read_text().replace("package:tiny", weights))
    parts = [f"model.{part}.weights={weights}" for part in ("semantic_compressor", "previewer")]
    done = torchrun(2, *commands["runs"]["pair"], *parts, cwd=tmp_path / "set", warm=True)
    assert done.returncode == 0, done.stderr
    assert_went_on(run, expected, tolerance=1e-4)
