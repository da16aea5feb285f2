"""What a run says about where it ran."""

import json
import subprocess
import sys

import torch

from cascade_train.engine.run import directory
from cascade_train.engine.run.directory import describe_environment


def test_the_description_is_json_and_complete(world):
    found = json.loads(json.dumps(describe_environment()))
    assert found["packages"]["torch"] == torch.__version__
    assert found["python"].startswith("3.")
    assert found["ranks"] == 1
    assert found["command_line"] == sys.orig_argv
    assert found["cpu_threads"] == torch.get_num_threads()
    assert {"time", "platform", "git_commit", "device", "cuda"} <= found.keys()


def test_no_secret_of_the_command_line_or_the_environment_is_described(world, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "abcdef0123456789")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cascade_train", "+task.password=hunter2", "task=lora"])
    found = describe_environment()
    assert found["command_line"] == ["python", "-m", "cascade_train", "+task.password=<redacted>", "task=lora"]
    assert "abcdef0123456789" not in json.dumps(found)


def test_a_package_that_is_missing_is_null():
    assert directory._version("no-such-package-here") is None


def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    code = tmp_path / "code.py"
    code.write_text("a = 1\n")
    assert directory._git_commit.__wrapped__(code) is None, "a file that is not tracked, as in a venv inside a checkout"
    git("add", "code.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert directory._git_commit.__wrapped__(code) == commit
    code.write_text("a = 2\n")
    assert directory._git_commit.__wrapped__(code) == f"{commit}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert directory._git_commit.__wrapped__(code) is None, "without git"
