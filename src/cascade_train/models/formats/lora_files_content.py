"""What a file of adapters holds, whatever its format.

Lives here: the values that every format is read into and written from. Must not live here: any format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.lora import LoraSpec
from cascade_train.redaction import LONGEST_NAME, shortened


@contextmanager
def header_checked(origin: str) -> Iterator[None]:
    """Read what the header of a file from elsewhere says; `origin` is the key and value that named the file.

    Raises:
        ConfigError: it lacks something, or says it in another form.
    """
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{origin}: its header is damaged ({type(error).__name__}: {shortened(str(error), LONGEST_NAME)}); copy it "
            "again from where it was made"
        ) from error


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Rows of the text encoder's vocabulary that were trained.

    Attributes:
        strings: the tokens as they are typed or as the vocabulary spells them, in order.
        ids: their places in the vocabulary.
        is_new: whether each was added to the vocabulary.
        rows: (N, D) fp32, the whole rows after training, not differences.
    """

    strings: tuple[str, ...]
    ids: tuple[int, ...]
    is_new: tuple[bool, ...]
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredLora:
    """Adapters with their values on the host.

    Attributes:
        spec: what the adapters of the network are.
        state: `<module>.lora_A.weight` and `.lora_B.weight`, with DoRA also `.lora_magnitude_vector.weight`,
            by the network's module names.
        text_encoder: the same of the text encoder's modules, of equal rank and alpha; empty = none.
        tokens: trained vocabulary rows; None = none.
    """

    spec: LoraSpec
    state: Mapping[str, Tensor]
    text_encoder: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: TrainedTokens | None = None
