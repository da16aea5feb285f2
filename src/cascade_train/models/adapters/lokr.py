"""LoKr: W + (alpha / rank) W1 (x) (W2a W2b), a Kronecker product (Yeh et al. 2024, LyCORIS, section 3.2).

W1 is (a, c) and W2 (b, d, *kernel) for a weight (a b, c d, *kernel); where the rank is half of max(b, d) or more, W2 is
one tensor. peft scales every product by alpha / rank; LyCORIS and ComfyUI do not scale those of two whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.adapters.kind import (
    AdapterKind,
    Init,
    LoraSpec,
    Parts,
    Place,
    Shape,
    Strength,
    common,
    padded,
    rescaled,
    strength,
)
from cascade_train.models.initialize import ZEROS, Fill, torch_uniform

W1, W2, UP, DOWN = "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"


class LoKr(AdapterKind):
    """Kronecker products. `factor` is the size of W1, as in LyCORIS; None = the divisor nearest to the square root."""

    name = "lokr"
    title = "LoKr"
    prefix = "lokr_"
    options = frozenset({"factor"})
    endings = {f".{part}": part for part in (W1, "lokr_w1_a", "lokr_w1_b", W2, UP, DOWN, "alpha")}  # noqa: RUF012
    shows_width = False

    def config(self, spec: LoraSpec, *, dropout: float | None = None, **options: Any) -> Any:
        """Return peft's `LoKrConfig`, see `AdapterKind.config`."""
        from peft import LoKrConfig  # takes seconds

        factor = -1 if spec.factor is None else spec.factor
        training = {"decompose_factor": factor, "init_weights": dropout is None}
        return LoKrConfig(r=spec.rank, alpha=spec.alpha, **training, **options)

    def fill(self, part: str, tensor: Tensor, init: Init) -> Fill:
        """Return the values of LyCORIS (modules/lokr.py): W1 and W2a uniform, W2 or W2b zero."""
        return torch_uniform(tensor) if part in (W1, UP) else ZEROS

    def shapes(self, spec: LoraSpec, module: Shape) -> dict[str, Shape]:
        """Return those of W1, and of W2 or its two factors."""
        out, into, *taps = module
        (a, b), (c, d) = _factors(out, spec.factor), _factors(into, spec.factor)
        if spec.rank >= max(b, d) / 2:
            return {W1: (a, c), W2: (b, d, *taps)}
        return {W1: (a, c), UP: (b, spec.rank), DOWN: (spec.rank, d * math.prod(taps))}

    def delta(self, spec: LoraSpec, parts: Parts) -> Tensor:
        """Return (alpha / rank) W1 (x) W2, the kernel flattened beside the inputs."""
        return spec.scale * torch.kron(parts[W1].float(), _second(parts))

    def to_file(self, spec: LoraSpec, parts: Parts) -> dict[str, Tensor]:
        """Return LyCORIS' names, with the scale multiplied into W1 where W2 is whole."""
        found = {f".{part}": value for part, value in parts.items()}
        if W2 in parts:
            found[f".{W1}"] = parts[W1] * spec.scale
        return found | {".alpha": torch.tensor(float(spec.rank) if W2 in parts else spec.alpha)}

    def lacks(self, parts: Parts) -> bool:
        """Return whether W1 or W2, or a factor of one, is missing."""
        return any(
            not {whole} & parts.keys() and not {f"{whole}_a", f"{whole}_b"} <= parts.keys() for whole in (W1, W2)
        )

    def gather(
        self,
        adapters: Mapping[Place, Parts],
        shapes: Mapping[Place, Shape],
        *,
        rank: int | None,
        alpha: float | None,
        origin: str,
    ) -> tuple[dict[str, Any], dict[Place, Parts]]:
        """Multiply W1 out, fill ranks of W2 up with zeros, and multiply other scales into W1.

        A ConfigError where no `factor` gives all W1 their sizes.
        """
        owns = {place: _strength(parts, rank, alpha) for place, parts in adapters.items()}
        sizes = {place: _sizes(parts, shapes.get(place)) for place, parts in adapters.items()}
        scaled = [own for own in owns.values() if own is not None]
        whole = common(scaled) if scaled else Strength(1, None)
        if rank is None:  # the least that leaves stored W2 whole
            needed = [-(-max(b, d) // 2) for place, (_, b, _, d) in sizes.items() if W2 in adapters[place]]
            if max(needed, default=0) > whole.rank:
                whole = Strength(max(needed), whole.scale * max(needed))
        spec = LoraSpec(rank=whole.rank, alpha=0.0, targets=(), base_size=None, factor=_factor(sizes, origin))
        found: dict[Place, Parts] = {}
        for place, parts in adapters.items():
            a, b, c, d = sizes[place]
            wanted = self.shapes(spec, shapes.get(place, (a * b, c * d)))
            own, first = owns[place], (parts[W1] if W1 in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]).float()
            second = (
                {W2: _second(parts).reshape(wanted[W2])}
                if W2 in wanted
                else {UP: padded(parts[UP], whole.rank, 1), DOWN: padded(parts[DOWN], whole.rank, 0)}
            )
            found[place] = {W1: rescaled(first, 1.0 if own is None else own.scale, whole.scale), **second}
        alpha = float(whole.rank) if whole.alpha is None else whole.alpha
        return {"rank": whole.rank, "alpha": alpha, "factor": spec.factor}, found


def _factors(width: int, factor: int | None) -> tuple[int, int]:
    from peft.tuners.lokr.layer import factorization  # takes seconds

    return factorization(width, -1 if factor is None else factor)


def _second(parts: Parts) -> Tensor:
    """Return W2 with its kernel flattened, (b, d * kernel)."""
    return parts[W2].float().flatten(1) if W2 in parts else parts[UP].float() @ parts[DOWN].float()


def _strength(parts: Parts, rank: int | None, alpha: float | None) -> Strength | None:
    """Return rank and alpha of a stored adapter: of all, else its own; None = W1 and W2 are whole, unscaled."""
    if rank is not None:
        return Strength(rank, alpha)
    factor = parts.get(DOWN, parts.get("lokr_w1_b"))
    return None if factor is None else strength(parts, factor.shape[0], alpha)


def _sizes(parts: Parts, module: Shape | None) -> tuple[int, int, int, int]:
    """Return a, b, c and d of a stored adapter; of one whose module is not known, a linear layer's."""
    a, c = parts[W1].shape if W1 in parts else (parts["lokr_w1_a"].shape[0], parts["lokr_w1_b"].shape[1])
    b = parts[W2 if W2 in parts else UP].shape[0]
    if W2 in parts:
        return a, b, c, parts[W2].shape[1]
    return a, b, c, parts[DOWN].shape[1] if module is None else module[1] // c


def _factor(sizes: Mapping[Any, tuple[int, int, int, int]], origin: str) -> int | None:
    """Return the `factor` that gives all W1 their sizes."""
    largest = max(max(a, c) for a, _, c, _ in sizes.values())
    for factor in (None, largest):
        if all((_factors(a * b, factor)[0], _factors(c * d, factor)[0]) == (a, c) for a, b, c, d in sizes.values()):
            return factor
    raise ConfigError(
        f"{origin}: its LoKr adapters split the weights in no way that one task.factor gives, tried were null and "
        f"{largest}; train them anew with one"
    )
