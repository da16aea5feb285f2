"""An evaluation that is killed as it writes a picture, one that notes what it samples, one whose ranks see different
checkpoints. Hooks of forked.py."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from PIL import Image

from cascade_train.results import export
from cascade_train.tasks.text_to_image import DiffusionImageSampler

WHOLE = 3
"""Pictures that are written before the kill; the next one is left in half."""


def die_while_writing(out: Path) -> None:
    """Kill the process in the middle of a picture."""
    save, seen = Image.Image.save, Counter[str]()

    def saving(self: Image.Image, path: Any, **options: Any) -> None:
        save(self, path, **options)
        seen["pictures"] += 1
        if seen["pictures"] > WHOLE:
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    Image.Image.save = saving  # type: ignore[method-assign]


def see_no_checkpoint_but_on_rank_zero(out: Path) -> None:
    """Let other ranks find every checkpoint damaged, as one is that retention deletes while they look at it."""
    find_fault = export.find_fault

    def finding(path: Path) -> str | None:
        return find_fault(path) if dist.get_rank() == 0 else "it is being deleted"

    export.find_fault = finding


def note_samples(out: Path) -> None:
    """Append the captions of each call of a sampler to `<out>/sampled_<rank>`, with the shape of its latents."""
    latents = DiffusionImageSampler.latents

    def noting(self: DiffusionImageSampler, captions: Any, *given: Any) -> Any:
        with (out / f"sampled_{dist.get_rank()}").open("a") as notes:
            notes.write(f"{self.shape[0]} {'; '.join(captions)}\n")
        return latents(self, captions, *given)

    DiffusionImageSampler.latents = noting  # type: ignore[method-assign]
