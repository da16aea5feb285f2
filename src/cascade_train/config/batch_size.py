"""How a global batch is split: global = micro x ranks x accumulation, exactly."""

from __future__ import annotations

from dataclasses import dataclass

from cascade_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch over ranks and time.

    Attributes:
        micro_batch_size: samples that one rank holds at once.
        accumulation: micro-batches of one rank per optimizer step.
    """

    micro_batch_size: int
    accumulation: int


def split_batch(global_batch_size: int, micro_batch_size: int | None, ranks: int) -> BatchSplit:
    """Return micro-batch size and accumulation of a global batch.

    Args:
        global_batch_size: samples of one optimizer step, 1 or more.
        micro_batch_size: samples that one rank holds at once; None = no accumulation.
        ranks: number of processes, 1 or more.

    Raises:
        ConfigError: it does not divide exactly; names the sizes that do.
    """
    if global_batch_size % ranks:
        near = " or ".join(map(str, nearest_multiples(global_batch_size, ranks)))
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} cannot be split equally over {ranks} ranks. Sizes that fit "
            f"{ranks} ranks: {near}; numbers of ranks that fit {global_batch_size}: {listed(global_batch_size)}."
        )
    share = global_batch_size // ranks
    micro = share if micro_batch_size is None else micro_batch_size
    if share % micro:
        near = " or ".join(map(str, nearest_multiples(global_batch_size, micro * ranks)))
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} is not micro_batch_size x ranks x accumulation with "
            f"train.micro_batch_size={micro} and {ranks} rank{'s' if ranks > 1 else ''}. Micro-batch sizes that fit: "
            f"{listed(share)}; global batch sizes that fit: {near}."
        )
    return BatchSplit(micro_batch_size=micro, accumulation=share // micro)


def nearest_multiples(value: int, unit: int) -> list[int]:
    """Return the multiples of `unit` just below and above `value`, 0 left out."""
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def listed(value: int) -> str:
    """Return the divisors of `value`, as text."""
    return ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)
