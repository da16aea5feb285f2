"""Cases of training (warmup_lr, ema, train_steps_*), run on our loop, phase, optimizer and objective.

Recorded random numbers take the place of a batch's own draws, recorded latents and conditions that of the encoders;
all else is what a run uses, under the named switches that docs/differences.md lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import parity_originals as originals
from bench.parity_case import Comparison, Outcome, Variant, recorded, stack
from bench.parity_networks import build_network, fetch
from cascade_train.batch import Batch
from cascade_train.diffusion.noise import Noise
from cascade_train.diffusion.objective import Objective
from cascade_train.distributed.parallelize import local, parallelize
from cascade_train.distributed.process_group import World, build_mesh, process_group
from cascade_train.engine.loop import Cadence, Trainer
from cascade_train.engine.lr_schedule import ConstantSchedule
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.engine.phase import BoundPhase, Ema, trainable_parameters
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.stage import Conditions, Stage, Tokens
from cascade_train.tasks.base import StepOutput
from cascade_train.tasks.finetune import Finetune
from cascade_train.tasks.prepared import PreparedBatch
from cascade_train.tasks.text_to_image import TextToImage

QUANTILE, QUANTILE_TOLERANCE = 0.995, 2e-5
"""Nearly all final weights are this close; AdamW magnifies rounding of the few whose gradient is almost zero."""


def warmup(variant: Variant) -> Outcome:
    """Run warmup_lr: the learning rate of each optimizer step of a run that starts at some step."""
    args, first = variant.args, variant.args["total_steps"]
    schedule = ConstantSchedule(warmup_steps=args["warmup_updates"], from_zero=True)
    steps = range(first + 1, first + args["n"] + 1)
    lr = torch.tensor([args["lr"] * schedule.factor(step, steps[-1]) for step in steps], dtype=torch.float64)
    if first == 0:
        return Outcome({"lr_used": lr})
    note = "the first step after a resume is left out: the original repeats its learning rate of 0 there"
    return Outcome({"lr_used": lr}, masks={"lr_used": torch.arange(len(lr)) > 0}, notes=[note])


def ema(variant: Variant) -> Outcome:
    """Run ema: the average after each update, and along a loop (in whatever unit the loop counts)."""
    args = variant.args
    if args["mode"] == "function":
        steps, prefix = range(args["steps"]), "ema"
        options = {"decay": args["beta"], "start_step": 0, "every_steps": 1}
    else:
        steps = range(args["start_iter"] + 1, args["updates"] * args["grad_accum_steps"] + 1)
        prefix = "ema_after_iter"
        start = args["ema_start_iters"] + 1
        options = {"decay": args["ema_beta"], "start_step": start, "every_steps": args["ema_iters"]}
    begin = {name.removeprefix("ema."): v for name, v in variant.weights.items() if name.startswith("ema.")}
    weights = {name: nn.Parameter(v.clone()) for name, v in begin.items() if v.is_floating_point()}
    average, got = Ema(weights, device=None, **options), {}
    for step in steps:
        for name, weight in weights.items():
            weight.data.copy_(variant.inputs[f"src.{step:02d}.{name}"])
        average.update(step)
        got |= {f"{prefix}.{step:02d}.{name}": value.clone() for name, value in average.state_dict().items()}
    whole_numbers = {f"*.{name}": "whole numbers are not averaged" for name in begin.keys() - weights.keys()}
    return Outcome(got, left_out=whole_numbers)


@dataclass(frozen=True, kw_only=True)
class RecordedBatch(Batch):
    """A micro-batch whose random numbers were recorded.

    Attributes:
        draws: by purpose, (B, ...) each.
    """

    draws: Mapping[str, Tensor]

    def uniform(self, purpose: str) -> Tensor:
        """Return the recorded (B,) numbers."""
        return self.draws[purpose]

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Return the recorded (B, *shape) numbers."""
        assert self.draws[purpose].shape[1:] == tuple(shape), purpose
        return self.draws[purpose]

    def generators(self, purpose: str) -> list[Any]:
        """Return the recorded (B, ...) numbers themselves, one sample each, for `RecordedNoise`."""
        return list(self.draws[purpose])


class RecordedNoise(Noise):
    """Noise that was recorded: its generators are the numbers."""

    def draw(self, generators: Sequence[Any], shape: tuple[int, int, int]) -> Tensor:
        """Return the recorded (B, *shape) numbers."""
        drawn = torch.stack(list(generators))
        assert drawn.shape[1:] == tuple(shape)
        return drawn


def recorded_batch(micro: int, latents: Tensor, captions: Sequence[str], draws: Mapping[str, Tensor]) -> RecordedBatch:
    """Return micro-batch number `micro`; its image stands for the number, in the latents' size."""
    samples, _, height, width = latents.shape
    return RecordedBatch(
        image_BCHW=torch.full((samples, 3, height, width), 255.0 * micro),
        captions=tuple(captions),
        keys=tuple(f"{micro}.{i}" for i in range(samples)),
        epoch_B=torch.zeros(samples, dtype=torch.int64),
        index_B=torch.arange(samples),
        seed=0,
        draws=draws,
    )


def micro_of(image_BCHW: Tensor) -> int:
    """Return the number that a recorded image, divided by 255, stands for."""
    return int(image_BCHW.flatten()[0])


class RecordedStage(Stage):
    """A network whose latents and conditions were recorded; a caption is the number of its micro-batch."""

    name = "stage_c"
    abilities = frozenset({"text_to_image"})
    image_keep_prob = 0.1
    needs_image = False

    def __init__(self, network: CascadeUNet, inputs: Mapping[str, Tensor]) -> None:
        self.network = network
        self.inputs = inputs
        self.image_size = self.image_multiple = 1
        self.precision = "fp32"
        self.seen: list[tuple[Tensor, Tensor]] = []

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Do nothing: the network is built."""

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return none."""
        return {}

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Return the numbers that the captions are."""
        return {"micro": torch.tensor([[int(caption or -1)] for caption in captions])}

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Return recorded latents."""
        return self.inputs[f"mb.{micro_of(image_BCHW):02d}.latents"]

    def conditions(
        self,
        tokens: Tokens,
        image_BCHW: Tensor | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Return recorded conditions."""
        prefix = f"mb.{int(tokens['micro'][0, 0]):02d}."
        return {name: self.inputs[prefix + name] for name in ("clip_text", "clip_text_pooled", "clip_img")}

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape of the recorded latents, whose size a recorded image has."""
        return self.network.config.in_channels, height, width

    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Refuse: nothing is shown here."""
        raise AssertionError("recorded latents are not decoded")

    def units(self) -> list[list[nn.Module]]:
        """Return the network's units."""
        return self.network.units()

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel."""
        self.network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute units in backward."""
        self.network.gradient_checkpointing = enabled

    def predict(
        self,
        noised_BCHW: Tensor,
        timestep_ratio_B: Tensor,
        cond: Conditions,
        control: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the network and keep what it saw."""
        self.seen.append((noised_BCHW, timestep_ratio_B))
        return super().predict(noised_BCHW, timestep_ratio_B, cond, control)


class Recorder(TextToImage):
    """Keeps what the loss of a task returned."""

    outputs: list[StepOutput]

    def loss(self, prepared: PreparedBatch) -> StepOutput:
        """Return the task's own loss."""
        self.outputs.append(super().loss(prepared))
        return self.outputs[-1]


class RecordedFinetune(Recorder, Finetune):
    """Full training that keeps its losses."""


def build_objective(*, adaptive: bool) -> Objective:
    """Return the objective of the original's training scripts, its adaptive weight as it learns there."""
    learning = {"cls": "AdaptiveLossWeight", "pos": [], "kw": {"update": "micro_batch"}}
    names = {
        "schedule": "CosineSchedule",
        "input_scaler": "VPScaler",
        "target": "EpsilonTarget",
        "noise_cond": "CosineTNoiseCond",
        "loss_weight": "P2LossWeight",
    }
    spec: dict[str, Any] = {part: {"cls": name, "pos": [], "kw": {}} for part, name in names.items()}
    spec |= {"offset_noise": 0.0} | ({"loss_weight": learning} if adaptive else {})
    objective = originals.build_objective(spec)
    objective.noise = RecordedNoise()
    return objective


def bind(world: World, task: TextToImage, args: Mapping[str, Any]) -> BoundPhase:
    """Shard the task's phase on the mesh of one and give it the original's optimizer, schedule and average."""
    (phase,) = task.phases()
    for name, root in phase.modules.items():
        parallelize(
            root,
            phase.units[name],
            mesh=build_mesh(world, (1, 1)),
            compute_dtype=torch.float32,
            reshard_after_forward=False,
            compile_units=False,
        )
    parameters = trainable_parameters(phase)
    algorithm = partial(torch.optim.AdamW, fused=True)
    spec = OptimizerSpec(lr=args["lr"], scale_lr=False, weight_decay=0.01, algorithm=algorithm, decay="all")
    return BoundPhase(
        phase,
        optimizer=spec.build(parameters, 1),
        base_lr=args["lr"],
        lr_schedule=ConstantSchedule(warmup_steps=args["warmup_updates"], from_zero=True),
        ema=_average(parameters, args),
        max_grad_norm=1.0,
    )


def _average(parameters: Mapping[str, nn.Parameter], args: Mapping[str, Any]) -> Ema | None:
    """Return the average by optimizer step that equals the original's by micro-batch; None = none does."""
    micro, every = args["grad_accum_steps"], args.get("ema_iters")
    if every is None or every % micro:
        return None
    start = args["ema_start_iters"] // micro + 1
    return Ema(parameters, decay=args["ema_beta"], start_step=start, every_steps=every // micro, device=None)


def train(
    world: World, task: TextToImage, phase: BoundPhase, batches: Sequence[Batch], args: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Take every optimizer step with the loop's own code and return what each measured."""
    micro, unused = args["grad_accum_steps"], _unused()
    trainer = Trainer(
        world=world,
        task=task,
        phases=[phase],
        seed=0,
        max_steps=args["updates"],
        global_batch_size=micro * len(batches[0]),
        cadence=Cadence(log=None, validate=None, sample=None, checkpoint=None),
        validation=None,
        sampling=None,
        **{name: next(unused) for name in ("feed", "metrics", "store", "tracker", "progress", "profiler")},
    )
    starts = range(0, args["updates"] * micro, micro)
    return [trainer.train_step(batches[start : start + micro]) for start in starts]


def _unused() -> Iterator[Any]:
    """Yield stand-ins for what a single step never touches."""
    while True:
        yield None


def finetune_steps(variant: Variant) -> Outcome:
    """Run train_steps_c: whole optimizer steps of full training, from recorded latents, conditions and draws."""
    args, given = variant.args, variant.inputs
    stage = RecordedStage(build_network(args["ctor"], variant.weights), given)
    task = RecordedFinetune(cond_drop_prob=0.0, image_keep_prob=0.0)
    task.outputs = []
    noise, uniform = recorded(given, "randn_like"), recorded(given, "rand")
    batches = []
    for micro, (noise_BCHW, u_B) in enumerate(zip(noise, uniform, strict=True)):
        kept = {name: torch.ones(len(u_B)) for name in ("caption_drop", "image_keep")}
        draws = {"noise": noise_BCHW, "timestep": u_B, **kept}
        batches.append(recorded_batch(micro, given[f"mb.{micro:02d}.latents"], [str(micro)] * len(u_B), draws))
    with process_group() as world:
        task.attach(stage, build_objective(adaptive=args["adaptive_loss_weight"]), world.device)
        phase = bind(world, task, args)
        values = train(world, task, phase, batches, args)
        got = measured(task.outputs, stage.seen, values, args) | _final(variant, phase, stage.network, task)
    left_out = {} if phase.ema is not None else {"final_ema.*": "every few micro-batches is no number of whole steps"}
    return finished(variant, got, left_out)


def measured(
    outputs: Sequence[StepOutput],
    seen: Sequence[tuple[Tensor, Tensor]],
    values: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Return what the case recorded of each micro-batch, from what the loss returned and the loop measured."""
    micro = args["grad_accum_steps"]
    norms = [norm for step in values for norm in [*[torch.zeros(())] * (micro - 1), step["grad_norm"]]]
    raw, weighted = (stack(rows) for rows in ([o.report["loss_raw"] for o in outputs], [o.loss_B for o in outputs]))
    return {
        "loss": raw,
        "loss_adjusted": weighted.mean(dim=1) / micro,
        "loss_weight": weighted / raw,
        "logSNR": stack([output.report["logsnr"] for output in outputs]),
        "noise_cond": stack([ratio for _, ratio in seen]),
        "grad_norm": stack(norms),
        "lr_used": torch.tensor([step["lr"] for step in values], dtype=torch.float64).repeat_interleave(micro),
        **{f"noised.{i:02d}": noised for i, (noised, _) in enumerate(seen)},
    }


def _final(variant: Variant, phase: BoundPhase, network: CascadeUNet, task: TextToImage) -> dict[str, Tensor]:
    got = {"final_l2_all_params": torch.cat([local(p.detach()).flatten() for p in network.parameters()]).norm()}
    for name in variant.outputs:
        kind, _, weight = name.partition(".")
        if kind == "final":
            got[name] = fetch(network, weight, lambda parameter: local(parameter.detach()))
        elif kind == "final_ema" and phase.ema is not None:
            names = {id(p): n for n, p in phase.parameters.items()}
            average = phase.ema.state_dict()
            got[name] = fetch(network, weight, lambda p, names=names, a=average: local(a[names[id(p)]]))
    buckets = task.state_dict().get("loss_weight.bucket_loss")
    return got if buckets is None else got | {"bucket_losses_final": buckets}


def finished(variant: Variant, got: Mapping[str, Tensor], left_out: Mapping[str, str]) -> Outcome:
    """Keep what the case asks for, and compare nearly all final weights more closely than each one."""
    wanted = variant.outputs
    weights = [
        name for name in wanted if name.startswith("final.") and name in got and wanted[name].is_floating_point()
    ]
    error = torch.cat([(got[name].double() - wanted[name].double()).abs().flatten() for name in weights])
    error, _ = error.sort()
    close = Comparison("final, 99.5 % quantile", float(error[int(QUANTILE * (len(error) - 1))]), QUANTILE_TOLERANCE)
    return Outcome({n: v for n, v in got.items() if n in wanted}, left_out=dict(left_out), facts=[close])
