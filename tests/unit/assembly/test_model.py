"""Which files a configuration loads is known without loading, and those of the hub are pinned."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.model import RECORD, own_sources, record_weights, weight_specs
from cascade_train.config.saved import composed
from cascade_train.errors import ConfigError
from cascade_train.files.hub import parse_source
from cascade_train.models.formats.weights_source import WeightsSpec

COMMITS = {
    "stabilityai/stable-cascade": "a89f66d459ae653e3b4d4f992a7c3789d0dc4d16",
    "stabilityai/stable-cascade-prior": "7ca32c21c3b4d4e35bbb94fcfedfb4fa2259bd91",
    "openai/clip-vit-large-patch14": "32bd64288804d66eefd0ccbe215aa642df71cc41",
}
"""Repositories that the published models load from, at the commits that they are pinned to."""


def specs_of(*overrides: str) -> dict[str, str]:
    cfg = composed(["run.name=x", "train.global_batch_size=1", *overrides])
    return {spec.key: spec.source for spec in weight_specs(cfg, build_parts(cfg))}


@pytest.mark.parametrize(("model", "parts"), [("c_3b", 6), ("c_1b", 6), ("b_3b", 5), ("b_700m", 5), ("a", 1)])
def test_every_file_of_a_published_model_is_pinned_to_one_commit(model: str, parts: int) -> None:
    task = "finetune" if model.startswith("c_") else "reconstruction"
    found = specs_of(f"model={model}", f"task={task}")
    assert len(found) == parts
    for source in map(parse_source, found.values()):
        assert source is not None
        assert source.revision == COMMITS[source.repo]


def test_a_control_network_of_the_hub_and_its_features_are_among_them() -> None:
    control = "stabilityai/stable-cascade:controlnet/canny.safetensors"
    found = specs_of("model=c_3b", "task=controlnet", "filter@task.filter=canny", f"task.weights={control}")
    assert found["task.weights"] == control
    assert "task.backbone_weights" not in found


def test_random_weights_need_no_files() -> None:
    assert specs_of("model=c_3b", "task=lora", "debug=random_weights") == {}


def test_a_record_stays_what_the_run_began_with(tmp_path: Path) -> None:
    files = {key: tmp_path / f"{key}.safetensors" for key in ("begins", "frozen")}
    specs = [WeightsSpec(key=key, source=str(path)) for key, path in files.items()]

    def recorded(*, resumed: bool) -> dict[str, int]:
        record_weights(tmp_path, specs, initial=("begins",), resumed=resumed)
        record = json.loads((tmp_path / RECORD).read_text())
        return {key: record[key]["files"][path.name]["size"] for key, path in files.items()}

    for path in files.values():
        path.write_bytes(b"1")
    assert recorded(resumed=False) == {"begins": 1, "frozen": 1}
    files["begins"].write_bytes(b"22")
    assert recorded(resumed=True) == {"begins": 1, "frozen": 1}, "a checkpoint has taken their place"
    files["frozen"].write_bytes(b"333")
    with pytest.raises(ConfigError, match="frozen=.*its files changed since this run started"):
        recorded(resumed=True)
    assert recorded(resumed=False) == {"begins": 2, "frozen": 3}, "there was no checkpoint yet: all begins anew"


def test_weights_of_another_version_of_the_package_are_refused_with_the_way_to_the_old_ones(tmp_path: Path) -> None:
    spec = WeightsSpec(key="model.previewer.weights", source="package:tiny", part="previewer")
    record_weights(tmp_path, [spec], initial=(), resumed=False)
    record = json.loads((tmp_path / RECORD).read_text())
    record[spec.key]["files"]["model.safetensors"]["sha256"] = "0" * 64
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match=r"package:tiny: its files changed .*; go on with the library that .*environment.json"
    ):
        record_weights(tmp_path, [spec], initial=(), resumed=True)


def test_sources_of_a_class_include_packages_beside_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "loss.py").write_text("SCALE = 1.0\n")
    (tmp_path / "own_loss.py").write_text("import json\nfrom scales.loss import SCALE\n\nclass Mine:\n    pass\n")
    files = own_sources({"objective": {"_target_": "own_loss.Mine"}})["own_loss.Mine"]["files"]
    assert files.keys() == {"own_loss", "scales.loss"}


def test_sources_of_a_class_in_a_notebook_are_those_of_its_methods(monkeypatch):
    def sources_of(factor: int) -> object:
        cell, notebook = f"class Mine:\n    def loss(self): return {factor}\n", ModuleType("own_notebook")
        lines = (len(cell), None, cell.splitlines(keepends=True), f"cell {factor}")
        monkeypatch.setitem(linecache.cache, f"cell {factor}", lines)
        monkeypatch.setitem(sys.modules, "own_notebook", notebook)
        exec(compile(cell, f"cell {factor}", "exec"), vars(notebook))
        return own_sources({"objective": {"_target_": "own_notebook.Mine"}})

    assert sources_of(1) == sources_of(1) != sources_of(2)
