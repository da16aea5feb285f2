"""What a configuration may name without being asked, and which classes keep the contracts of their keys."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from cascade_train.assembly.components import build_component
from cascade_train.config.components import CONTRACTS, broken_contract, check_component
from cascade_train.config.preflight import preflight
from cascade_train.config.targets import check_confined, class_constant, import_target, is_trusted
from cascade_train.errors import ConfigError
from tests.unit.config.composing import composed

SOURCE = """
import abc
import torch
from cascade_train.data import source
from cascade_train.data.source import Source
from cascade_train.filters.base import ImageFilter
from cascade_train.tasks.base import Task
from cascade_train.tasks.finetune import Finetune

class Alone:
    def open(self): ...

class Half(Source):
    def open(self): ...

class Reads:
    def read(self, row): ...

class Whole(Reads, source.Source):
    def open(self): ...

class Bare(Task):
    pass

class Own(Finetune):
    fits = ("stage_c",)

class NoMap(ImageFilter):
    channels = 1

class Sgd(torch.optim.Optimizer):
    pass

class NoOptimizer:
    def __init__(self, params, lr): ...

def completed(cls):
    cls.open = cls.read = lambda self, *_: None
    cls.__abstractmethods__ = frozenset()
    return cls

@completed
class Decorated(Source):
    pass

Made = type("Made", (Source,), {"open": lambda self: None})
Strange = type("Strange", (), {})

def whole(samples, seed, only, names, background_weight, **options): return Whole(**options)
def nothing(**options): return object()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of a user's own."""
    name = f"own_{tmp_path.name.translate(str.maketrans('-[]', '___'))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def configured(own: str, key: str, name: str) -> DictConfig:
    cfg = composed("model=c_tiny", "task=finetune")
    cfg[key]._target_ = f"{own}.{name}"
    cfg.run.allowed_packages.append(own)
    return cfg


@pytest.mark.parametrize(("key", "name"), [("data", "Whole"), ("task", "Own"), ("data", "Decorated")])
def test_classes_that_keep_the_contract_pass(own: str, key: str, name: str):
    assert broken_contract(key, f"{own}.{name}", import_target(f"{own}.{name}"), CONTRACTS[key]) is None


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("data", "Alone", r"data._target_=\w+.Alone cannot be used: Alone does not inherit from Source. Write 'from "
         r"cascade_train.data.source import Source' and 'class Alone\(Source\)', and define read in it."),
        ("data", "Half", "Half does not define read. Define what is missing"),
        ("task", "Bare", "does not define .*exports, fits, .*measures, .*trains_network. Define"),
        ("task", "Whole", "Whole does not inherit from Task"),
        ("objective", "Alone", "Alone does not inherit from Objective or PictureObjective. Write"),
        ("optimizer", "NoOptimizer", "Or choose optimizer=torch and optimizer.algorithm._target_=.*NoOptimizer"),
    ],
)  # fmt: skip
def test_a_class_that_breaks_its_contract_is_refused(own: str, key: str, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        preflight(configured(own, key, name), ranks=1)


def test_nothing_of_a_package_is_imported_before_it_is_allowed(own: str):
    cfg = configured(own, "optimizer", "NoOptimizer")
    cfg.run.allowed_packages = ["cascade_train", "torch"]
    with pytest.raises(ConfigError, match=f"optimizer._target_={own}.NoOptimizer names the package '{own}', which may"):
        preflight(cfg, ranks=1)
    with pytest.raises(ConfigError, match="names the package"):
        check_component("task", {"_target_": f"{own}.Own", "inner": [{"_target_": "os.system"}]}, [own])
    assert own not in sys.modules


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("task.filter", "NoMap", "does not define apply"),
        ("optimizer.algorithm", "NoOptimizer", "does not inherit from Optimizer"),
    ],
)
def test_nested_classes_are_refused_too(own: str, key: str, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check_component(key, {"_target_": f"{own}.{name}", "_partial_": True}, [own], contracts=CONTRACTS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Made", r"data._target_=\w+.Made cannot be used: Made does not define read"),
        ("Strange", "Strange does not inherit from Source. .* and define open, read in it"),
        ("nothing", "object does not inherit from Source"),
    ],
)
def test_what_a_call_makes_is_refused_too(own: str, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build_component(preflight(configured(own, "data", name), ranks=1), "data")


def test_a_function_may_make_a_component(own: str):
    assert type(build_component(preflight(configured(own, "data", "whole"), ranks=1), "data")).__name__ == "Whole"


def test_a_module_that_cannot_be_imported_is_refused_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unfinished.py").write_text("import cascade_train.nowhere\nclass A: ...\n")
    (tmp_path / "mistyped.py").write_text("class A\n")
    with pytest.raises(ConfigError, match=r"data._target_=unfinished.A cannot be imported: No module .*nowhere"):
        check_component("data", {"_target_": "unfinished.A"}, None)
    with pytest.raises(ConfigError, match=r"data._target_='mistyped' cannot be read: .*mistyped.py, line 1: expected"):
        check_component("data", {"_target_": "mistyped.A"}, None)


def test_only_what_inherits_from_an_optimizer_or_schedule_is_trusted_in_the_engine():
    assert is_trusted("cascade_train.engine.lr_schedule.CosineDecaySchedule")
    assert not is_trusted("cascade_train.engine.checkpoint.store.CheckpointStore")
    assert not is_trusted("cascade_train.engine.loop.Trainer")


ATTACKS = (
    "torch.hub.load",
    "torch.load",
    "torch.os.system",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.cpp_extension.BuildExtension",
    "torch.package.PackageImporter",
    "torch.multiprocessing.spawn",
    "torch.nn.modules.module.torch.hub.load",
    "torch.optim.Nothing",
    "cascade_train.data.stream.read_tar",
    "cascade_train.data.stream.subprocess.run",
    "torch.optim.adamw.torch.hub.load",
    "cascade_train.engine.optimizer.Any",
    "cascade_train.files.durable.write_durably",
    "cascade_train.models.formats.weights.torch.load",
    "cascade_train.__main__.launch",
    "cascade_train.commands.generate.generate",
)
COMPONENTS = (
    "torch.optim.SGD",
    "torch.nn.Identity",
    "cascade_train.models.cascade.stage_c.StageC",
    "mypackage.Anything",
)


@pytest.mark.parametrize("target", ATTACKS)
def test_what_is_no_component_is_refused(target: str) -> None:
    with pytest.raises(
        ConfigError, match=f"task._target_={target} is no component. Of torch .* run.allow_any_target=true"
    ):
        check_confined("task", target)
    assert not is_trusted(target)


@pytest.mark.parametrize("target", [*COMPONENTS, "cascade_train.filters.network.load_exported"])
def test_components_pass(target: str) -> None:
    check_confined("task", target)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda node: {"a": {"b": node}},
        lambda node: {"a": [1, [node]]},
        lambda node: {"_target_": "torch.nn.Sequential", "_args_": [node]},
        lambda node: {"_args_": [], "_convert_": "none", "_recursive_": False, "inner": node},
    ],
)
def test_no_place_hides_a_target(hidden) -> None:
    with pytest.raises(ConfigError, match=r"torch\.hub\.(load|list)"):
        check_component("task", hidden({"_target_": "torch.hub.list", "github": "evil/repo"}), ["torch"])


def test_whoever_lifts_the_rule_may_name_anything() -> None:
    check_component("task", {"_target_": "torch.hub.list", "github": "owner/name"}, None)


@pytest.mark.parametrize(("target", "kind"), [("tests.unit.config.members", "module"), (f"{__name__}.SOURCE", "str")])
def test_what_cannot_be_called_is_refused(target: str, kind: str):
    with pytest.raises(ConfigError, match=rf"^data\._target_={target} is a {kind} and no class\. Name a class\."):
        check_component("data", {"_target_": target}, ["tests"])


def test_a_module_that_is_there_needs_no_file(monkeypatch: pytest.MonkeyPatch):
    made = types.ModuleType("made_in_a_notebook")
    made.Mine = type("Mine", (), {})
    monkeypatch.setitem(sys.modules, "made_in_a_notebook", made)
    assert import_target("made_in_a_notebook.Mine") is made.Mine


def test_what_fails_while_it_is_imported_names_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_library.py").write_text("raise OSError('libcuda.so: cannot open')\n")
    with pytest.raises(OSError, match="libcuda") as caught:
        import_target("broken_library.Thing")
    assert caught.value.__notes__ == ["while broken_library.Thing was imported"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.unit.config.members.Chil", r"members has no 'Chil'. Did you mean tests.unit.config.members.Child\?"),
        (
            "nowhere.at.All",
            "no module or package 'nowhere' where Python looks .*current folder, /.*PYTHONPATH",
        ),
    ],
)
def test_a_target_that_names_nothing_is_refused(target: str, message: str):
    with pytest.raises(ConfigError, match=message):
        import_target(target)


def test_class_constants_are_read_with_inheritance():
    assert class_constant("tests.unit.config.members.Child", "fits") == ("stage_b",)
    assert class_constant("tests.unit.config.members.Child", "name") == "plain"
    assert class_constant("tests.unit.config.members.Child", "absent") is None
    assert class_constant("tests.unit.config.members.Child", "build") is None
