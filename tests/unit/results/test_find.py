"""What a user names is found: a run, something in its export, or published weights with what lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from cascade_train.config.saved import published_config, to_plain
from cascade_train.errors import ConfigError
from cascade_train.results import find as trained_model
from cascade_train.results.find import TrainedModel, find_model, use_codec
from tests.unit.config.composing import checked, composed

WEIGHTS = "diffusion_pytorch_model.safetensors"


def test_any_folder_of_a_run_leads_to_its_export(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "export" / "decoder" / "decoder"
    inner.mkdir(parents=True)
    saved = OmegaConf.create(to_plain(checked("model=b_tiny", "task=reconstruction", "run.name=b")))
    for folder in (tmp_path / "run", tmp_path / "run" / "export"):
        OmegaConf.save(saved, folder / "config.yaml")
    for named in (inner, inner.parent, inner.parents[1], inner.parents[2]):
        found = find_model(str(named), key="decoder", part="decoder")
        assert (found.export, found.origin) == (tmp_path / "run" / "export", f"decoder={named}")
        assert found.cfg.model.image_size == 96


def test_published_weights_get_the_recipe_that_ships_and_what_lies_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("decoder", "text_encoder", "tokenizer", "vqgan"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(trained_model, "stored_size", lambda family, source, key, part: "b_700m")
    found = find_model(str(tmp_path), key="decoder", part="decoder")
    model = found.cfg.model
    assert found.export is None
    assert (model.weights, model.stage_a.weights, model.stage_a.scale_factor) == (str(tmp_path), str(tmp_path), 0.43)
    assert (model.text_encoder.weights, model.text_encoder.subfolder) == (str(tmp_path), "text_encoder")
    assert found.cfg.objective.noise._target_.endswith("PyramidNoise")
    assert find_model("owner/name", key="from", part="prior").cfg.model.text_encoder.weights != "owner/name"


def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="from=runs/typo: no such folder"):
        find_model("runs/typo", key="from", part="prior")


def test_weights_of_no_published_size_are_refused(tmp_path: Path) -> None:
    save_file({"clf.1.weight": torch.zeros(4, 4, 1, 1)}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="decoder=.*: its tensors are of no published size.*Name the run that left"):
        find_model(str(tmp_path), key="decoder", part="decoder")


@pytest.mark.parametrize(
    ("part", "model", "target", "samples"),
    [("prior", "stage_c.StageC", "EpsilonTarget", 16000), ("decoder", "stage_b.StageB", "X0Target", 64000)],
)
def test_the_packaged_weights_come_with_the_recipe_that_trained_them(
    part: str, model: str, target: str, samples: int
) -> None:
    found = find_model("package:tiny", key="from", part=part)
    alone = find_model(f"package:tiny/{part}", key="from", part=None).cfg
    assert alone.model._target_ == found.cfg.model._target_
    assert alone.model.weights == f"package:tiny/{part}"
    assert found.cfg.model._target_.endswith(model)
    assert (found.export, found.cfg.model.weights, found.cfg.data.samples) == (None, "package:tiny", samples)
    assert found.cfg.objective.target._target_.endswith(target)
    assert ("star" in (found.cfg.data.only or ["star"])) == (part == "decoder"), "Stage C never saw one"


@pytest.mark.parametrize(("family", "model"), [("sd", "StableDiffusion"), ("sdxl", "StableDiffusionXL")])
def test_the_packaged_stable_diffusions_come_with_their_recipe_and_the_text_towers_that_it_trained(
    family: str, model: str
) -> None:
    source = f"package:tiny/{family}"
    cfg = find_model(source, key="from", part=None).cfg
    assert cfg.model._target_.endswith(f".{model}")
    assert (cfg.model.weights, cfg.model.vae.weights) == (source, "package:tiny/sd")
    towers = [tower for name, tower in cfg.model.items() if str(name).startswith("text_encoder")]
    assert [(tower.weights, tower.train) for tower in towers] == [(source, False)] * len(towers)
    assert len(towers) == (2 if family == "sdxl" else 1)
    assert cfg.sample.guidance_scale == composed(f"experiment=tiny_{family}").sample.guidance_scale < 7.5
    assert "star" not in cfg.data.only


def test_a_codec_takes_the_place_of_weights_and_of_nothing_else() -> None:
    model = TrainedModel(origin="from=b", cfg=published_config("b_3b", "here"), export=None)
    use_codec(model, "runs/a")
    assert model.cfg.model.stage_a.weights == "runs/a"
    tiny = TrainedModel(origin="from=b", cfg=checked("model=b_tiny", "task=reconstruction"), export=None)
    del tiny.cfg.model.stage_a.weights
    with pytest.raises(ConfigError, match=r"codec=a: .* from=b decodes by .*VQGAN, which takes no weights\. Leave"):
        use_codec(tiny, "a")
