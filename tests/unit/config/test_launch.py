import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_repository import ConfigRepository
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from cascade_train import compose
from cascade_train.__main__ import launch
from cascade_train.config.groups import conf_dir
from cascade_train.config.launch import compose_and_run, with_implied_choices
from cascade_train.config.sweeps.runs import LONGEST_NAME, RUN_DIR, SWEEP_DIR, folder_name
from cascade_train.errors import ConfigError, RunError

Start = Callable[..., tuple[int, str]]
TINY = ("model=c_tiny", "task=lora")


def test_training_receives_the_checked_configuration(start: Start, trained: list[DictConfig], tmp_path: Path):
    assert start(*TINY, "train.max_steps=7") == (0, "")
    assert [cfg.train.max_steps for cfg in trained] == [7]
    assert list(tmp_path.iterdir()) == []


def test_exit_code_and_error_of_the_training_are_returned(start: Start):
    def fail(cfg: DictConfig) -> int:
        raise RunError("the disk is full.")

    assert start(*TINY, train=lambda cfg: 1) == (1, "")
    assert start(*TINY, train=fail) == (1, "the disk is full.\n")


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


def test_defect_keeps_its_traceback_and_names_the_rank(start: Start, monkeypatch: pytest.MonkeyPatch):
    def fail(cfg: DictConfig) -> int:
        raise IndexError("a defect")

    as_rank(3, monkeypatch)
    code, text = start(*TINY, train=fail)
    assert code == 1
    assert "Traceback" in text
    assert "IndexError: a defect\non rank 3\n" in text


def test_refusal_speaks_on_rank_zero_alone(start: Start, monkeypatch: pytest.MonkeyPatch):
    assert start(*TINY, "train.max_steps=0") == (2, "train.max_steps=0 must be 1 or more.\n")
    as_rank(1, monkeypatch)
    assert start(*TINY, "train.max_steps=0") == (2, "")
    assert start(*TINY, "--nonsense") == (2, "")


def test_full_errors_are_raised_where_the_user_asks(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert start(*TINY) == (0, "")
    with pytest.raises(ConfigError, match="train.max_steps=0"):
        compose_and_run([*TINY, "train.max_steps=0"], lambda cfg: 0)
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_what_one_composition_changes_no_other_sees(start: Start):
    seen: list[dict] = []

    def change(cfg: DictConfig) -> int:
        seen.append(OmegaConf.to_container(cfg))
        OmegaConf.set_readonly(cfg, False)
        OmegaConf.set_struct(cfg, False)
        cfg.train.max_steps = 7
        cfg.run.allowed_packages.append("other")
        cfg.more = 1
        return 0

    assert [compose_and_run(TINY, change) for _ in range(2)] == [0, 0]
    assert seen[0] == seen[1]
    assert seen[0]["train"]["max_steps"] == 10000


def test_environment_and_arguments_are_left_as_they_were(start: Start):
    before = list(sys.argv)
    inside: list[bool] = []
    assert compose_and_run(TINY, lambda cfg: inside.append("HYDRA_FULL_ERROR" in os.environ) or 0) == 0
    assert inside == [False], "processes of a run would inherit it"
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert sys.argv == before


def test_urls_alone_choose_webdataset_and_say_so(start: Start, trained: list[DictConfig]):
    code, text = start(*TINY, "data.urls=[a.tar]")
    assert (code, text) == (0, "data.urls is given and no data= is chosen: data=webdataset.\n")
    assert trained[0].data._target_.endswith("WebDataset")
    assert trained[0].data.urls == ["a.tar"]


def test_urls_imply_data_unless_it_is_chosen():
    for chosen in ("data=shapes", "experiment=tiny_token"):
        assert with_implied_choices(["data.urls=[a]", chosen]) == ["data.urls=[a]", chosen]
    for typed in (["+data.urls=[a]"], ["--cfg", "job", "--package", "data", "data.urls=[a]"]):
        assert with_implied_choices(typed)[0] == "data=webdataset"


PATHS = {
    "pictures": "folder",
    "[a.csv,b.csv]": "csv",
    "rows.TSV": "csv",
    "'rows.jsonl'": "csv",
    "rows.parquet": "parquet",
    "columns": "parquet",
}


@pytest.mark.parametrize("value", PATHS)
def test_a_path_alone_chooses_the_data_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "0.parquet").touch()
    implied = with_implied_choices([*TINY, f"data.path={value}"])
    assert implied == [f"data={PATHS[value]}", *TINY, f"data.path={value}"]
    assert with_implied_choices([*implied]) == implied


LAYOUTS = {
    "img2dataset's tars": (["00000.tar", "00000.parquet", "00000_stats.json"], "webdataset"),
    "tars below": (["part/00000.tar", "part/00000.parquet"], "webdataset"),
    "compressed tars": (["a.tar.gz", "index.parquet"], "webdataset"),
    "img2dataset's files": (["00000/0.jpg", "00000/0.txt", "00000.parquet", "00000_stats.json"], "folder"),
    "img2dataset's tables": (["00000.parquet", "00000_stats.json"], "parquet"),
    "tables below": (["train/0.parquet"], "parquet"),
    "a table beside its pictures": (["train.parquet", "a.jpg"], "parquet"),
    "pictures and a tar": (["a.JPG", "all.tar"], "folder"),
    "tars behind a cache": ([".cascade_train_index/0.parquet", "0.tar"], "webdataset"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_lies_in_a_folder_decides_how_it_is_read(tmp_path: Path, name: str):
    files, choice = LAYOUTS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    key = "data.urls" if choice == "webdataset" else "data.path"
    assert with_implied_choices([f"data.path={tmp_path}"]) == [f"data={choice}", f"{key}={tmp_path}"]


PLAIN = {
    "+experiment=tiny_token": "experiment=tiny_token",
    "++model=c_tiny": "model=c_tiny",
    "noise=pyramid": "noise@objective.noise=pyramid",
    "filter=sr": "filter@task.filter=sr",
    "+data@data.sources.a=shapes": "+data@data.sources.a=shapes",
    "+optimizer.algorithm.momentum=0.9": "+optimizer.algorithm.momentum=0.9",
}


@pytest.mark.parametrize("typed", PLAIN)
def test_a_choice_is_taken_in_the_forms_that_users_of_hydra_type(typed: str):
    assert with_implied_choices([typed]) == [PLAIN[typed]]


@pytest.mark.parametrize(
    "typed",
    [
        ["task=lora", "task=finetune"],
        ["task=lora", "+task=finetune"],
        ["task=lora", "++task=finetune"],
        ["--multirun", "task=lora", "task=finetune"],
        ["task=lora", "experiment=tiny_c", "+experiment=tiny_token"],
        ["task=controlnet", "filter=canny", "filter@task.filter=qr"],
        ["--multirun", "task=lora", "hydra/launcher=basic", "hydra/launcher=joblib"],
    ],
)
def test_a_group_that_is_chosen_twice_is_refused(start: Start, trained: list[DictConfig], typed: list[str]):
    code, said = start("model=c_tiny", *typed)
    assert (code, trained) == (2, [])
    assert re.match(r"\S+ is chosen more than once: (\S+) and \S+, of which Hydra takes the last\. Keep one", said)
    assert "of which Hydra takes the last. Keep one; a script with a default that its caller may" in said


def test_a_choice_may_be_repeated_and_a_value_given_again(
    start: Start, trained: list[DictConfig], capsys: pytest.CaptureFixture[str]
):
    typed = ["task=lora", "+task=lora", "train.max_steps=5", "++train.max_steps=6"]
    assert start("model=c_tiny", *typed) == (0, "train.max_steps is given 2 times; the last counts: 6.\n")
    assert "the last counts: 5." in start(*TINY, *(f"train.max_steps={steps}" for steps in (5, 6, 5)))[1]
    assert [cfg.train.max_steps for cfg in trained] == [6, 5]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (
            ("model=c_tiny", "--cfg", "job", "task=lora"),
            "model:\n  _target_: cascade_train.models.cascade.st",
        ),
        (("--info", "defaults", *TINY), "| model/c_tiny"),
        (("--cfg", "job", "--package", "lr_scheduler", *TINY), "warmup_steps: 1"),
    ],
)
def test_a_composition_is_shown_wherever_its_flags_stand(
    start: Start, asked: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
):
    assert compose_and_run(asked, lambda cfg: 1) == 0
    assert shown in capsys.readouterr().out


def test_the_mode_may_be_set_by_a_file_of_the_user(start: Start, trained: list[DictConfig], tmp_path: Path):
    own = tmp_path / "experiment"
    own.mkdir()
    (own / "swept.yaml").write_text("# @package _global_\nhydra:\n  mode: MULTIRUN\n")
    typed = [*TINY, "experiment=swept", "run.seed=1,2", "--config-dir", str(tmp_path)]
    assert start(*typed)[0] == 0
    assert [cfg.run.seed for cfg in trained] == [1, 2]


def test_folder_of_the_user_adds_options(start: Start, trained: list[DictConfig], tmp_path: Path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "quick.yaml").write_text("# @package _global_\ntrain:\n  max_steps: 2\n")
    assert start("--config-dir", str(tmp_path / "mine"), *TINY, "experiment=quick") == (0, "")
    assert trained[0].train.max_steps == 2


def test_missing_configuration_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("cascade_train.__file__", str(tmp_path / "a" / "b" / "cascade_train" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="The configuration files are missing from the installation"):
        conf_dir()


def test_a_run_of_a_sweep_is_named_without_quotes(start: Start, trained: list[DictConfig], tmp_path: Path):
    (tmp_path / "multirun" / "a" / "lr=0.0001,rank=4").mkdir(parents=True)
    assert start(*TINY, "run.resume=multirun/a/lr=0.0001,rank=4") == (0, "")
    assert trained[0].run.resume == "multirun/a/lr=0.0001,rank=4"


SWEEPS = {
    ("optimizer.lr=1e-4,1e-3",): ["multirun/lora-c_tiny/lr=0.0001", "multirun/lora-c_tiny/lr=0.001"],
    ("optimizer.lr=1e-4,1e-3", "task.rank=4"): ["multirun/lora-c_tiny/lr=0.0001", "multirun/lora-c_tiny/lr=0.001"],
    ("optimizer.lr=1e-4", "task.rank=4,8"): ["multirun/lora-c_tiny/rank=4", "multirun/lora-c_tiny/rank=8"],
    ("optimizer.lr=1e-4,1e-3", "task.rank=4,6", "run.name=a"): [
        f"multirun/a/lr={lr},rank={rank}" for lr in (0.0001, 0.001) for rank in (4, 6)
    ],
    ("task=lora,finetune",): ["multirun/task-c_tiny/task=lora", "multirun/task-c_tiny/task=finetune"],
    ("run.name=a,b",): ["multirun/lora-c_tiny/name=a", "multirun/lora-c_tiny/name=b"],
    ("run.dir=out", "run.seed=1,2"): ["out/seed=1", "out/seed=2"],
    ("run.dir=out/${run.name}/x", "run.seed=1,2"): ["out/lora-c_tiny-seed=1/x", "out/lora-c_tiny-seed=2/x"],
    ("hydra.sweep.dir=out/${run.name}/x", "run.seed=1,2"): ["out/lora-c_tiny/x/seed=1", "out/lora-c_tiny/x/seed=2"],
    ("run.dir=a,b",): ["a/lora-c_tiny", "b/lora-c_tiny"],
    ("hydra.sweep.dir=there", "run.seed=1,2"): ["there/seed=1", "there/seed=2"],
    ("run.seed=1,2", "data.seed=3,4", "data.samples=8"): [
        f"multirun/lora-c_tiny/data.seed={data},run.seed={run}" for run in (1, 2) for data in (3, 4)
    ],
}


@pytest.mark.parametrize("overrides", SWEEPS)
def test_runs_of_a_sweep_are_named_by_what_was_swept(
    start: Start, trained: list[DictConfig], overrides: tuple[str, ...]
):
    chosen = TINY[:1] if any(o.startswith("task=") for o in overrides) else TINY
    code, text = start("--multirun", *chosen, *overrides)
    assert code == 0, text
    assert [cfg.run.dir for cfg in trained] == SWEEPS[overrides]


@pytest.mark.parametrize("asked", [("--cfg", "job"), ("--multirun", "run.seed=1,2")])
def test_a_command_leaves_nothing_for_interpolations_of_the_next(start: Start, asked: tuple[str, ...]):
    HydraConfig.instance().cfg = None
    assert start(*TINY, *asked)[0] == 0
    assert not HydraConfig.initialized()


def test_a_second_call_of_a_sweep_sees_no_change_in_an_interpolation(start: Start):
    for _ in range(2):
        code, text = start("--multirun", *TINY, "run.dir=out/${run.name}/x", "run.seed=1,2")
        assert code == 0
        assert "before" not in text


def test_a_sweep_of_one_run_is_named_by_its_overrides(start: Start, trained: list[DictConfig]):
    assert start("--multirun", *TINY, "optimizer.lr=1e-4", "data.urls=[a.tar]")[0] == 0
    assert start("--multirun", *TINY)[0] == 0
    named, plain = [cfg.run.dir for cfg in trained]
    assert named.startswith("multirun/lora-c_tiny/data=webdataset,urls=_a.tar_,lr=0.0001-")
    assert plain == "multirun/lora-c_tiny/lora-c_tiny"


def test_sweep_leaves_one_folder_and_stops_at_a_refusal(start: Start, trained: list[DictConfig], tmp_path: Path):
    code, text = start("-m", *TINY, "train.max_steps=3,0,5")
    assert code == 2
    assert text.startswith("train.max_steps=0 must be 1 or more.\nRuns by loss, the mean of its last 100 steps; ")
    assert text.endswith(
        "             -        -  multirun/lora-c_tiny/max_steps=3\n"
        "             -        -  multirun/lora-c_tiny/max_steps=0  (exit code 2)\n"
        "2 runs, in multirun/lora-c_tiny/results.jsonl and results.txt.\n"
    )
    assert [cfg.train.max_steps for cfg in trained] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]


def test_a_sweep_that_fails_leaves_no_older_summary(start: Start, tmp_path: Path):
    assert start("-m", *TINY, "run.seed=1,2")[0] == 0
    summary = tmp_path / "multirun" / "lora-c_tiny" / "results.jsonl"
    assert summary.is_file()
    assert start("-m", *TINY, "run.seed=1,2", "optimizer=adamw,nothing")[0] == 2
    assert not summary.exists()


def test_a_second_call_extends_a_sweep(start: Start, tmp_path: Path):
    """Of runs that are equally good, here lr=0.1 and lr=0.2, those of this call stand first."""

    def train(cfg: DictConfig) -> int:
        Path(cfg.run.dir).mkdir(parents=True, exist_ok=True)
        row = {"step": cfg.train.max_steps, "loss": 0.5, "validate/loss": cfg.optimizer.lr * cfg.train.max_steps}
        (Path(cfg.run.dir) / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
        return 0

    def order() -> list[tuple[str, int, bool]]:
        lines = (tmp_path / "multirun" / "a" / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert {(row["ranked_by"], row["mode"]) for row in rows} == {("validate/loss", "min")}
        return [(Path(row["run_dir"]).name, row["metrics"]["step"], row["earlier"]) for row in rows]

    first = ("-m", *TINY, "run.name=a", "train.max_steps=2")
    assert start(*first, "optimizer.lr=0.2,0.1", train=train)[0] == 0
    assert order() == [("lr=0.1", 2, False), ("lr=0.2", 2, False)]
    code, text = start(*first[:-1], "train.max_steps=4", "optimizer.lr=0.1,0.01", train=train)
    assert code == 0
    assert "train.max_steps=2 before, train.max_steps=4 now. What has ended is not trained again" in text
    assert order() == [("lr=0.01", 4, False), ("lr=0.1", 4, False), ("lr=0.2", 2, True)]
    table = (tmp_path / "multirun" / "a" / "results.txt").read_text()
    assert table in text
    assert table.endswith("           0.4        2  multirun/a/lr=0.2  (from an earlier call)\n")


def test_names_of_folders_are_safe_short_and_distinct():
    assert folder_name("optimizer.lr=0.1,run.seed=2") == "optimizer.lr=0.1,run.seed=2"
    strange = [folder_name(f"model.weights=/a{sign}b c") for sign in "/:"]
    assert strange[0] != strange[1]
    assert all("/" not in name and " " not in name for name in strange)
    assert len(folder_name("x" * 500)) == LONGEST_NAME + 9
    assert folder_name("x" * 500) != folder_name("x" * 501)


def test_what_nobody_has_set_is_known_from_the_root():
    root = OmegaConf.load(conf_dir() / "config.yaml")
    assert (root.hydra.sweep.dir, OmegaConf.to_container(root.run, resolve=False)["dir"]) == (SWEEP_DIR, RUN_DIR)


def test_hydra_and_omegaconf_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ConfigRepository.load_config, OmegaConf.save
    compose("model=c_tiny", "task=lora")
    assert launch(["model=c_tiny", "task=lora", "--cfg=job"]) == 0
    assert (ConfigRepository.load_config, OmegaConf.save) == before


def said_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = launch(["--config-dir", str(folder), "experiment=mine", "task=finetune", "model=c_tiny", "--cfg=job"])
    told = capsys.readouterr()
    return told.out if code == 0 else told.err


def test_a_file_that_is_not_utf8_is_named_with_its_byte_and_a_mark_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    text = "# @package _global_\n# für\nrun:\n  seed: 17\n"
    file.write_bytes(text.encode("latin-1"))
    assert said_of(tmp_path, capsys) == f"{file} is not UTF-8: byte 0xfc at 23, line 2. Save it as UTF-8.\n"
    file.write_bytes(text.encode("utf-16"))
    assert said_of(tmp_path, capsys) == f"{file} is not UTF-8: byte 0xff at 0, line 1. Save it as UTF-8.\n"
    file.write_bytes(("#" * 9000 + text).encode("latin-1"))
    assert "byte 0xfc at 9023, line 2" in said_of(tmp_path, capsys)
    file.write_bytes(text.encode("utf-8-sig"))
    assert "  seed: 17\n" in said_of(tmp_path, capsys)
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="mine.yaml is not UTF-8"):
        compose("experiment=mine", "task=finetune", "model=c_tiny", config_dir=tmp_path)
