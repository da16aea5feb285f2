"""What `from cascade_train import …` gives: commands as functions, for scripts and notebooks.

Lives here: overrides in, values out. Errors are exceptions, and nothing ends the process. What a command does stands in
its own file.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from PIL.Image import Image

from cascade_train.commands.evaluate import EvaluateArgs, judged
from cascade_train.commands.generate import GenerateArgs, sampled
from cascade_train.commands.parts.command_line import filled
from cascade_train.commands.plan import PlanArgs, checked, planned
from cascade_train.commands.train import train as train_command
from cascade_train.config.error_messages import in_our_words
from cascade_train.config.groups import nearest
from cascade_train.config.launch import (
    check_overrides,
    compose_root,
    prepare_process,
    replaced,
    texts_checked,
    with_implied_choices,
)
from cascade_train.config.overrides import searching, with_paths_quoted
from cascade_train.config.preflight import preflight
from cascade_train.config.sweep import is_main
from cascade_train.engine.run.config_difference import flatten
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_mapping, read_rows
from cascade_train.redaction import log_shown

if TYPE_CHECKING:
    from cascade_train.assembly.planning.plan import Plan
    from cascade_train.results.evaluation.verdict import Verdict

F = TypeVar("F", bound=Callable[..., Any])

METRICS = "metrics.jsonl"
"""In the folder of a run."""

ORIGIN = "cascade_train"
"""Attribute of the metadata of a configuration that `compose` returned, and of its copies: its `Origin`."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a configuration was composed: Hydra's state, and the values by key, as they are written."""

    hydra: Any
    values: Mapping[str, Any]

    def __deepcopy__(self, memo: Any) -> Origin:
        """Return this: copies of a configuration share it."""
        return self


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a training, read from its files.

    Attributes:
        path: its folder.
        metrics: newest value of each metric, such as `loss`, with the `step` it ended at.
        stopped: why and where it stopped before its last step, in a sentence; None = it did not.
        export: folder of what it trained, for `generate`, diffusers and others; None = not written yet.
    """

    path: Path
    metrics: dict[str, float]
    stopped: str | None
    export: Path | None

    @classmethod
    def of(cls, path: str | Path) -> Run:
        """Return what the folder of a run holds; a ConfigError where it is none."""
        folder = Path(path).absolute()
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{path} is not the folder of a run: there is no config.yaml in it.")
        reason, export = read_mapping(folder / "stopped.json").get("reason"), folder / "export"
        metrics = {name: value for row in read_rows(folder / METRICS) for name, value in row.items()}
        return cls(path=folder, metrics=metrics, stopped=reason, export=export if export.is_dir() else None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each optimizer step, in order; none before the first."""
        return list(read_rows(self.path / METRICS))


def called_rightly(function: F) -> F:
    """Have a function refuse arguments that it does not take with a ConfigError, which shows how it is called."""
    signature = inspect.signature(function)
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            wrong = next((each for each in options if each not in signature.parameters), "")
            hint = nearest(wrong, signature.parameters)
            if wrong and not hint and "overrides" in signature.parameters:
                hint = f" An override is a text: {name}('{wrong}={options[wrong]}')."
            bare = [part.replace(annotation=inspect.Parameter.empty) for part in signature.parameters.values()]
            form = f"{name}{inspect.Signature(bare)}"
            raise ConfigError(f"{name}(): {error}. Call it as {form}.{hint}") from None
        return function(*args, **options)

    return cast(F, call)


@called_rightly
def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """Return the configuration of a training, checked; values that follow others go on following them.

    `overrides` are those of the command line, `task=lora`, `train.max_steps=100`; `config_dir` is a folder with groups
    of your own, as `--config-dir`. What the command line would refuse is a ConfigError.
    """
    cfg = _composed(overrides, config_dir)
    _checked(cfg, preflight)
    return cfg


@called_rightly
def train(*overrides: str | DictConfig, config_dir: str | Path | None = None) -> Run:
    """Train to the end, or to a stop by a signal, and return what the run left. Collective.

    Ctrl-C, or the interruption of a notebook's cell, ends the run after the step, saved; the same call continues it. In
    another thread than the main one there are no signals. `run.max_hours` counts from the start of the process.
    Random states and switches of torch, the log and handlers of signals are afterwards as they were before.

    The arguments are those of `compose`, or one configuration that it returned.

    Raises:
        ConfigError: something to change; a refused start leaves no folder.
        RunError: a failure at run time, or another training or process group in this process.
        KeyboardInterrupt: a signal before the first step, or a second one.
    """
    given = _given(overrides, config_dir)
    cfg, folder = _checked(given, preflight), Path.cwd()
    log = log_shown(logging.INFO if is_main() else logging.WARNING)
    with settings_kept(), log, _explained(), replaced(HydraConfig.instance(), "cfg", _state(given)):
        train_command(cfg)
    return Run.of(folder / cfg.run.dir)


@called_rightly
def plan(
    *overrides: str | DictConfig,
    ranks: int | None = None,
    device: str = "h100",
    samples: bool = True,
    config_dir: str | Path | None = None,
) -> Plan:
    """Return memory, time and disk of a training before it begins; `print` shows it as `cascade-train plan` does.

    Args:
        overrides: as for `train`; files that the run must name may be left out.
        ranks: processes of the run; None = as many as torchrun has started, else 1.
        device: what it is to run on: h100, h200, a100 or rtx4090.
        samples: open the data, where it is on this machine.
        config_dir: as for `compose`.
    """
    args = PlanArgs(ranks=ranks, device=device, samples=samples)
    cfg = _checked(_given(overrides, config_dir), partial(checked, args))
    with _explained():
        return planned(args, cfg)


@called_rightly
def generate(source: str | Path | Run, prompts: str | Sequence[str] = (), **options: Any) -> list[Image]:
    """Return images of trained stages, `count` for each prompt.

    Args:
        source: a run, its export, or published weights.
        prompts: one, several, or `@file`.
        options: the others of `cascade-train generate`, by name; `out` writes the images, and a grid, to a folder.
    """
    out = options.pop("out", None)
    with settings_kept(), _explained():
        args = filled(GenerateArgs, _arguments(source, prompts, options).items())
        return sampled(args, None if out is None else str(out))[0]


@called_rightly
def evaluate(source: str | Path | Run, prompts: str | Sequence[str] = (), **options: Any) -> Verdict:
    """Measure pictures of trained stages, and return the numbers, as `measures` by name. Continues where it was killed.

    Args:
        source: a run, its export, or published weights.
        prompts: for a Stage C, one or several, or `@file`; none = the captions of the real pictures.
        options: the others of `cascade-train evaluate`, by name, such as `real` and `features`.
    """
    with settings_kept(), _explained(), redirect_stdout(io.StringIO()):
        found = judged(filled(EvaluateArgs, _arguments(source, prompts, options).items()))
    assert found is not None, "a watch has no source"
    return found


def _arguments(source: str | Path | Run, prompts: str | Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command by key; prompts are a list, or `@file`."""
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts={prompts!r} must be a text, or a list of texts.")
    if isinstance(prompts, str) and not prompts.startswith("@"):
        prompts = [prompts]
    named = source.path if isinstance(source, Run) else source
    return {"from": str(named), "prompts": prompts if isinstance(prompts, str) else list(prompts), **options}


def _given(overrides: Sequence[str | DictConfig], config_dir: str | Path | None) -> DictConfig:
    """Return the configuration that overrides, or a configuration in their place, describe."""
    if len(overrides) == 1 and isinstance(overrides[0], DictConfig):
        return overrides[0]
    return _composed(overrides, config_dir)


def _composed(overrides: Sequence[Any], config_dir: str | Path | None) -> DictConfig:
    """Return the configuration that overrides describe, not checked."""
    prepare_process()
    with _explained(), replaced(HydraConfig.instance(), "cfg", None), texts_checked():
        if odd := [type(each).__name__ for each in overrides if not isinstance(each, str)]:
            raise ConfigError(
                "give overrides as texts, key=value, one after the other (of a list: *overrides); or one configuration "
                f"of compose() and nothing else. This is a {odd[0]}."
            )
        if flag := next((each for each in overrides if each.startswith("-")), None):
            raise ConfigError(f"{flag!r} is an option of the command line, and no override, key=value.")
        choices = with_implied_choices(with_paths_quoted(overrides))
        check_overrides(choices)
        for each in OverridesParser.create().parse_overrides(choices):
            if each.is_sweep_override():
                raise ConfigError(f"{each.input_line} has several values: call this for each of them, in a loop.")
        if config_dir is not None:
            choices.append(searching(config_dir))
        cfg = compose_root(choices)
        cfg.run.name = cfg.run.name  # what follows from Hydra's choices follows from these
        setattr(cfg._metadata, ORIGIN, Origin(hydra=HydraConfig.instance().cfg, values=_written(cfg)))
    return cfg


def _written(cfg: DictConfig) -> dict[str, Any]:
    """Return the values of a configuration by key, as they are written."""
    return flatten(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]


def _state(cfg: DictConfig) -> Any:
    """Return Hydra's state of a configuration; values set since it was composed count as overrides."""
    origin: Origin | None = getattr(cfg._metadata, ORIGIN, None)
    if origin is None:
        return None
    since = {key: value for key, value in _written(cfg).items() if origin.values.get(key, origin) != value}
    if not since:
        return origin.hydra
    state = copy.deepcopy(origin.hydra)
    OmegaConf.set_readonly(state.hydra, False)
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in since.items()}
    state.hydra.overrides.task.extend([f"{key}={text}" for key, text in texts.items()])
    return state


def _checked(cfg: DictConfig, check: Callable[[DictConfig], DictConfig]) -> DictConfig:
    """Return a configuration as `check` does, all values resolved."""
    with _explained(), replaced(HydraConfig.instance(), "cfg", _state(cfg)):
        return check(cfg)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's random states, its switches and the garbage collector's as they were before the block.

    Switches: deterministic kernels, cuDNN's benchmark, the precision of fp32 products.
    """
    import torch  # takes seconds

    collects, products = gc.isenabled(), torch.backends.cuda.matmul
    kernels, precision = torch.get_deterministic_debug_mode(), products.fp32_precision
    benchmark = torch.backends.cudnn.benchmark
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    gc.enable()  # else a training takes this for a process of its own
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        torch.set_deterministic_debug_mode(kernels)
        products.fp32_precision = precision
        torch.backends.cudnn.benchmark = benchmark
        if not collects:
            gc.disable()


@contextmanager
def _explained() -> Iterator[None]:
    """Raise the errors of other libraries that mean something to a user as ours; a host's own Hydra is put aside."""
    held = GlobalHydra.instance()
    before, held.hydra = held.hydra, None
    try:
        yield
    except Exception as error:
        if (ours := in_our_words(error)) is error:
            raise
        raise ours from error
    finally:
        GlobalHydra.instance().hydra = before  # its own contexts put a copy in its place
