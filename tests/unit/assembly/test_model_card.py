"""A model card says what an export is, of what it was made, and under which licence, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from cascade_train.assembly.model_card import CARD, LICENSE, SAMPLES, write_card

PUBLISHED = "stabilityai/stable-cascade-prior@abc:prior"
CONFIG: dict[str, Any] = {
    "run": {"name": "stars", "seed": 3},
    "model": {"_target_": "a.StageC", "weights": PUBLISHED, "image_size": 768},
    "task": {"_target_": "a.Lora", "rank": 4, "weights": "/home/somebody/first.safetensors"},
    "objective": {"_target_": "a.Objective"},
    "data": {"_target_": "a.WebDataset", "urls": ["/home/somebody/a.tar"], "api_key": "abc123"},
    "train": {"global_batch_size": 16, "precision": "bf16"},
    "optimizer": {"lr": 1e-4},
    "lr_scheduler": {"_target_": "a.Constant"},
    "ema": {"decay": None},
}


def run_with(folder: Path, **model: Any) -> Path:
    """Return a run of three steps, with a grid of samples of two of them."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, "model": {**CONFIG["model"], **model}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": step, "loss": step / 7, "images_per_second": 3.1 * step} for step in (1, 2, 3)]
    rows[1]["validate/loss"] = 0.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, 3):
        (folder / f"samples/step_{step}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (step, 1)).save(folder / f"samples/step_{step}/grid.png")
    return folder


def width_of(path: Path) -> int:
    with Image.open(path) as image:
        return image.width


def card(run: Path | None, out: Path, names: list[str], *, step: int | None = None, source: str = "") -> Any:
    out.mkdir(exist_ok=True)
    write_card(out, names, source=source, run=run, step=step)
    return ModelCard((out / CARD).read_text())


def test_the_card_of_an_adapter_names_base_licence_library_and_what_loads_it(tmp_path: Path) -> None:
    made = card(run_with(tmp_path / "run"), tmp_path / "out", ["lora", "lora.comfyui.safetensors"])
    assert made.data.to_dict() == {
        **{"base_model": "stabilityai/stable-cascade-prior", "base_model_relation": "adapter", **LICENSE},
        **{"library_name": "peft", "pipeline_tag": "text-to-image"},
        "tags": ["stable-cascade", "lora", "cascade_train"],
    }
    for shown in ("# stars", "`PeftModel.from_pretrained(network, 'lora')`", "`models/loras`"):
        assert shown in made.text


def test_the_card_holds_recipe_metrics_and_samples_but_no_secret_time_or_place(tmp_path: Path) -> None:
    made = card(run_with(tmp_path / "run"), tmp_path / "out", ["lora"])
    trained = ("- Lora of StageC, from `stabilityai/stable-cascade-prior@abc:prior`", "- loss: 0.4286")
    for shown in (*trained, "- validate/loss: 0.25"):
        assert shown in made.text
    for hidden in ("somebody", "abc123", "images_per_second", str(tmp_path)):
        assert hidden not in made.text
    assert width_of(tmp_path / "out" / SAMPLES) == 3


def test_a_card_neither_changes_the_run_nor_needs_it_undamaged(tmp_path: Path) -> None:
    """A run that trains may be in the middle of a line."""
    run = run_with(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "lo')
    (run / "samples/step_3 (copy)").mkdir()
    (run / "samples/step_3/grid.png").rename(run / "samples/step_3 (copy)/grid.png")
    before = (run / "metrics.jsonl").stat()
    assert "- step: 3" in card(run, tmp_path / "out", ["lora"]).text
    after = (run / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert width_of(tmp_path / "out" / SAMPLES) == 1


def test_a_stage_of_ones_own_has_a_card(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "model": {"_target_": "mine.Stage"}}))
    made = card(run, tmp_path / "out", ["prior"])
    assert "- Lora of Stage, from `random values`\n- data: WebDataset\n" in made.text


def test_the_card_of_an_earlier_step_shows_nothing_of_later_ones(tmp_path: Path) -> None:
    made = card(run_with(tmp_path / "run"), tmp_path / "out", ["prior"], step=1)
    assert "- loss: 0.1429" in made.text
    assert "validate" not in made.text
    assert width_of(tmp_path / "out" / SAMPLES) == 1


@pytest.mark.parametrize(
    ("names", "model", "expected"),
    [
        (["prior"], {}, {"library_name": "diffusers", "base_model_relation": "finetune", **LICENSE}),
        (["controlnet"], {}, {"library_name": "cascade_train", "base_model_relation": "adapter"}),
        (["vqgan", "stage_a"], {"weights": None}, {"library_name": "diffusers", "license": None, "pipeline_tag": None}),
        (["prior"], {"weights": "package:tiny"}, {"base_model": None, "license": None}),
        (["prior"], {"weights": None, "text_encoder": {"weights": PUBLISHED}}, {"base_model": None, **LICENSE}),
        (
            ["prior"],
            {"weights": None, "random_encoders": True, "text_encoder": {"weights": PUBLISHED}},
            {"license": None},
        ),
        (["decoder"], {"weights": "me/mine:decoder"}, {"base_model": "me/mine", "license": None}),
    ],
)
def test_each_kind_has_its_library_and_only_known_bases_a_licence(
    tmp_path: Path, names: list[str], model: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = card(run_with(tmp_path / "run", **model), tmp_path / "out", names).data.to_dict()
    assert {key: found.get(key) for key in expected} == expected


def test_weights_of_no_run_have_the_base_that_they_were_read_from(tmp_path: Path) -> None:
    made = card(None, tmp_path / "out", ["prior.original.safetensors"], source=PUBLISHED)
    assert made.data.base_model == "stabilityai/stable-cascade-prior"
    assert "Training" not in made.text
    assert "for ComfyUI" in made.text


def test_a_lora_of_stable_diffusion_is_loaded_by_its_pipeline(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", _target_="cascade_train.models.stable_diffusion.stage.StableDiffusion")
    made = card(run, tmp_path / "out", ["lora", "lora.kohya.safetensors"])
    assert "`pipeline.load_lora_weights('lora')`" in made.text
    assert "Stage C" not in made.text
    assert made.data.to_dict()["library_name"] == "diffusers"


def test_adapters_of_another_kind_are_loaded_by_peft_alone(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", _target_="cascade_train.models.stable_diffusion.stage.StableDiffusion")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["task"]["kind"] = "lokr"
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    made = card(run, tmp_path / "out", ["lora"])
    assert made.data.library_name == "peft"
    assert "adapters of the kind lokr: `PeftModel.from_pretrained(network, 'lora')` of peft." in made.text
    assert "load_lora_weights" not in made.text
