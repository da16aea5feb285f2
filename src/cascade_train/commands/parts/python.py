"""What `from cascade_train import …` gives: commands as functions, for scripts and notebooks.

Lives here: overrides in, values out. Errors are exceptions, and nothing ends the process. What a command does stands in
its own file.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from PIL.Image import Image

from cascade_train.commands.evaluate import EvaluateArgs, evaluation
from cascade_train.commands.generate import GenerateArgs, sampled
from cascade_train.commands.parts.command_line import filled
from cascade_train.commands.plan import PlanArgs, checked, planned
from cascade_train.commands.train import train as train_command
from cascade_train.config import launch
from cascade_train.config.error_messages import in_our_words
from cascade_train.config.launch import replaced
from cascade_train.config.overrides import searching, with_paths_quoted
from cascade_train.config.preflight import preflight
from cascade_train.config.sweep import is_main
from cascade_train.engine.run.config_difference import flatten
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_mapping, read_rows
from cascade_train.redaction import log_shown

if TYPE_CHECKING:
    from cascade_train.assembly.planning.plan import Plan
    from cascade_train.results.evaluation.result import Evaluation

ORIGIN = "cascade_train"
"""Attribute of the metadata of a configuration that `compose` returned: Hydra's state, and the values by key."""


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
        metrics = {name: value for row in read_rows(folder / "metrics.jsonl") for name, value in row.items()}
        return cls(path=folder, metrics=metrics, stopped=reason, export=export if export.is_dir() else None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each optimizer step, in order; none before the first."""
        return list(read_rows(self.path / "metrics.jsonl"))


def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """Return the configuration of a training, checked; values that follow others go on following them.

    `overrides` are those of the command line, `task=lora`, `train.max_steps=100`; `config_dir` is a folder with groups
    of your own, as `--config-dir`. What the command line would refuse is a ConfigError.
    """
    cfg = _composed(overrides, config_dir)
    _checked(cfg, preflight)
    return cfg


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
    composed = _composed(overrides, config_dir)
    cfg, folder = _checked(composed, preflight), Path.cwd()
    log = log_shown(logging.INFO if is_main() else logging.WARNING)
    with settings_kept(), log, _explained(), replaced(HydraConfig.instance(), "cfg", _state(composed)):
        train_command(cfg)
    return Run.of(folder / cfg.run.dir)


def plan(
    *overrides: str | DictConfig,
    ranks: int | None = None,
    device: str = "h100",
    samples: bool = True,
    config_dir: str | Path | None = None,
) -> Plan:
    """Return memory, time and disk of a training before it begins; `print` shows it as `cascade-train plan` does.

    The options are those of the command; files that the run must name may be left out.
    """
    args = PlanArgs(ranks=ranks, device=device, samples=samples)
    cfg = _checked(_composed(overrides, config_dir), partial(checked, args))
    with _explained():
        return planned(args, cfg)


def generate(source: str | Path | Run, prompts: str | Sequence[str] = (), **options: Any) -> list[Image]:
    """Return images of trained stages, `count` for each prompt, one, several, or `@file`.

    `source` is a run, its export, or published weights; the options are those of `cascade-train generate`, by name.
    `out` writes the images, and a grid, to a folder.
    """
    out = options.pop("out", None)
    with settings_kept(), _explained():
        args = filled(GenerateArgs, _arguments(source, prompts, options).items())
        return sampled(args, None if out is None else str(out))[0]


def evaluate(source: str | Path | Run, prompts: str | Sequence[str] = (), **options: Any) -> Evaluation:
    """Measure pictures of trained stages, and return the numbers, as `measures` by name. Continues where it was killed.

    `source` and `prompts` as for `generate`, for a Stage C; without prompts, the captions of the real pictures. The
    options are those of `cascade-train evaluate`, by name, such as `real` and `features`.
    """
    with settings_kept(), _explained(), redirect_stdout(io.StringIO()):
        result = evaluation(filled(EvaluateArgs, _arguments(source, prompts, options).items()))
    assert result is not None, "a watch has no source"
    return result


def _arguments(source: str | Path | Run, prompts: str | Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command by key; prompts are a list, or `@file`."""
    if isinstance(prompts, str) and not prompts.startswith("@"):
        prompts = [prompts]
    path = source.path if isinstance(source, Run) else source
    return {"from": str(path), "prompts": prompts if isinstance(prompts, str) else list(prompts), **options}


def _composed(overrides: Sequence[Any], config_dir: str | Path | None) -> DictConfig:
    """The configuration that overrides describe, not checked; or the one in their place."""
    if len(overrides) == 1 and isinstance(overrides[0], DictConfig):
        return overrides[0]
    with _explained(), replaced(HydraConfig.instance(), "cfg", None), launch.texts_checked():
        launch.prepare_process()
        if not all(isinstance(override, str) for override in overrides):
            raise ConfigError(
                "give overrides as texts, key=value, one after the other (of a list: *overrides); or one configuration "
                "of compose() and nothing else."
            )
        choices = launch.with_implied_choices(with_paths_quoted(overrides))
        launch.check_overrides(choices)
        cfg = launch.compose_root(choices if config_dir is None else [*choices, searching(config_dir)])
        cfg.run.name = cfg.run.name  # what follows from Hydra's choices follows from these
        setattr(cfg._metadata, ORIGIN, (HydraConfig.instance().cfg, _written(cfg)))
    return cfg


def _written(cfg: DictConfig) -> dict[str, Any]:
    """The values of a configuration by key, as they are written."""
    return flatten(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]


def _state(cfg: DictConfig) -> Any:
    """Hydra's state of a configuration; values set since it was composed count as overrides."""
    hydra, values = getattr(cfg._metadata, ORIGIN, (None, dict[str, Any]()))
    if hydra is None:
        return None
    since = {key: value for key, value in _written(cfg).items() if key not in values or values[key] != value}
    state = copy.deepcopy(hydra)
    OmegaConf.set_readonly(state.hydra, False)
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in since.items()}
    state.hydra.overrides.task.extend([f"{key}={text}" for key, text in texts.items()])
    return state


def _checked(cfg: DictConfig, check: Callable[[DictConfig], DictConfig]) -> DictConfig:
    """A configuration as `check` returns it, all values resolved."""
    with _explained(), replaced(HydraConfig.instance(), "cfg", _state(cfg)):
        return check(cfg)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's random states and switches, and the garbage collector's, as they were before the block."""
    import torch  # takes seconds

    collects, products, cudnn = gc.isenabled(), torch.backends.cuda.matmul, torch.backends.cudnn
    kernels, precision, benchmark = torch.get_deterministic_debug_mode(), products.fp32_precision, cudnn.benchmark
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    gc.enable()  # else a training takes this for a process of its own
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        torch.set_deterministic_debug_mode(kernels)
        products.fp32_precision, cudnn.benchmark = precision, benchmark
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
