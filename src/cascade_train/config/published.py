"""The configuration of published weights, which no run left: the recipe that ships, with those weights in it.

Must not live here: which size weights are of (models/weights_keys.py), and configurations of runs (saved.py).
"""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from cascade_train.config.groups import conf_dir
from cascade_train.config.launch import register_schema
from cascade_train.config.preflight import preflight
from cascade_train.config.saved import ALONE


def published_config(model: str, weights: str) -> DictConfig:
    """Return the checked configuration that a run of a published size would have.

    Args:
        model: an option of the group `model`.
        weights: of its network, see `model.weights`.
    """
    task = "reconstruction" if model.startswith("b_") else "finetune"
    overrides = [f"model={model}", f"task={task}", "run.name=published", "train.global_batch_size=1"]
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides)
    cfg.model.weights = weights
    cfg.parallel = ALONE
    return preflight(cfg, ranks=1)
