"""The configuration of published or packaged weights, which no run left: the recipe that ships, with those in it.

Must not live here: which size weights are of (models/formats/weights_tensors.py), and configurations of
runs (saved.py).
"""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from cascade_train.config.groups import conf_dir
from cascade_train.config.hydra_compat import BASE
from cascade_train.config.launch import register_schema
from cascade_train.config.preflight import preflight
from cascade_train.config.saved import ALONE

TINY_RECIPES = {"b_tiny": "tiny_b", "c_tiny": "tiny_c"}
"""Experiment that trained the packaged weights of a size."""


def published_config(model: str, weights: str) -> DictConfig:
    """Return the checked configuration that a run of this size would have; a tiny one's is that of its recipe.

    Args:
        model: an option of the group `model`.
        weights: of its network, see `model.weights`.
    """
    task = "reconstruction" if model.startswith("b_") else "finetune"
    overrides = [f"model={model}", f"task={task}", "run.name=published", "train.global_batch_size=1"]
    if model in TINY_RECIPES:
        overrides.append(f"experiment={TINY_RECIPES[model]}")
    register_schema()
    with initialize_config_dir(str(conf_dir()), **BASE):
        cfg = compose("config", overrides)
    cfg.model.weights = weights
    cfg.parallel = ALONE
    return preflight(cfg, ranks=1)
