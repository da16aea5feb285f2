"""Training some noise levels more often than others, without changing schedule or loss weight.

Shape legend: B batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.options import Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class TimestepBias:
    """A span of times t (0 = data, 1 = noise) that is drawn `multiplier` times as often as the rest.

    The continuous form of the discrete weights that trainers of diffusers and mindone give their timesteps.

    Attributes:
        strategy: none; earlier = the `portion` of times with the least noise, later = with the most, range = from
            `begin` to `end`.
        multiplier: how often the span is drawn compared with the rest, > 0; below 1 = less often.
        begin: first time of a range, in [0, 1]; timestep 200 of 1000 is 0.2.
        end: last time of a range, above `begin`.
        portion: share of the times that earlier and later mean, in (0, 1].
    """

    strategy: Literal["none", "earlier", "later", "range"]
    multiplier: Positive[float]
    begin: Share[float]
    end: Share[float]
    portion: Positive[Share[float]]

    def __post_init__(self) -> None:
        check_fields(self, "timestep_bias.")
        if not self.begin < self.end:
            raise ConfigError(
                f"timestep_bias.begin={self.begin} must lie below timestep_bias.end={self.end}; both are times from 0"
                " (data) to 1 (noise)"
            )

    @property
    def span(self) -> tuple[float, float]:
        """First and last time of the span."""
        return {
            "none": (0.0, 1.0),
            "earlier": (0.0, self.portion),
            "later": (1.0 - self.portion, 1.0),
            "range": (self.begin, self.end),
        }[self.strategy]

    def __call__(self, u_B: Tensor) -> Tensor:
        """Map uniform numbers u = 1 - t, so that times in the span become `multiplier` times as frequent as others.

        (B,) fp32 in [0, 1) in and out; the same tensor where no time is favoured.
        """
        if self.strategy == "none" or self.multiplier == 1.0:
            return u_B
        low, high = 1.0 - self.span[1], 1.0 - self.span[0]
        mass = self.multiplier * (high - low)
        drawn_B = u_B.float() * (low + mass + 1.0 - high)
        inside_B = low + (drawn_B - low) / self.multiplier
        behind_B = drawn_B + (high - low) - mass
        bent_B = drawn_B.where(drawn_B < low, inside_B.where(drawn_B < low + mass, behind_B))
        return bent_B.clamp(0.0, 1.0 - 2**-24)
