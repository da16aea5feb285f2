"""The values that a network begins with, brought to whichever of its rows are in this process's memory.

Lives here: the contract. Must not live here: drawn values (initialize.py) and stored ones (formats/weights.py).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from torch import Tensor

Shares = Mapping[str, tuple[Tensor, int]]
"""Memory by parameter name: rows of the parameter (its first dimension), and the number of the first of them."""


class FirstValues(abc.ABC):
    """What fills a network that was made on the meta device, however its parameters are split over processes.

    Made of the whole network while its names and shapes are plain, which is when mistakes are found; nothing is read
    or drawn before `fill`.
    """

    @abc.abstractmethod
    def fill(self, shares: Shares) -> None:
        """Write every share; beside them at most one of them exists in memory at a time.

        The values do not depend on how the parameters are split.

        Args:
            shares: undefined memory, of any dtype and device, by the network's own names.
        """
