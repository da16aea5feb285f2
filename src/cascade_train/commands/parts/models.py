"""Arguments of several commands: of those that sample from trained stages, and of those that write weights."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.error_messages import paragraph_of
from cascade_train.config.preflight import guidance_scale, preflight
from cascade_train.data.prompts import read_prompts
from cascade_train.errors import ConfigError
from cascade_train.options import limit

if TYPE_CHECKING:
    from cascade_train.results.find import TrainedModel

_log = logging.getLogger(__name__)

DECODER_STEPS = 10
"""Network evaluations of Stage B for each picture, as in the original's text_to_image.ipynb."""


@dataclass(kw_only=True)
class SamplingArgs:
    """Which stages make pictures, and how; null = as the run's sample.* keys say."""

    source: str
    """Stage that samples: a run, its export, or published weights; Stage C alone shows previews, quickly."""
    decoder: str | None = None
    """Stage B, with its Stage A, that decodes the latents of Stage C: a run, its export, or published weights."""
    codec: str | None = None
    """Stage A instead of the one that Stage B was trained with: a run, its export, or weights."""
    seed: int = 0
    """Seed of the starting noise; an image depends on it, on the prompt and on the image's number."""
    height: int | None = None
    """Of the finished picture, in pixels; null = as the model was trained."""
    width: int | None = None
    """As height."""
    compression: float | None = None
    """Pixels of the finished picture for each of Stage C's latents; null = the model's, 42.67 for published ones."""
    sampler: str | None = None
    """ddpm, ddim or lcm."""
    steps: int | None = None
    """Network evaluations per image."""
    guidance_scale: float | None = None
    """Classifier-free guidance; 1 = none."""
    negative_prompt: str | None = None
    """What guidance leads away from, of all images; of the stage that samples, not of decoder=…."""
    shift: float | None = None
    """logSNR shift of the sampling schedule; 1 = none."""
    decoder_steps: int | None = None
    """Network evaluations of Stage B per image, for decoder=…; null = 10."""
    decoder_guidance_scale: float | None = None
    """Classifier-free guidance of Stage B, for decoder=…; null = 1.1."""
    batch_size: int = 8
    """Images denoised at once; does not change them."""
    allow_any_target: bool = False
    """Build whatever classes the folder's configuration names, as for components of your own; trust it first."""

    def __post_init__(self) -> None:
        limit(self, "", "batch_size", "decoder_steps", "height", "width", least=1)
        if self.compression is not None and not 1.0 <= self.compression < math.inf:
            raise ConfigError(f"compression={self.compression} must be 1 or more, e.g. 42.67.")
        scale = self.decoder_guidance_scale
        if scale is not None and not 0.0 <= scale < math.inf:
            raise ConfigError(f"decoder_guidance_scale={scale} must be 0 or more; 1 = none.")
        if self.negative_prompt is not None:
            prompts = read_prompts(self.negative_prompt, key="negative_prompt")
            if len(prompts) != 1:
                raise ConfigError(
                    f"negative_prompt={self.negative_prompt}: must be one text, and holds {len(prompts)}."
                )
            self.negative_prompt = prompts[0]
        for key in ("decoder_steps", "decoder_guidance_scale"):
            if self.decoder is None and getattr(self, key) is not None:
                raise ConfigError(f"{key}={getattr(self, key)} is for decoder=…; without one, leave it out.")


def find_stages(
    args: SamplingArgs, origin: str = "", cfg: DictConfig | None = None
) -> tuple[TrainedModel, TrainedModel | None]:
    """Return the stage that samples, and the one that decodes, set up as the arguments say.

    `cfg`, of the run that the argument `origin` named, is the first one's without weights; None = find it.

    Raises:
        ConfigError: no trained stage where one is named, or arguments that it refuses.
    """
    from cascade_train.results.find import TrainedModel, find_model, use_codec  # heavy: torch and everything above it

    found = partial(find_model, allow_any_target=args.allow_any_target)
    if cfg is None:
        model = found(args.source, key="from", part=None)
    else:
        model = TrainedModel(origin=origin, cfg=cfg, export=None)
    override_sampling(model.cfg, args)
    decoder = None if args.decoder is None else found(args.decoder, key="decoder", part="decoder")
    if decoder is not None:
        set_decoding(decoder.cfg, args)
    if args.codec is not None:
        use_codec(decoder or model, args.codec)
    return model, decoder


def override_sampling(cfg: DictConfig, args: SamplingArgs) -> None:
    """Override the run's sampling settings with the arguments given, and check them."""
    keys = ("sampler", "steps", "guidance_scale", "negative_prompt", "shift")
    given = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    with own_keys("sample", given):
        cfg.sample.update(given)
        checked = preflight(cfg, ranks=1)
    if args.negative_prompt and checked.sample.guidance_scale == 1.0:
        _log.warning("negative_prompt= has no effect: guidance_scale=1 does not guide.")


@contextmanager
def own_keys(node: str, given: Iterable[str]) -> Iterator[None]:
    """Let an error on keys of a run name the arguments of the command that set them."""
    try:
        yield
    except (ConfigError, OmegaConfBaseException) as error:
        text = str(paragraph_of(error))
        for key in given:
            text = re.sub(rf"\b{node}\.{key}\b", key, text)
        raise ConfigError(text) from error


def set_decoding(cfg: DictConfig, args: SamplingArgs) -> None:
    """Set the sampling of Stage B from its arguments, by default as in the original."""
    cfg.sample.steps = DECODER_STEPS if args.decoder_steps is None else args.decoder_steps
    given = args.decoder_guidance_scale
    cfg.sample.guidance_scale = guidance_scale(cfg) if given is None else given


@dataclass(kw_only=True)
class WeightsArgs:
    """Which network weights or adapters belong to, and the number format that is written."""

    source: str
    """Weights or adapters: a run, its export, a folder, a file, a hub id."""
    model: str | None = None
    """Size of the network, an option of the group model; null = as the run or the tensors show."""
    module_filters: list[str] | None = field(default_factory=lambda: [".attn"])
    """Modules that a LoRA of the original was trained on, which its file does not say; null = all."""
    dtype: str | None = None
    """bf16 or fp32 for the weights that are written; null = as they are. Sums are fp32."""
    allow_any_target: bool = False
    """Build whatever classes the run's configuration names, as for components of your own; trust it first."""
    overwrite: bool = False
    """Replace files at out= that this command did not write; others in a folder are never touched."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bf16", "fp32"):
            raise ConfigError(f"dtype={self.dtype} must be bf16, fp32 or null.")
