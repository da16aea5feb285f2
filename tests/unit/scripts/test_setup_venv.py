"""The set-up's decisions; the set-up itself has happened where this test runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import setup_venv


def test_pip_listing_is_read_and_the_environment_wins() -> None:
    listing = ":env:.index-url='https://b/simple'\nglobal.index-url='https://a/simple'\nglobal.timeout='60'\n"
    assert setup_venv.pip_options_from_listing(listing) == {"index-url": "https://b/simple", "timeout": "60"}


def test_uv_takes_the_index_of_pip() -> None:
    options = {"index-url": "https://a/simple", "cert": "/a.pem", "find-links": "/wheels", "extra-index-url": "x"}
    environ = setup_venv.uv_environment({"HOME": "/h"}, options)
    assert environ == {"HOME": "/h", "UV_DEFAULT_INDEX": "https://a/simple", "SSL_CERT_FILE": "/a.pem"}


def test_another_place_or_other_pins_need_another_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in setup_venv.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    here = setup_venv.stamp()
    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    there = setup_venv.stamp()
    (tmp_path / "constraints.txt").write_text("two")
    assert len({here, there, setup_venv.stamp()}) == 3


@pytest.mark.parametrize(
    ("module", "compiled"),
    [
        *[(name, True) for name in ("torch/nn/modules/conv.py", "transformers/models/clip/modeling_clip.py")],
        *[(name, True) for name in ("diffusers/models/unets/unet_stable_cascade.py", "moto/s3/models.py", "six.py")],
        *[(name, False) for name in ("sympy/core/tests/test_args.py", "transformers/models/bert/modeling_bert.py")],
    ],
)
def test_what_runs_import_is_compiled_wherever_the_checkout_lies(module: str, compiled: bool) -> None:
    path = f"/home/tests/testing/.venv/lib/python3.11/site-packages/{module}"
    assert (re.search(setup_venv.SELDOM_IMPORTED, path) is None) == compiled


def test_pins_name_no_place(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) >= 100
    assert all(line.count("==") == 1 and "/" not in line and "@" not in line and " " not in line for line in pins)


def test_every_verb_of_the_makefile_is_explained(repository: Path) -> None:
    printed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    verbs = re.search(r"^\.PHONY: (.*)", (repository / "Makefile").read_text(), re.MULTILINE)
    assert verbs is not None
    assert {line.split()[1] for line in printed.splitlines()} == {*verbs[1].split()}
