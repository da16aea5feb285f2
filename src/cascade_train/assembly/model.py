"""Build the model of a run: stage, task, sharded phases; and record its files."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import resolve_name
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from cascade_train.assembly.components import Parts
from cascade_train.config.arguments import component_options
from cascade_train.config.saved import to_plain
from cascade_train.config.targets import components_in, import_target
from cascade_train.distributed.consensus import from_every_rank
from cascade_train.distributed.parallelize import (
    fits_one_device,
    materialise,
    offload_policy,
    parallelize,
    refuse_meta,
)
from cascade_train.distributed.process_group import World, build_mesh, mesh_shape
from cascade_train.engine.average import Ema, PowerFunctionAverages
from cascade_train.engine.checkpoint.folder import hash_file
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.engine.phase import BoundPhase, checked_loss, trainable_parameters
from cascade_train.errors import ConfigError
from cascade_train.files.durable import write_durably
from cascade_train.files.hub import announced_hash, parse_source
from cascade_train.files.untrusted import load_mapping
from cascade_train.models.formats.int8 import fill_codes, quantize
from cascade_train.models.formats.weights_source import WeightsSpec, find_files, is_packaged, local_path
from cascade_train.models.lora import MAGNITUDE
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Phase

log = logging.getLogger(__name__)

RECORD = "weights.json"
"""In a run: key -> source, commit on the hub, and size and SHA-256 of each file; class of one's own -> its sources."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(cfg: DictConfig) -> torch.dtype:
    """Dtype of compute and of frozen weights; preflight has decided what `auto` means."""
    return DTYPES[cfg.train.precision.value]


def build_whole_model(cfg: DictConfig, parts: Parts, world: World) -> None:
    """Build the stage and the task whole on each rank, in the dtype of compute. Collective."""
    from_every_rank(partial(build_modules, cfg, parts, world.device, network_dtype=compute_dtype(cfg)))
    fill(parts.stage, world.device)


def fill(stage: Stage, device: torch.device) -> None:
    """Fill this rank's share of a network on the meta device with its values. Collective."""
    if "network" in stage.left_out:
        return
    shares = materialise(stage.network, device)
    from_every_rank(partial(fill_codes, stage.fill, shares))
    refuse_meta({"network": stage.network})


def build_modules(cfg: DictConfig, parts: Parts, device: torch.device, *, network_dtype: torch.dtype) -> None:
    """Build the stage and attach the task; the network may stay on the meta device."""
    parts.stage.build(device=device, network_dtype=network_dtype, frozen_dtype=compute_dtype(cfg))
    parts.task.attach(parts.stage, parts.objective, device)
    if "network" not in parts.stage.left_out:
        parts.stage.set_attention(cfg.attention.value)
        parts.stage.set_activation_checkpointing(cfg.activation_checkpointing)
    elif cfg.activation_checkpointing:
        raise ConfigError(
            "activation_checkpointing=true: recomputes the network, and here none trains; set it to false"
        )


def build_phases(cfg: DictConfig, parts: Parts, world: World) -> list[BoundPhase]:
    """Build the model, shard what trains, fill the shards, and bind each phase to its optimizer. Collective.

    A network that trains is kept in fp32, as masters. No rank ever holds more of the network than its share: that
    is sharded on the meta device, before it has memory.
    """
    dtype = stored_dtype(cfg, parts)
    from_every_rank(partial(build_modules, cfg, parts, world.device, network_dtype=dtype))
    from_every_rank(partial(quantize_base, cfg, parts))
    frozen = not parts.task.trains_network and "network" not in parts.stage.left_out
    if world.is_main and cfg.model.weights is None and frozen:
        log.warning(
            "model.weights=null: the network has its first values, and its last layer begins at zero, so that nothing "
            "in front of it can learn. Name trained weights, unless you only try a machine."
        )
    phases = parts.task.phases()
    roots = [root for phase in phases for root in phase.modules.values()]
    states = ((phase.optimizer or parts.optimizer).bytes_per_parameter(world.device) for phase in phases)
    whole = partial(fits_one_device, roots, world.device, compute_dtype=compute_dtype(cfg), state_bytes=states)
    fits = all(from_every_rank(whole))
    sizes = {"shard_size": cfg.parallel.shard_size, "machine_ranks": world.machine_ranks}
    shape = mesh_shape(cfg.parallel.mode.value, world.ranks, **sizes, fits=fits)
    shard(cfg, phases, build_mesh(world, shape), offload_policy(cfg.parallel.cpu_offload, world.device))
    fill(parts.stage, torch.device("cpu") if cfg.parallel.cpu_offload else world.device)
    for phase in phases:
        refuse_meta(phase.modules)
    parts.optimizer.check_lr_factors([name for phase in phases for name in trainable_parameters(phase)])
    return [bind(cfg, phase, parts) for phase in phases]


def shard(cfg: DictConfig, phases: list[Phase], mesh: DeviceMesh, offload: OffloadPolicy) -> None:
    """Compile and shard the phases' modules."""
    for phase in phases:
        for name, root in phase.modules.items():
            parallelize(
                root,
                phase.units[name],
                mesh=mesh,
                compute_dtype=compute_dtype(cfg),
                reshard_after_forward=cfg.parallel.reshard_after_forward,
                compile_units=cfg.compile.value == "regional",
                compile_fallback=cfg.compile_fallback,
                offload=offload,
                gather_whole=name in phase.gathered_whole,
            )


def stored_dtype(cfg: DictConfig, parts: Parts) -> torch.dtype:
    """Dtype of the network's weights, if they train `train.master_weights`."""
    stored, trains = DTYPES[cfg.train.master_weights.value], parts.task.trains_network
    if stored == torch.bfloat16 and not (trains and compute_dtype(cfg) == stored):
        reason = f"train.precision={cfg.train.precision.value} computes in fp32" if trains else "no network trains here"
        raise ConfigError(f"train.master_weights=bf16 is for networks that train in bf16: {reason}. Set it to fp32.")
    return stored if trains else compute_dtype(cfg)


def quantize_base(cfg: DictConfig, parts: Parts) -> None:
    """Put the linear layers of a built, frozen network into the format of `train.base_weights`.

    Those outside of its units, which map its conditions, stay.
    """
    if cfg.train.base_weights is None:
        return
    if parts.task.trains_network or "network" in parts.stage.left_out:
        raise ConfigError(
            "train.base_weights=int8 is for a frozen network, with task=lora or task=controlnet: here none is. Set it "
            "to null."
        )
    if any(MAGNITUDE in name for name, _ in parts.stage.network.named_parameters()):
        raise ConfigError(
            "train.base_weights=int8: task.dora=true takes the lengths of the weights' rows as they are. Set "
            "train.base_weights=null, or task.dora=false."
        )
    quantize(module for unit in parts.stage.units() for module in unit)


def bind(cfg: DictConfig, phase: Phase, parts: Parts) -> BoundPhase:
    """Give a sharded phase its optimizer, schedule and averages."""
    parameters = trainable_parameters(phase)
    if not parameters:
        raise ConfigError(f"phase {phase.name}: the task leaves no weight to train: none requires a gradient")
    spec: OptimizerSpec = phase.optimizer or parts.optimizer
    ema = post_hoc = None
    device = None if cfg.ema.device is None else torch.device(cfg.ema.device.value)
    if cfg.ema.post_hoc is not None and phase.averaged:
        post_hoc = PowerFunctionAverages(parameters, lengths=list(cfg.ema.post_hoc), device=device)
    if cfg.ema.decay is not None and phase.averaged:
        options = {key: cfg.ema[key] for key in ("decay", "start_step", "every_steps")}
        ema = Ema(parameters, **options, device=device, ramp=cfg.ema.ramp and cfg.ema.weights is None)
        if cfg.ema.weights is not None:
            from_every_rank(partial(ema.start_from, parts.task.initial_average(cfg.ema.weights)))
    return BoundPhase(
        replace(phase, loss=partial(checked_loss, phase)),
        optimizer=spec.build(parameters, cfg.train.global_batch_size, seed=cfg.run.seed, lrs=phase.lrs),
        base_lr=spec.base_lr(cfg.train.global_batch_size),
        lrs={root: spec.base_lr(cfg.train.global_batch_size, lr) for root, lr in phase.lrs.items()},
        lr_factor=spec.lr_factor,
        lr_schedule=parts.lr_schedule,
        ema=ema,
        post_hoc=post_hoc,
        max_grad_norm=cfg.train.max_grad_norm,
    )


def weight_specs(cfg: DictConfig, parts: Parts) -> list[WeightsSpec]:
    """Files that the stage loads, and the task's on the hub."""
    options = component_options(to_plain(cfg)["task"], "task.")
    files = [(option.key, option.value) for option in options if "File" in option.roles and _on_hub(option.value)]
    return [*parts.stage.weight_specs(), *(WeightsSpec(key=key, source=value) for key, value in files)]


def _on_hub(value: Any) -> bool:
    source = parse_source(value) if isinstance(value, str) and not local_path(value).exists() else None
    return source is not None and bool(source.inside)


def _describe(spec: WeightsSpec) -> dict[str, Any]:
    source = None if local_path(spec.source).exists() else parse_source(spec.source)
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in find_files(spec)}
    return {"source": spec.source, "commit": source and source.commit, "files": files}


def _sha256(path: Path) -> str:
    announced = announced_hash(path)
    return announced if announced is not None and len(announced) == 64 else hash_file(path).sha256


def own_sources(config: Mapping[str, Any]) -> dict[str, Any]:
    """Digests of the source files of each class outside this library and torch, by its target and their modules."""
    targets = {str(node["_target_"]) for _, node in components_in("", config)}
    own = sorted(target for target in targets if target.partition(".")[0] not in ("cascade_train", "torch"))
    return {target: {"source": target, "commit": None, "files": _sources(import_target(target))} for target in own}


def _sources(component: Any) -> dict[str, str]:
    """Digests of its module, those of its bases, and what these import from their package or from beside it."""
    package = component.__module__.partition(".")[0]
    place = _folder_of(package)
    if place is None:
        return {package: sha256(_lines(component).encode()).hexdigest()}
    is_installed = place.name in ("site-packages", "dist-packages")
    waiting = {base.__module__ for base in getattr(component, "__mro__", [component])}
    digests: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        module, top = sys.modules.get(name), name.partition(".")[0]
        file = Path(getattr(module, "__file__", None) or ".")
        is_own = top == package or (not is_installed and _folder_of(top) == place)
        if is_own and file.suffix == ".py" and name not in digests:
            text = file.read_bytes()
            digests[name] = sha256(text).hexdigest()
            waiting |= _imports(text, getattr(module, "__package__", None))
    return digests


def _folder_of(package: str) -> Path | None:
    """Folder in which an imported package or module lies; None = no folder, as that of a notebook."""
    top = sys.modules.get(package)
    path = next(iter(getattr(top, "__path__", [])), getattr(top, "__file__", None))
    return None if path is None else Path(path).parent


def _lines(component: Any) -> str:
    """Source of the methods of a class without a file, of which Python knows no lines itself; "" = of none."""
    methods = filter(inspect.isfunction, vars(component).values()) if inspect.isclass(component) else [component]
    try:
        return "".join(map(inspect.getsource, methods))
    except OSError:  # typed at a prompt, or piped
        return ""


def _imports(text: bytes, package: str | None) -> set[str]:
    """Names of the modules that a source may import."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def record_weights(
    run: Path,
    specs: list[WeightsSpec],
    *,
    initial: tuple[str, ...],
    resumed: bool,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the record of a run; where it is `resumed`, keep its own and compare: keys of `initial` values may differ.

    Raises:
        ConfigError: a frozen part has other files than at the start of the run, or a class in `own` another source.
    """
    with ThreadPoolExecutor() as pool:
        found = dict(zip((spec.key for spec in specs), pool.map(_describe, specs), strict=True)) | {**own}
    path = run / RECORD
    held: Mapping[str, Any] = load_mapping(path) if resumed and path.is_file() else {}
    for key, now in found.items():
        before = held.get(key, now)
        if key not in initial and now["files"] != before["files"]:
            changed = next(n for n, file in (before["files"] | now["files"]).items() if before["files"].get(n) != file)
            remedy = "restore the old ones"
            if is_packaged(now["source"]):
                remedy = f"go on with the library that {run / 'environment.json'} names, whose weights they are"
            elif before["commit"] is not None:
                remedy += f": the commit {before['commit']} behind an @ in the source names them for good"
            raise ConfigError(
                f"{key}={now['source']}: its files changed since this run started ({path}), first {changed}; {remedy}; "
                "or start a new run"
            )
    write_durably(path, json.dumps({**found, **held}, indent=2) + "\n")
