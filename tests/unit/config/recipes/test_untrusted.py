"""A configuration of a stranger puts no command and no interpolation into a recipe, and opens no file of the user's."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from cascade_train.__main__ import launch
from cascade_train.config.recipes.reading import flat, read_source
from cascade_train.errors import ConfigError
from tests.unit.commands.test_recipe import OPEN_DIFFUSION, official
from tests.unit.config.recipes.test_systems import BACKENDS, EVERYDREAM, MINDONE, ONETRAINER, SIMPLETUNER

COMMAND, SECRET = "pipe:touch X; cat a.tar", "n_${oc.env:HOME}"
CONTROL = {"controlnet_blocks": [0], "controlnet_filter": "CannyFilter", "adaptive_loss_weight": None}
KOHYA: dict[str, Any] = {
    "pretrained_model_name_or_path": "sd_xl.safetensors", "network_module": "networks.lora", "network_dim": 4,
    "train_data_dir": "cats", "resolution": 512,
}  # fmt: skip
WILD = yaml.safe_load(MINDONE) | {"data_path": COMMAND}
WILD["data"]["dataset_config"]["target"] = "gm.data.dataset_wds.T2I_Webdataset"


def run(folder: Path, text: str, name: str, *more: str) -> tuple[int, Path]:
    """Import a text as a file and return the exit code and the experiment."""
    (folder / name).write_text(text)
    out = folder / "conf/experiment/mine.yaml"
    return launch(["recipe", "import", str(folder / name), f"out={out}", *more]), out


FILES: list[tuple[dict[str, Any], str]] = [
    (official("finetune_c_3b", webdataset_path=COMMAND), "webdataset_path"),
    (official("finetune_c_3b", webdataset_path=["a.tar", COMMAND]), "webdataset_path"),
    (official("finetune_c_3b", webdataset_path=["{pip,x}e:touch X"]), "webdataset_path"),
    (official("finetune_c_3b", webdataset_path=" PIPE:touch X"), "webdataset_path"),
    (official("finetune_c_3b", wandb_entity=SECRET), "wandb_entity"),
    (official("finetune_c_3b", experiment_id=SECRET), "experiment_id"),
    (official("finetune_c_3b", captions_getter=["json", "lambda x: '$' + x['caption']"]), "captions_getter"),
    (official("finetune_c_3b", dataset_filters=[["a", "lambda s: s == '${oc.env:HOME}'"]]), "dataset_filters"),
    (official("finetune_c_3b", **CONTROL, controlnet_filter_params={"${oc.env:HOME}": 1}), "controlnet_filter_params"),
    (official("finetune_c_3b", **CONTROL, controlnet_filter_params={"_target_": "os.system"}),
     "controlnet_filter_params"),
    (WILD, "data_path"),
    (KOHYA | {"output_name": SECRET, "output_dir": "out"}, "output_name"),
    (KOHYA | {"caption_prefix": SECRET}, "caption_prefix"),
    (KOHYA | {"log_with": "wandb,hydra/launcher=slurm"}, "log_with"),
    (KOHYA | {"datasets": [{"subsets": [{"image_dir": SECRET}, {"image_dir": "b", "class_tokens": SECRET}]}]},
     "image_dir"),
    (EVERYDREAM | {"optimizer_config": None, "enable_zero_terminal_snr": None, "data_root": SECRET}, "data_root"),
    (ONETRAINER | {"samples": [{"prompt": "fine"}, {"prompt": SECRET}]}, "samples"),
    (ONETRAINER | {"concepts": [{"name": SECRET, "path": SECRET}]}, "path"),
    (SIMPLETUNER | {"--data_backend_config": None, "--validation_prompt": r"\${oc.env:HOME}"}, "validation_prompt"),
    (yaml.safe_load(OPEN_DIFFUSION.replace("shards/{000..005}.tar", COMMAND)), "dataset.params.path"),
]  # fmt: skip
assert len(BACKENDS) == 2


@pytest.mark.parametrize(("number", "key"), [*enumerate(key for _, key in FILES)])
def test_no_command_and_no_interpolation_of_a_file_comes_into_a_recipe(
    number: int, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, reader = FILES[number][0], ("json", "toml", "yaml")[number % 3]
    texts = {"json": json.dumps, "toml": as_toml, "yaml": yaml.safe_dump}
    code, out = run(tmp_path, texts[reader](given), f"given.{reader}")
    said = capsys.readouterr()
    assert code == 0, said.err
    text = out.read_text()
    assert not any(word in text.lower() for word in ("pipe:", "${", "oc.env", "os.system", "e:touch", "slurm"))
    assert "Taken over" in said.out
    if not (reader == "yaml" and "${" in json.dumps(given)):  # where interpolations are followed, as in OmegaConf
        left = said.out.partition("Left to you:")[2] + said.out.partition("Not supported:")[2]
        assert key in left
    assert ".env:" not in said.out.partition("Left to you:")[0]


def as_toml(given: dict[str, Any]) -> str:
    """Return values as TOML, whose inline tables hold everything here; null is left out."""

    def form(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {form(v)}" for k, v in value.items() if v is not None) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(form, value)) + "]"
        return json.dumps(value)

    return "\n".join(f"{json.dumps(key)} = {form(value)}" for key, value in given.items() if value is not None)


@pytest.mark.parametrize("name", ["given.env", "pipe:x.json"])
def test_lines_of_a_shell_flags_and_names_of_files_bring_none(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 'export MODEL_FAMILY=sdxl\nexport MODEL_TYPE=full\nexport TRACKER_RUN_NAME="n_${HOME}"\n'
    text = lines if name.endswith("env") else json.dumps({"model_family": "sdxl", "model_type": "full"})
    flags = shlex.quote(COMMAND)
    code, out = run(tmp_path, text, name, f"flags=--tracker_project_name {flags}")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert not any(word in out.read_text().lower() for word in ("pipe:", "${"))
    assert "tracker_project_name" in said.out.partition("Left to you:")[2]


def prompts_of(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    code, out = run(folder, json.dumps(KOHYA | {"sample_prompts": name}), "given.json", "overwrite=true")
    assert code == 0
    assert ("sample_prompts" in capsys.readouterr().out.partition("Left to you:")[2]) != ("prompts" in out.read_text())
    return out.read_text()


@pytest.mark.slow
def test_only_regular_small_files_inside_the_files_own_folder_are_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, folder = tmp_path / "outside.txt", tmp_path / "given"
    outside.write_text("a secret\n")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/mine.txt").write_text("a cat\n")
    (folder / "link.txt").symlink_to(outside)
    (folder / "there").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.txt")
    (folder / "large.txt").write_text("a cat\n" * 300_000)
    assert "a cat" in prompts_of(folder, "sub/mine.txt", capsys)
    assert "a cat" in prompts_of(folder, str(folder / "sub/mine.txt"), capsys)
    monkeypatch.chdir(tmp_path)
    assert "a cat" in prompts_of(folder, "given/sub/mine.txt", capsys), "as its trainer's folder names it"
    for name in ("link.txt", "there/outside.txt", "../outside.txt", str(outside), "outside.txt", "fifo.txt",
                 "large.txt", "sub", "none.txt", "a\0b.txt"):  # fmt: skip
        assert "prompts" not in prompts_of(folder, name, capsys), name


def test_a_linked_configuration_is_opened_only_where_it_lies_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizer.json").write_text(json.dumps({"base": {"lr": 5e-6}}))
    given = tmp_path / "deep/er"
    given.mkdir(parents=True)
    (given / "optimizer.json").symlink_to(tmp_path / "optimizer.json")
    text = json.dumps(EVERYDREAM | {"resume_ckpt": "sd_v1-5_vae.ckpt", "enable_zero_terminal_snr": None})
    code, out = run(given, text, "train.json")
    assert code == 0
    assert "lr: 5.0e-06" not in out.read_text()
    assert "optimizer_config: optimizer.json" in capsys.readouterr().out.partition("Left to you:")[2]


def test_a_toml_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for part in ("a", '"a b"'):
        path.write_text(".".join([part] * 20_000) + " = 1")
        with pytest.raises(ConfigError, match="cannot be read as TOML: a key is nested deeper than 50 levels"):
            read_source(path)
    path.write_text(".".join("a" * 49) + " = 1")
    assert list(flat(read_source(path))) == [(".".join("a" * 49), 1)]
