"""What is answered to a key that the configuration does not have: the nearest key, or ours for another trainer's name.

The names are those of diffusers' scripts, kohya, OneTrainer and SimpleTuner that are not spelt like ours. Nothing is
translated: the answer names the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.components import unknown_hint
from cascade_train.config.groups import did_you_mean, group_options, groups, options_with
from cascade_train.config.meanings import meaning_of

DEVICES = "CUDA devices are used where there are some; CUDA_VISIBLE_DEVICES chooses them, or hides them all."
RANKS = "One process is one rank: torchrun --nproc_per_node=4 -m cascade_train starts four."

NAMES: dict[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",
    "attention": "enable_xformers_memory_efficient_attention",
    "checkpoint.every_steps": "checkpointing_steps save_every_n_steps save_steps",
    "checkpoint.keep_last": "checkpoints_total_limit",
    "compile": "torch_compile",
    "data.aspect_ratios": "enable_bucket",
    "data.captions.tags.shuffle": "shuffle_caption",
    "data.crop": "center_crop",
    "data.flip_prob": "flip_aug random_flip",
    "data.num_workers": "dataloader_num_workers max_data_loader_n_workers",
    "data.path": "data_dir dataset dataset_name instance_data_dir train_data_dir",
    "ema.decay": "use_ema",
    "lr_scheduler.warmup_steps": "learning_rate_warmup_steps lr_warmup_steps warmup_steps",
    "model.image_size": "resolution",
    "model.weights": "base_model_name model_path pretrained_model_name_or_path",
    "objective.offset_noise": "noise_offset",
    "optimizer": "optimizer_type",
    "optimizer.algorithm.betas": "adam_beta1 adam_beta2",
    "optimizer.algorithm.eps": "adam_epsilon",
    "optimizer.lr": "learning_rate unet_lr",
    "optimizer.weight_decay": "adam_weight_decay",
    "run.dir": "output_dir workspace_dir",
    "run.name": "output_name run_name",
    "run.resume": "ckpt_path resume_from_checkpoint",
    "run.seed": "seed",
    "sample.every_steps": "sample_every_n_steps",
    "sample.prompts": "sample_prompts validation_prompt validation_prompts",
    "task.alpha": "lora_alpha network_alpha",
    "task.cond_drop_prob": "caption_dropout_rate proportion_empty_prompts",
    "task.rank": "lora_rank network_dim",
    "task.text_encoder_filters": "train_text_encoder",
    "tracker": "log_with logger report_to",
    "tracker.project": "wandb_project",
    "train.global_batch_size": "batch_size",
    "train.max_epochs": "epochs max_train_epochs num_epochs num_train_epochs",
    "train.max_grad_norm": "clip_grad_norm grad_clip",
    "train.max_steps": "iterations max_train_steps steps",
    "train.micro_batch_size": "gradient_accumulation_steps per_device_train_batch_size train_batch_size",
    "train.precision": "dtype mixed_precision train_dtype",
    "validate.every_steps": "validation_steps",
    DEVICES: "accelerator device",
    "Latents are cached once by cascade-train cache, and read by data=cached.": "cache_latents",
    "Min-SNR weighting is objective=min_snr.": "min_snr_gamma snr_gamma",
    RANKS: "devices gpus num_gpus num_processes",
}
"""Our key or group, or a sentence -> what other trainers call it, without dots and dashes in front."""

OTHER_NAMES = {name: ours for ours, names in NAMES.items() for name in names.split()}


def unknown_key(path: str, cause: BaseException | None) -> str:
    """Return one paragraph on an unknown key and OmegaConf's error: the nearest key, an option that has it, or ours."""
    parent = getattr(cause, "parent_node", None)
    parts = path.split(".")
    known, prefix = _siblings(parent, parts)
    if prefix.count(".") >= len(parts):  # a mapping was given, and the unknown key is in that
        path = str(getattr(cause, "full_key", path))
        parts = path.split(".")
    root = parent._get_root() if isinstance(parent, DictConfig) else None
    return f"{path} is unknown.{_hint(path, parts, known, prefix, root)}"


def _hint(path: str, parts: list[str], known: list[str], prefix: str, root: Any) -> str:
    """Return the sentence with the remedy, from the most to the least certain."""
    beside = did_you_mean(parts[prefix.count(".")], known, prefix) if prefix else ""
    if prefix in {f"{group}." for group in groups()}:
        beside = unknown_hint(prefix[:-1], path.removeprefix(prefix), known)
    if beside.startswith(" It is a key of "):
        return beside
    if other := other_name(parts[-1], root):
        return other
    if beside.startswith(" Did you mean"):
        return beside
    paths = list(_paths(root)) if isinstance(root, DictConfig) else []
    same = [p for p in paths if p.rpartition(".")[2] == parts[-1]]
    if same:
        return f" Did you mean {' or '.join(same[:3])}?"
    return beside or did_you_mean(parts[0], sorted({*known, *groups()}))


def other_name(name: str, root: Any = None) -> str:
    """Return a sentence with our key for a name that other trainers use, and its meaning; empty where there is none."""
    ours = OTHER_NAMES.get(name.lower().lstrip("-").replace("-", "_"))
    if ours is None or " " in ours:
        return f" {ours}" if ours else ""
    group, _, key = ours.partition(".")
    plain: Any = OmegaConf.to_container(root, resolve=False) if isinstance(root, DictConfig) else {}
    meaning = meaning_of(ours, plain)
    options = [] if meaning or not key else options_with(group, key)
    if 0 < len(options) < len(group_options(group)):
        meaning = f"It is a key of {' and '.join(f'{group}={option}' for option in options)}"
    return f" Did you mean {ours}?{f' {meaning[0].upper()}{meaning[1:].rstrip(chr(46))}.' if meaning else ''}"


def _siblings(parent: Any, parts: list[str]) -> tuple[list[str], str]:
    """Return the keys beside the unknown one, and the path before them, with its dot."""
    if not isinstance(parent, DictConfig):
        return [], ""
    full = parent._get_full_key(None)
    keys = [str(key) for key in parent if str(key) != "hydra"]
    return keys, f"{full}." if full else ""


def _paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        path = f"{prefix}{key!s}"
        if path == "hydra":
            continue
        yield path
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _paths(child, f"{path}.")
