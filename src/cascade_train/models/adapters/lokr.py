"""LoKr: W + (alpha / rank) W1 (x) (W2a W2b), a Kronecker product (Yeh et al. 2024, LyCORIS, section 3.2).

W1 is (a, c) and W2 (b, d, *kernel) for a weight (a b, c d, *kernel); where the rank is half of max(b, d) or more, W2 is
one tensor. peft scales every product by alpha / rank; LyCORIS and ComfyUI do not scale those of two whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.adapters import kind
from cascade_train.models.adapters.kind import LoraSpec, Parts, Shape, Strength
from cascade_train.models.initialize import ZEROS, Fill, torch_uniform

W1, W2, UP, DOWN = "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"
W1_UP, W1_DOWN = "lokr_w1_a", "lokr_w1_b"


class LoKr(kind.AdapterKind):
    """Kronecker products. `factor` is the size of W1, as in LyCORIS; None = the divisor nearest to the square root."""

    name, title, prefix = "lokr", "LoKr", "lokr_"
    options = frozenset({"factor"})
    endings = MappingProxyType({f".{part}": part for part in (W1, W1_UP, W1_DOWN, W2, UP, DOWN, "alpha")})

    def config(self, spec: LoraSpec, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoKrConfig`, see `AdapterKind.config`."""
        from peft import LoKrConfig  # takes seconds

        factor = -1 if spec.factor is None else spec.factor
        own = {"decompose_factor": factor, "init_weights": dropout is None}
        return LoKrConfig(r=spec.rank, alpha=spec.alpha, **own, **options)

    def fill(self, part: str, tensor: Tensor, init: kind.Init) -> Fill:
        """Return the values of LyCORIS (modules/lokr.py): W1 and W2a uniform, W2 or W2b zero."""
        return torch_uniform(tensor) if part in (W1, UP) else ZEROS

    def shapes(self, spec: LoraSpec, rank: int, module: Shape) -> dict[str, Shape]:
        """Return those of W1, and of W2 or its two factors."""
        out, into, *taps = module
        (a, b), (c, d) = _split(out, spec.factor), _split(into, spec.factor)
        if rank >= max(b, d) / 2:
            return {W1: (a, c), W2: (b, d, *taps)}
        return {W1: (a, c), UP: (b, rank), DOWN: (rank, d * math.prod(taps))}

    def delta(self, own: Strength, parts: Parts) -> Tensor:
        """Return (alpha / rank) W1 (x) W2, the kernel flattened beside the inputs."""
        return own.scale * torch.kron(parts[W1].float(), _second(parts))

    def to_file(self, own: Strength, parts: Parts) -> dict[str, Tensor]:
        """Return LyCORIS' names, with the scale multiplied into W1 where W2 is whole."""
        found = super().to_file(own, parts)
        if W2 in parts:
            found |= {f".{W1}": parts[W1] * own.scale, ".alpha": torch.tensor(float(own.rank))}
        return found

    def lacks(self, parts: Parts) -> bool:
        """Return whether W1 or W2, or a factor of one, is missing."""
        wholes = ((W1, {W1_UP, W1_DOWN}), (W2, {UP, DOWN}))
        return any(whole not in parts and not factors <= parts.keys() for whole, factors in wholes)

    def gather(
        self, adapters: Mapping[str, Parts], shapes: Mapping[str, Shape], given: Strength | None, origin: str
    ) -> kind.Gathered:
        """Multiply W1 out, fill ranks of W2 up with zeros, and multiply other scales into W1.

        A ConfigError where no `factor` gives all W1 their sizes.
        """
        ranks = {parts[DOWN].shape[0] for parts in adapters.values() if given and DOWN in parts}
        if given and ranks - {given.rank}:
            raise ConfigError(f"{origin}: its configuration names rank {given.rank}, its tensors have {min(ranks)}")
        owns = {name: given or _strength(parts) for name, parts in adapters.items()}
        sizes = {name: _sizes(parts, shapes.get(name)) for name, parts in adapters.items()}
        scaled = [owns[name] for name, parts in adapters.items() if given or not _is_whole(parts)]
        whole = kind.common(scaled or [Strength(1, 1.0)])
        needed = [max(b, d) for name, (_, b, _, d) in sizes.items() if W2 in adapters[name]]
        least = -(-max(needed, default=0) // 2)  # that leaves stored W2 whole
        if least > whole.rank:
            whole = Strength(least, whole.scale * least)
        spec = LoraSpec(rank=whole.rank, alpha=1.0, targets=(), base_size=None, factor=_factor(sizes, origin))
        found = {}
        for name, parts in adapters.items():
            a, b, c, d = sizes[name]
            wanted = self.shapes(spec, spec.rank, shapes.get(name, (a * b, c * d)))
            first = parts[W1].float() if W1 in parts else parts[W1_UP].float() @ parts[W1_DOWN].float()
            found[name] = {W1: kind.rescaled(first, owns[name], whole)}
            if W2 in wanted:
                found[name][W2] = parts[W2].float() if W2 in parts else _second(parts).reshape(wanted[W2])
            else:
                found[name] |= {half: kind.padded(parts[half], whole.rank, int(half == UP)) for half in (UP, DOWN)}
        return {"rank": whole.rank, "alpha": whole.alpha, "factor": spec.factor}, found


def _split(width: int, factor: int | None) -> tuple[int, int]:
    from peft.tuners.lokr.layer import factorization  # takes seconds

    return factorization(width, -1 if factor is None else factor)


def _second(parts: Parts) -> Tensor:
    """Return W2 with its kernel flattened, (b, d * kernel)."""
    return parts[W2].float().flatten(1) if W2 in parts else parts[UP].float() @ parts[DOWN].float()


def _is_whole(parts: Parts) -> bool:
    return W1 in parts and W2 in parts


def _strength(parts: Parts) -> Strength:
    """Return the strength of an adapter of LyCORIS: two whole tensors are not scaled."""
    return (
        Strength(1, 1.0) if _is_whole(parts) else kind.strength(parts, parts[W1_DOWN if W2 in parts else DOWN].shape[0])
    )


def _sizes(parts: Parts, module: Shape | None) -> tuple[int, int, int, int]:
    """Return a, b, c and d of a stored adapter; of one whose module is not known, a linear layer's."""
    a, c = parts[W1].shape if W1 in parts else (parts[W1_UP].shape[0], parts[W1_DOWN].shape[1])
    if W2 in parts:
        return a, parts[W2].shape[0], c, parts[W2].shape[1]
    return a, parts[UP].shape[0], c, parts[DOWN].shape[1] if module is None else module[1] // c


def _factor(sizes: Mapping[Any, tuple[int, int, int, int]], origin: str) -> int | None:
    """Return the `factor` that gives all W1 their sizes."""
    largest = max(max(a, c) for a, _, c, _ in sizes.values())
    widest = max(max(a * b, c * d) for a, b, c, d in sizes.values())
    for factor in (None, *range(largest, max(largest, math.isqrt(widest)) + 1)):  # one that divides no width is larger
        if all((_split(a * b, factor)[0], _split(c * d, factor)[0]) == (a, c) for a, b, c, d in sizes.values()):
            return factor
    raise ConfigError(
        f"{origin}: its LoKr adapters split the weights in no way that one task.factor gives; train them anew with one"
    )
