"""What the laboratory compares: methods by group, with the overrides that choose them; what it leaves out, and why."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 75
"""Optimizer steps of an arm: the baseline is then half-way between learning nothing and forgetting what it knew."""

WORDS = "circle,square,triangle,cross,diamond,ring"
NEW, KNOWN = f"[sides,{WORDS}]", f"[{WORDS}]"
"""`data.only` of pictures with a placement that the packaged tiny Stage C never saw, and of those it was trained on."""

BASELINE = (
    "task=lora",
    "model=c_tiny",
    "data=shapes",
    f"data.only={NEW}",
    "data.samples=160",
    "data.num_workers=0",
    "optimizer.lr=2e-3",
    "lr_scheduler=cosine",
    "lr_scheduler.warmup_steps=5",
    "train.global_batch_size=16",
)
"""A LoRA that teaches the tiny Stage C that an object "at the sides" is there twice."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method.

    Attributes:
        group: of the table.
        overrides: what they change in the baseline.
        rates: learning rates of which one is chosen on a seed that is not measured; empty = the baseline's.
    """

    group: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...] = ()


def _row(group: str, *overrides: str, rates: tuple[float, ...] = ()) -> Row:
    return Row(group=group, overrides=overrides, rates=rates)


_LOW, _MIDDLE, _HIGH = (2e-4, 5e-4, 1e-3), (1e-3, 2e-3, 4e-3), (4e-3, 8e-3, 1.6e-2)

ROWS: dict[str, Row] = {
    "constant weight": _row("weighting", "objective=constant"),
    "min SNR weight": _row("weighting", "objective=min_snr"),
    "debiased weight": _row("weighting", "objective=debiased"),
    "adaptive weight": _row("weighting", "objective=adaptive"),
    "Huber": _row("loss", "distance=huber"),
    "smooth L1": _row("loss", "distance=smooth_l1"),
    "mean absolute error": _row("loss", "distance=mae"),
    "times: logit-normal": _row("times", "times=logit_normal"),
    "times: mode": _row("times", "times=mode"),
    "times: beta": _row("times", "times=beta"),
    "pyramid noise": _row("noise", "noise=pyramid"),
    "offset noise 0.1": _row("noise", "objective.offset_noise=0.1"),
    "EMA 0.9": _row("averaging", "ema.decay=0.9"),
    "EMA 0.95": _row("averaging", "ema.decay=0.95"),
    "rank 1": _row("adapters", "task.rank=1", "task.alpha=1"),
    "rank 16": _row("adapters", "task.rank=16", "task.alpha=16"),
    "DoRA": _row("adapters", "task.dora=true"),
    "every linear layer": _row("adapters", "task.module_filters=null"),
    "LoKr": _row("adapters", "task.kind=lokr", rates=_HIGH),
    "LoHa": _row("adapters", "task.kind=loha", rates=_MIDDLE),
    "all weights": _row("adapters", "task=finetune", rates=_LOW),
    "AdamW, its rate chosen": _row("optimizers", "optimizer=adamw", rates=_MIDDLE),
    "8-bit AdamW": _row("optimizers", "optimizer=adamw_8bit", rates=_MIDDLE),
    "Adafactor": _row("optimizers", "optimizer=adafactor", rates=(1e-2, 3e-2, 1e-1)),
    "CAME": _row("optimizers", "optimizer=came", rates=_LOW),
    "Lion": _row("optimizers", "optimizer=lion", rates=_MIDDLE),
    "Muon": _row("optimizers", "optimizer=muon", rates=_HIGH),
    "Prodigy": _row("optimizers", "optimizer=prodigy", rates=(0.5, 1.0, 2.0)),
    "Prodigy from 1e-4": _row("optimizers", "optimizer=prodigy", "optimizer.algorithm.d0=1e-4", rates=(0.5, 1.0, 2.0)),
    "schedule-free AdamW": _row(
        "optimizers", "optimizer=schedule_free", "lr_scheduler=constant", rates=(2e-3, 4e-3, 8e-3)
    ),
    "constant": _row("schedules", "lr_scheduler=constant"),
    "linear": _row("schedules", "lr_scheduler=linear"),
    "polynomial": _row("schedules", "lr_scheduler=polynomial"),
    "cosine with restarts": _row("schedules", "lr_scheduler=cosine_restarts"),
    "warmup, stable, decay": _row(
        "schedules", "lr_scheduler=warmup_stable_decay", f"lr_scheduler.decay_steps={STEPS // 3}"
    ),
    "no dropped captions": _row("captions", "task.cond_drop_prob=0"),
    "a fifth of captions dropped": _row("captions", "task.cond_drop_prob=0.2"),
    "half of the pictures known": _row(
        "captions",
        "data=regularised",
        "~data.only",
        "~data.samples",
        f"data.source.only={NEW}",
        "data.source.samples=160",
        f"data.regularisation.only={KNOWN}",
    ),
}
"""Method -> how it is chosen."""
