"""A folder of someone else may name components, and nothing that could run its wishes."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from cascade_train.config.preflight import preflight
from cascade_train.config.saved import load_saved_config
from cascade_train.errors import ConfigError
from tests.unit.config.composing import composed


@pytest.fixture(scope="module")
def checked() -> DictConfig:
    return preflight(composed("model=c_tiny", "task=lora"), ranks=1)


def write(cfg: DictConfig, folder: Path) -> Path:
    OmegaConf.save(cfg, folder / "config.yaml")
    return folder


def test_a_saved_configuration_comes_back(checked: DictConfig, tmp_path: Path):
    cfg = load_saved_config(write(checked, tmp_path))
    assert cfg.model == checked.model
    assert cfg.task == checked.task


def test_the_batch_that_a_run_trained_with_comes_back(tmp_path: Path):
    batch = ("train.global_batch_size=16", "train.micro_batch_size=2")
    cfg = preflight(composed("model=c_tiny", "task=lora", *batch), ranks=4)
    shown = load_saved_config(write(cfg, tmp_path)).train
    assert (shown.global_batch_size, shown.micro_batch_size) == (16, 2)


def test_one_rank_looks_at_what_many_trained(tmp_path: Path):
    cfg = preflight(composed("model=c_tiny", "task=lora", "parallel=hsdp", "parallel.shard_size=4"), ranks=8)
    cfg.parallel.cpu_offload = True
    shown = load_saved_config(write(cfg, tmp_path)).parallel
    assert (shown.mode, shown.shard_size, shown.cpu_offload) == ("single", None, False)


@pytest.mark.parametrize("target", ["os.system", "torch.nn.Identity", "cascade_train.files.durable.write_durably"])
@pytest.mark.parametrize("place", ["model.previewer", "optimizer.algorithm"])
def test_what_is_no_component_is_refused(checked: DictConfig, tmp_path: Path, target: str, place: str):
    cfg = checked.copy()
    with open_dict(cfg):
        OmegaConf.update(cfg, place, {"_target_": target}, merge=False)
    with pytest.raises(ConfigError, match=f"names {target}, which is none of this library's components"):
        load_saved_config(write(cfg, tmp_path))


def test_a_folder_reads_nothing_of_this_machine(checked: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED", "secret")
    cfg = checked.copy()
    with open_dict(cfg):
        cfg.sample.prompts = ["a", "evil/${oc.env:PLANTED}"]
    with pytest.raises(ConfigError, match=r"sample\.prompts\[1\] holds an interpolation, which a run never writes"):
        load_saved_config(write(cfg, tmp_path))
    assert load_saved_config(tmp_path, allow_any_target=True).sample.prompts[1] == "evil/secret"


def test_what_results_do_not_need_may_be_of_packages_that_are_not_here(checked: DictConfig, tmp_path: Path):
    cfg = checked.copy()
    cfg.optimizer.algorithm = {"_target_": "not_on_this_machine.Sgd", "_partial_": True}
    cfg.data = {"_target_": "not_on_this_machine.Data"}
    with pytest.raises(ConfigError, match="names not_on_this_machine"):
        load_saved_config(write(cfg, tmp_path))
    assert load_saved_config(tmp_path, allow_any_target=True).model == checked.model


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder. Name the folder of a run, or the export/ that it left"):
        load_saved_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config.yaml in it\. Name the folder"):
        load_saved_config(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)), "has an alias"),
        ("deep: " + "[" * 10_000, "nested deeper than 50 levels"),
        ("a: [1", "cannot be read as YAML"),
        ("a: ${b", "cannot be read as YAML"),
        ("a: 1\na: 2", "cannot be read as YAML"),
    ],
)
def test_a_folder_that_could_not_be_read_to_its_end_is_refused(
    checked: DictConfig, tmp_path: Path, more: str, message: str
):
    path = write(checked, tmp_path) / "config.yaml"
    path.write_text(f"{path.read_text()}\n{more}")
    with pytest.raises(ConfigError, match=message):
        load_saved_config(tmp_path)
