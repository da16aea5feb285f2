"""The contract of a kind of adapters: its tensors, their first values, what they add to a weight, their names in files.

A kind is one object without state. Its layers are peft's.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from cascade_train.models.initialize import Fill

Init = Literal["kaiming", "original"]
"""First values of LoRA.

kaiming: A uniform within 1 / sqrt(fan-in), B zero. original: A zero, B N(0, 1) (Stable Cascade, modules/lora.py), so
that a first step of the same size changes the adapted weight sqrt(3 fan-in) times as much.
"""

Parts = Mapping[str, Tensor]
"""Tensors of one module's adapter, by their names in peft without the adapter's: `lora_A.weight`, `lokr_w1`."""

Shape = tuple[int, ...]
Gathered = tuple[dict[str, Any], dict[str, dict[str, Tensor]]]
"""Options of `LoraSpec`, and the parts of each module as peft has them, fp32."""


class Strength(NamedTuple):
    """Rank and alpha of an adapter."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Return alpha / rank."""
        return 1.0 if self.alpha == self.rank else self.alpha / self.rank  # a rank of 0 is refused later


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The architecture of a network's adapters.

    Attributes:
        rank: columns of B and rows of A, >= 1, and of the factors of other kinds.
        alpha: the adapters' output is scaled by alpha / rank.
        targets: diffusers' names of the adapted modules.
        base_size: the `model=` name of the network; None = no published size.
        dora: each output of W + (alpha / rank) B A has a trained magnitude (Liu et al. 2024).
        kind: option of `task.kind`.
        factor: of LoKr, see `LoKr`.
        ranks: of modules that have another one, by name, as in `StoredLora.state`.
        alphas: the same.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_size: str | None
    dora: bool = False
    kind: str = "lora"
    factor: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> Strength:
        """Return rank and alpha of a module."""
        return Strength(self.ranks.get(name, self.rank), self.alphas.get(name, self.alpha))


class AdapterKind(abc.ABC):
    """A kind of adapters.

    Attributes:
        name: option of `task.kind`.
        title: its name in sentences.
        prefix: of the names of its tensors below a module.
        options: options of the task that it takes, beside those of all kinds.
        endings: how files name its tensors below a module, with a dot -> its part; `alpha` is a scalar.
        factors: parts of every adapter -> the dimension that is the rank; other scales go into the first. Empty where
            not all adapters have them, which then share one rank and alpha.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    prefix: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    endings: ClassVar[Mapping[str, str]]
    factors: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def config(self, spec: LoraSpec, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's configuration; with `dropout` that of a training, for which peft draws no values."""

    @abc.abstractmethod
    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return the first values of a part: those of all give a change of zero."""

    @abc.abstractmethod
    def shapes(self, spec: LoraSpec, rank: int, module: Shape) -> dict[str, Shape]:
        """Return the shapes of the parts of this rank for a module whose weight is (out, in, *kernel)."""

    @abc.abstractmethod
    def delta(self, own: Strength, parts: Parts) -> Tensor:
        """Return (out, in * kernel) fp32, what is added to a weight."""

    def change(self, own: Strength, parts: Parts, weight: Tensor) -> Tensor:
        """Return what is added to a weight (out, in, *kernel) fp32, of its shape."""
        return self.delta(own, parts).view(weight.shape)

    def output(self, own: Strength, parts: Parts) -> Tensor:
        """Return (out,) fp32, the delta times a fixed input."""
        delta = self.delta(own, parts)
        return delta @ fixed_input(delta.shape[1])

    def to_file(self, own: Strength, parts: Parts) -> dict[str, Tensor]:
        """Return the parts by the endings that kohya's programs and LyCORIS write, with a dot."""
        return {f".{part}": value for part, value in parts.items()} | {".alpha": torch.tensor(own.alpha)}

    def lacks(self, parts: Parts) -> bool:
        """Return whether a stored adapter lacks something."""
        return not self.factors.keys() <= parts.keys()

    def gather(
        self, adapters: Mapping[str, Parts], shapes: Mapping[str, Shape], given: Strength | None, origin: str
    ) -> Gathered:
        """Return stored adapters as they are, each with its rank and alpha; an alpha that is lacking is the rank.

        Both mappings are by module; `shapes` are the weights' of the network. `given` is one strength of all, for a
        kind whose tensors do not tell ranks. `origin` begins errors.
        """
        owns = {name: strength(parts, self.rank(parts)) for name, parts in adapters.items()}
        rank, ranks = usual({name: own.rank for name, own in owns.items()})
        alpha, alphas = usual({name: own.alpha for name, own in owns.items()})
        found = {name: {part: parts[part].float() for part in self.factors} for name, parts in adapters.items()}
        return {"rank": rank, "alpha": alpha, "ranks": ranks, "alphas": alphas}, found

    def rank(self, parts: Parts) -> int:
        """Return the rank that the factors of an adapter have."""
        return next(parts[part].shape[dim] for part, dim in self.factors.items())

    def raised(self, parts: Parts, own: Strength, whole: Strength) -> Parts:
        """Return an equal adapter of a larger rank: factors filled up with zeros, its scale multiplied into the first.

        Other parts stay as they are.
        """
        first = next(iter(self.factors))
        plain = {part: padded(parts[part], whole.rank, dim) for part, dim in self.factors.items()}
        return {**parts, **plain, first: rescaled(plain[first], own, whole)}


def usual(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most frequent value, and by name those that differ from it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, {name: each for name, each in values.items() if each != value}


def fixed_input(width: int) -> Tensor:
    """Return a fixed draw (width,) by which contributions are compared."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0))


def strength(parts: Parts, rank: int) -> Strength:
    """Return the strength of a stored adapter of this rank, which is its alpha where it has none."""
    return Strength(rank, float(parts.get("alpha", rank)))


def common(strengths: Collection[Strength]) -> Strength:
    """Return the largest rank, with the alpha of all where they are scaled alike, else with a scale of 1."""
    largest = max(strengths, key=lambda each: each.rank)
    is_one = len({each.scale for each in strengths}) == 1
    return largest if is_one else Strength(largest.rank, float(largest.rank))


def padded(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """Return a factor fp32 with a dimension filled up to the rank with zeros, which changes no product."""
    shape = list(tensor.shape)
    shape[dim] = rank - shape[dim]
    return torch.cat([tensor.float(), torch.zeros(shape)], dim) if shape[dim] else tensor.float()


def rescaled(tensor: Tensor, own: Strength, whole: Strength) -> Tensor:
    """Return a factor of an adapter with a scale of its own for one with the scale of all."""
    return tensor if own.scale == whole.scale else tensor * (own.scale / whole.scale)
