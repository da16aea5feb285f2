"""Optimizers: the algorithm, which parameters decay, and how the learning rate scales."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cascade_train.engine.algorithms.stochastic_rounding import StochasticRounding
from cascade_train.errors import ConfigError
from cascade_train.options import check_found, check_pattern, is_found

NO_DECAY_SUFFIXES = (".gamma", ".beta", ".lora_magnitude_vector.weight")
"""Parameters with two or more dimensions that are scales or shifts (the response norm's)."""

REFUSED = {
    torch.optim.LBFGS: "it computes the loss several times in a step, and each step here sees its batch once",
    torch.optim.SparseAdam: "it takes sparse gradients, and all gradients here are dense",
}
"""Algorithms of torch that cannot train here, and why."""

OTHER = "another algorithm, such as torch.optim.AdamW; or this one without fused, where it was given"

_ELEMENTWISE = ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop"]
ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _ELEMENTWISE)
"""Algorithms that update each number of a weight by itself: each rank can update its shard as a plain tensor."""


@runtime_checkable
class Averaging(Protocol):
    """An algorithm that keeps its own average of the weights."""

    is_schedule_free: ClassVar[bool]

    def averages(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter that was updated, and the average of its weights, a new tensor."""


@runtime_checkable
class Estimating(Protocol):
    """An algorithm that estimates how far a step goes, whatever its learning rate."""

    def estimate(self) -> float:
        """Factor on the learning rate, as it is after the last step."""


class OptimizerSpec:
    """A learning rate, a weight decay and an algorithm, not yet bound to parameters.

    Args:
        lr: learning rate.
        scale_lr: multiply `lr` by the global batch size.
        weight_decay: of the weights that `decay` names.
        algorithm: called with parameter groups, e.g. a partial of `torch.optim.AdamW`.
        decay: "matrices" and kernels alone, not norms, biases, response norms and tokens; "all" as in the original.
        lr_factors: pairs of a regular expression and a factor on the learning rate, above 0; the first that is found in
            a weight's name counts, such as `network.down_blocks.0.1.attention.to_q.weight`. null = 1 for all.
    """

    def __init__(
        self,
        *,
        lr: float,
        scale_lr: bool,
        weight_decay: float,
        algorithm: Callable[..., Optimizer],
        decay: Literal["matrices", "all"] = "matrices",
        lr_factors: list[list[Any]] | dict[str, float] | None = None,
    ) -> None:
        cls = self.algorithm_class = getattr(algorithm, "func", algorithm)
        if cls in REFUSED:
            raise ValueError(
                f"optimizer.algorithm={cls.__name__} cannot train here: {REFUSED[cls]}. Choose another, such as "
                "torch.optim.AdamW."
            )
        if inspect.unwrap(getattr(cls, "step", len)) is Optimizer.step:
            raise ValueError(f"optimizer.algorithm={cls.__name__} does not define step. Define it.")
        try:
            inspect.signature(algorithm).bind([], lr=lr)
        except TypeError as error:
            raise ValueError(
                f"optimizer.algorithm={cls.__name__} is constructed from parameter groups and lr, and its constructor "
                f"does not take them: {error}. Write 'def __init__(self, params, lr, ...)'."
            ) from error
        takes = inspect.signature(cls).parameters.values()
        if weight_decay > 0 and not any(p.name == "weight_decay" or p.kind is p.VAR_KEYWORD for p in takes):
            raise ValueError(
                f"optimizer.weight_decay={weight_decay} has no effect: {cls.__name__} has no weight decay. Set "
                "optimizer.weight_decay=0."
            )
        if lr <= 0:
            raise ValueError(f"optimizer.lr={lr} must be positive.")
        if weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay={weight_decay} must be 0 or more.")
        if decay not in ("matrices", "all"):
            raise ValueError(f"optimizer.decay={decay} must be matrices or all.")
        self.lr = lr
        self.scale_lr = scale_lr
        self.weight_decay = weight_decay
        self.algorithm = algorithm
        self.decay_all = decay == "all"
        self.lr_factors = _checked(lr_factors or {})
        self._try_arguments()

    def _try_arguments(self) -> None:
        """Let the algorithm refuse its arguments now, not once the weights are loaded."""
        if given := getattr(self.algorithm, "keywords", {}).keys() & {"lr", "weight_decay"}:
            raise ValueError(f"optimizer.algorithm.{min(given)} has no effect. Set optimizer.{min(given)}.")
        try:
            self.algorithm([{"params": self._list({"weight": nn.Parameter(torch.zeros(2, 2))})}], lr=self.lr)
        except ValueError as error:
            if "process group has not been initialized" not in str(error):  # there is one when it is built
                raise ValueError(f"optimizer.algorithm: {error}") from error
        except Exception:  # noqa: BLE001, S110 - what it lacks here, such as a device, it may have when it is built
            pass

    def lr_factor(self, name: str) -> float:
        """Factor on the learning rate of a weight; a ConfigError where an expression takes too long."""
        factors = self.lr_factors.items()
        return next((factor for pattern, factor in factors if is_found("optimizer.lr_factors", pattern, name)), 1.0)

    def check_lr_factors(self, names: Sequence[str]) -> None:
        """Raise a ConfigError where an expression is found in no name of a weight that trains."""
        check_found("optimizer.lr_factors", self.lr_factors, names, "weights that train")

    def base_lr(self, global_batch_size: int, lr: float | None = None) -> float:
        """Learning rate before the schedule, of what has its own or of all else."""
        base = self.lr if lr is None else lr
        return base * global_batch_size if self.scale_lr else base

    def build(
        self,
        parameters: Mapping[str, nn.Parameter],
        global_batch_size: int,
        *,
        seed: int = 0,
        lrs: Mapping[str, float] = MappingProxyType({}),
    ) -> Optimizer:
        """Algorithm over two groups, with and without weight decay; empty groups are left out. Collective.

        A root, the first part of a name, that is in `lrs` has two groups of its own, with that learning rate, as has
        each of the `lr_factors`. An elementwise algorithm gets the `shard_of` each parameter. Weights in bf16 are
        rounded stochastically. A ConfigError where the algorithm refuses these parameters, or needs whole weights and
        they are sharded.
        """
        from cascade_train.distributed import parallelize  # takes a second

        whole = parameters
        parameters = {name: parallelize.shard_of(p) if self._by_element(name, p) else p for name, p in whole.items()}
        decayed = {name: p for name, p in parameters.items() if self.decay_all or decays(name, p)}
        kept = {name: p for name, p in parameters.items() if name not in decayed}
        roots = {name: next((root for root in lrs if name.startswith(f"{root}.")), None) for name in parameters}
        groups: list[dict[str, Any]] = []
        factors = {name: self.lr_factor(name) for name in parameters}
        for root, factor in itertools.product((None, *lrs), dict.fromkeys((1.0, *self.lr_factors.values()))):
            lr_of_root = None if root is None else lrs[root]
            rate = (
                {} if root is None and factor == 1.0 else {"lr": factor * self.base_lr(global_batch_size, lr_of_root)}
            )
            for members, decay in ((decayed, self.weight_decay), (kept, 0.0)):
                chosen = {name: p for name, p in members.items() if (roots[name], factors[name]) == (root, factor)}
                groups += [{"params": self._list(chosen), "weight_decay": decay, **rate}] if chosen else []
        name = getattr(self.algorithm_class, "__name__", self.algorithm)
        try:
            optimizer = self.algorithm(groups, lr=self.base_lr(global_batch_size))
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"optimizer.algorithm={name} cannot train these weights: {reason}. Remedy: {OTHER}"
            ) from error
        if (lrs or self.lr_factors) and isinstance(optimizer, Estimating):
            key = f"model.{next(iter(lrs))}.lr" if lrs else "optimizer.lr_factors"
            raise ConfigError(
                f"optimizer.algorithm={name} estimates one learning rate for all weights: {key} "
                "has no effect. Set that to null, or choose another algorithm, such as torch.optim.AdamW"
            )
        if any(p.dtype == torch.bfloat16 for p in parameters.values()):
            starts = {name: parallelize.first_row(p) * math.prod(p.shape[1:]) for name, p in whole.items()}
            places = {p: (name, starts[name]) for name, p in parameters.items()}
            optimizer = self._rounding(optimizer, whole, places, seed)
        sharded = parallelize.sharded_of(parameters.values())
        if not sharded or self._works_on(parallelize.trial_weight(sharded)):
            return optimizer
        ranks = sharded[0].device_mesh.size(-1)
        state, remedy = f"sharded over {ranks} ranks", "parallel=ddp, where they fit a device"
        if ranks == 1:
            state, remedy = "offloaded", "parallel.cpu_offload=false"
        raise ConfigError(
            f"optimizer.algorithm={name} cannot train these weights: it needs each of them whole, and here they are "
            f"{state}. Remedy: {remedy}; {OTHER}"
        )

    def _rounding(
        self,
        optimizer: Optimizer,
        whole: Mapping[str, nn.Parameter],
        places: Mapping[nn.Parameter, tuple[str, int]],
        seed: int,
    ) -> Optimizer:
        """Algorithm with stochastic rounding; a ConfigError where it does not treat weights one by one."""
        if not self.rounds(whole):
            raise ConfigError(
                f"train.master_weights=bf16: {self.algorithm_class.__name__} needs fp32 masters. Set "
                "train.master_weights=fp32, or another optimizer: adamw, adamw_8bit, adafactor or lion."
            )
        return StochasticRounding(optimizer, places, seed=seed)

    def bytes_per_parameter(self, device: torch.device) -> float:
        """Bytes of state for each number of a large matrix, found by a step on a small one."""
        weight = nn.Parameter(torch.zeros(256, 256, device=device))
        weight.grad = torch.zeros_like(weight)
        optimizer = self.algorithm([{"params": self._list({"weight": weight})}], lr=self.lr)
        optimizer.step()
        values = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
        return sum(value.numel() * value.element_size() for value in values) / weight.numel()

    def rounds(self, parameters: Mapping[str, nn.Parameter] | None = None) -> bool:
        """Whether the algorithm treats these weights, None = matrices, one by one: then they train in bf16."""
        named = parameters or {"weight": nn.Parameter(torch.empty(2, 2))}
        is_adafactor = isinstance(self.algorithm_class, type) and issubclass(
            self.algorithm_class, torch.optim.Adafactor
        )
        alone = is_adafactor or all(self._by_element(name, p) for name, p in named.items())
        return alone and not getattr(self.algorithm_class, "is_schedule_free", False)

    def _by_element(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the algorithm updates each number of a parameter by itself, so that a shard suffices.

        Its own `by_element` says so, of all or as a function of name and parameter.
        """
        by_element = getattr(self.algorithm_class, "by_element", self.algorithm_class in ELEMENTWISE)
        return by_element(name, parameter) if callable(by_element) else by_element

    def _list(self, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
        return list(parameters.items() if getattr(self.algorithm_class, "takes_names", False) else parameters.values())

    def _works_on(self, weight: nn.Parameter) -> bool:
        """Whether the algorithm steps a sharded matrix, tried where that is unknown."""
        if getattr(self.algorithm_class, "needs_whole", False):
            return False
        try:
            self.algorithm([{"params": self._list({"weight": weight})}], lr=self.lr).step()
        except RuntimeError:
            return False
        return True


def _checked(lr_factors: list[list[Any]] | dict[str, float]) -> dict[str, float]:
    try:
        factors = dict(lr_factors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.lr_factors={lr_factors} must be pairs, as in [[attention, 0.5]].") from error
    if len(factors) != len(lr_factors):
        raise ValueError(f"optimizer.lr_factors={lr_factors} has an expression twice; leave one out.")
    for pattern, factor in factors.items():
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ValueError(f"optimizer.lr_factors: {pattern!r} has the factor {factor}, which must be above 0.")
        check_pattern("optimizer.lr_factors", pattern)
    return factors


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: matrices and kernels, not biases, norms, response norms or tokens."""
    return parameter.ndim >= 2 and not name.endswith(NO_DECAY_SUFFIXES) and "token" not in name


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The constructor's arguments of each parameter group: the configuration, not the progress."""
    algorithm = getattr(optimizer, "inner", optimizer)
    names = inspect.signature(type(algorithm).__init__).parameters.keys() - {"params"}
    return [{name: group[name] for name in names & group.keys()} for group in optimizer.param_groups]


def progress(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of each parameter group without its parameters."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def fill_state(optimizer: Optimizer) -> None:
    """Give an optimizer without state that of an empty step. Collective."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    held = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    get_optimizer_state_dict(held, optimizer)


def can_withhold(optimizer: Optimizer) -> bool:
    """Whether the optimizer can skip an update by a flag on the device (fused Adam and SGD can)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
