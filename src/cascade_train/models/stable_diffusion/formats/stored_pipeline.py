"""A folder of diffusers' pipeline as the configuration that a run on it would have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import parsing, stored_mapping
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from cascade_train.models.stable_diffusion.unet_config import ConditionUNetConfig

LATENT_SIDE = 64
"""Of a network whose configuration does not say it: of 512 pixels."""

_TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "vocab_size")
_VAE = ("scaling_factor", "latent_channels", "block_out_channels", "layers_per_block", "norm_num_groups")
_BETAS = ("beta_schedule", "beta_start", "beta_end", "num_train_timesteps", "rescale_betas_zero_snr")

_EDM = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "rho": 7.0}
"""Of diffusers' EDM schedulers, with their defaults."""

_OBJECTIVES = {"epsilon": "ddpm", "v_prediction": "ddpm_v", "sample": "ddpm"}
_EDM_OBJECTIVES = {"epsilon": "edm_sdxl"}
"""Prediction type of diffusers' schedulers -> the objective."""

_OF_SAMPLE = {"objective.target._target_": "cascade_train.diffusion.target.X0Target"}


def stored_pipeline(folder: Path, base: str) -> tuple[list[str], dict[str, Any]]:
    """Return overrides and values by dotted key of a training that would go on from a pipeline's folder.

    `base` is the model whose sizes the folder's own replace. A ConfigError for a part that is not there, or an
    architecture that this library does not build.
    """
    with parsing(f"{folder}: a config.json"):
        schedule = _json(folder / "scheduler" / "scheduler_config.json")
        objective = _objective(schedule, folder)
        overrides = [f"model={base}", "task=finetune", f"objective={objective}", "run.name=pipeline"]
        changed: dict[str, Any] = {"model.weights": str(folder)}
        network, vae = _network(_json(folder / "unet" / "config.json")), _vae(folder / "vae" / "config.json")
        changed |= {f"model.network.{name}": value for name, value in network.items()}
        changed |= {f"model.vae.{name}": vae[name] for name in _VAE}
        changed["model.image_size"] = network["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
        for number in ("", "_2") if (folder / "text_encoder_2").is_dir() else ("",):
            tower = _json(folder / f"text_encoder{number}" / "config.json", (*_TOWER, "max_position_embeddings"))
            own = {name: tower[name] for name in _TOWER} | {"max_tokens": tower["max_position_embeddings"]}
            own |= {"tokenizer": str(folder), "tokenizer_subfolder": f"tokenizer{number}", "pad_token": None}
            own |= {"projection_dim": tower.get("projection_dim", 512)} if number else {}
            changed |= {f"model.text_encoder{number}.{name}": value for name, value in own.items()}
        return overrides, changed | _noise(schedule)


def _network(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `ConditionUNetConfig` of a network's configuration in a folder of diffusers.

    What that lacks, or has one number for all levels, is as diffusers takes it.
    """
    known = inspect.signature(STABLE_DIFFUSION.network_class().__init__).parameters
    found = {name: each.default for name, each in known.items()} | dict(stored)
    found["attention_head_dim"] = found["num_attention_heads"] or found["attention_head_dim"]
    for name in ("attention_head_dim", "transformer_layers_per_block"):
        found[name] = [found[name]] * len(found["block_out_channels"]) if isinstance(found[name], int) else found[name]
    found["sample_size"] = found["sample_size"] or LATENT_SIDE
    wanted = {field.name: found[field.name] for field in fields(ConditionUNetConfig)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()}


def _vae(path: Path) -> dict[str, Any]:
    """Return options of an autoencoder; what older folders lack are diffusers' defaults, such as the scale 0.18215."""
    from diffusers import AutoencoderKL  # heavy

    known = inspect.signature(AutoencoderKL.__init__).parameters
    stored = _json(path, ("block_out_channels",))
    return {name: stored.get(name, known[name].default) for name in _VAE}


def _json(path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a file of a pipeline says; a ConfigError where it is not there, or lacks something that is needed."""
    if not path.is_file():
        raise ConfigError(f"from={path.parent}: the pipeline has no {path.name}; copy the whole folder")
    stored = stored_mapping(path)
    if missing := [name for name in needed if name not in stored]:
        raise ConfigError(f"{path}: lacks {', '.join(missing)}; save the pipeline by diffusers again")
    return stored


def _noise(schedule: dict[str, Any]) -> dict[str, Any]:
    """Return the noise levels of a scheduler, by dotted key of the objective."""
    if "EDM" not in str(schedule.get("_class_name")):
        found = {f"objective.schedule.{name}": schedule[name] for name in _BETAS if name in schedule}
        return found | (_OF_SAMPLE if schedule.get("prediction_type") == "sample" else {})
    low, high, data, power = (schedule.get(name, default) for name, default in _EDM.items())
    of_schedule = {"objective.schedule.sigma_range": [low, high], "objective.schedule.p": power}
    return {**of_schedule, "objective.scaling.sigma_data": data}


def _objective(schedule: dict[str, Any], folder: Path) -> str:
    """Return the objective that a scheduler samples, without its noise levels; a ConfigError where there is none."""
    kind, prediction = str(schedule.get("_class_name")), schedule.get("prediction_type", "epsilon")
    has_betas = schedule.get("trained_betas") is not None
    known = _EDM_OBJECTIVES if "EDM" in kind else _OBJECTIVES
    if "FlowMatch" in kind or has_betas or prediction not in known:
        raise ConfigError(
            f"from={folder}: its scheduler, {kind} with prediction_type={prediction}"
            f"{' and trained_betas' if has_betas else ''}, belongs to no objective here: that must be one of "
            f"{', '.join(_OBJECTIVES)}, with EDM epsilon. Give the pipeline the scheduler that its network was trained "
            "for"
        )
    return known[prediction]
