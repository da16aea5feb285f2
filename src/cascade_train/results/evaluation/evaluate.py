"""One evaluation: which pictures are sampled, what they are compared with, and the numbers."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from cascade_train.assembly.components import build_component
from cascade_train.config.saved import to_plain
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.errors import ConfigError
from cascade_train.files.durable import write_durably
from cascade_train.files.output import check_unused
from cascade_train.files.run_folder import make_folder
from cascade_train.files.untrusted import load_mapping
from cascade_train.models.formats.weights_source import local_path
from cascade_train.results.evaluation.measures import (
    LEAST,
    PACKAGED_FEATURES,
    Networks,
    Pictures,
    load_networks,
    set_measures,
)
from cascade_train.results.evaluation.pictures import Folder, Numbers, Originals, open_originals
from cascade_train.results.evaluation.published import INCEPTION
from cascade_train.results.evaluation.result import METRICS, Evaluation
from cascade_train.results.find import TrainedModel
from cascade_train.results.sampling import PromptBatch, Sizes, fit_sizes, sample_images
from cascade_train.tasks.base import Guide

log = logging.getLogger(__name__)

SETTINGS = "settings.json"
"""File of a folder with all that its pictures depend on."""

TINY_PX = 96
"""Pictures of tiny models, at most."""

SAVED_AT_ONCE = 1024
"""Pictures of a rank that Stage C samples before Stage B decodes them; a kill loses no more."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is evaluated and how: see `EvaluateArgs`, which has the same keys."""

    prompts: tuple[str, ...]
    count: int
    samples: int | None
    real: tuple[str, ...]
    real_samples: int | None
    seed: int
    batch_size: int
    height: int | None
    width: int | None
    compression: float | None
    features: str | None
    resize: str
    clip: str | None
    lpips: str | None

    @property
    def networks(self) -> dict[str, str | None]:
        """The networks that measure, by key."""
        return {"features": self.features, "resize": self.resize, "clip": self.clip, "lpips": self.lpips}


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """Whether a stage `follows` pictures, not captions alone, and `reconstructs` them."""

    follows: bool
    reconstructs: bool

    @classmethod
    def of(cls, model: TrainedModel) -> Purpose:
        """Purpose of a trained model. Builds nothing."""
        stage, objective = build_component(model.cfg, "model"), build_component(model.cfg, "objective")
        task = build_component(model.cfg, "task").for_objective(objective)
        reconstructs = stage.needs_image or not objective.denoises
        return cls(follows=reconstructs or task.needs_image, reconstructs=reconstructs)


def measurable(settings: Settings, model: TrainedModel) -> Settings:
    """Settings with default features: Inception's, or a tiny model's own."""
    if settings.features is not None or settings.clip is not None or Purpose.of(model).reconstructs:
        return settings
    if model.cfg.model.image_size <= TINY_PX:
        return replace(settings, features=PACKAGED_FEATURES)
    return replace(settings, features=str(INCEPTION.path)) if INCEPTION.path.is_file() else settings


class Evaluator:
    """Evaluates models; keeps the networks, the real pictures and their features."""

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self._world = settings, world
        self._originals: Originals | None = None
        self._real_ND: Tensor | None = None

    def evaluate(
        self,
        model: TrainedModel,
        decoder: TrainedModel | None,
        out: Path,
        *,
        run: Path | None = None,
        stamp: str | None = None,
        prepare: Callable[[], None] = lambda: None,
        again: bool = True,
    ) -> Evaluation | None:
        """Sample the pictures that are missing in `out`, and measure all of them. Collective.

        `stamp` names the weights of the model, None = by their files. If `run` has replaced them since, its pictures
        are sampled anew. `prepare` is called before weights are loaded. `again=False`: return None if `out` has the
        numbers of the same evaluation already.

        Raises:
            ConfigError: settings that do not fit the model, a network that cannot be loaded, or a folder with pictures
                of other settings.
        """
        settings, purpose = self.settings, Purpose.of(model)
        check_fits(settings, model, decoder, purpose)
        sides = {key: getattr(settings, key) for key in ("height", "width", "compression")}
        sizes = None if purpose.follows else fit_sizes(model, decoder, **sides)
        networks, real = self._networks, self._real_pictures(model, purpose)
        source = None if settings.prompts or real is None else real.first(settings.samples, seed=settings.seed)
        prompts = settings.prompts[: settings.samples] if source is None else from_rank_zero(source.captions)
        captions = [prompt for prompt in prompts for _ in range(settings.count)]
        originals = source if purpose.follows else None
        compared = originals if purpose.reconstructs else real
        self._check_enough(len(captions), compared)
        depends = {
            **stages_of(model, decoder, stamp),
            "seed": settings.seed,
            "captions": [len(captions), hashlib.sha256("\0".join(captions).encode()).hexdigest()[:16]],
            "size": None if sizes is None else [list(sizes.picture), list(sizes.sampled)],
            "real": None if originals is None else originals.digest,
        }
        result = Evaluation(
            origin=model.origin,
            images=len(captions),
            real=None if compared is None else compared.name,
            real_images=0 if compared is None else len(compared),
            networks=settings.networks,
            settings={**depends, "compared": None if compared is None else compared.digest},
            weights=stamp or "other",
            captions=tuple(captions),
            count=settings.count,
            originals=None if originals is None else originals.images,
        )
        from_rank_zero(lambda: claim(out, depends, run=run))
        if not again and from_rank_zero(lambda: result.is_in(out)):
            return None
        numbers, size = tuple(range(len(captions))), settings.batch_size
        batches = [numbers[start : start + size] for start in numbers[::size]]
        batches = batches if originals is None else originals.batches(size)
        folder = Folder(out)
        self._sample(model, decoder, folder, batches, captions, originals, sizes, prepare)
        pictures = Pictures(batches=batches, read=folder.read_all, world=self._world)
        return replace(result, measures=self._measure(networks, purpose, pictures, captions, originals, compared))

    def _sample(
        self,
        model: TrainedModel,
        decoder: TrainedModel | None,
        folder: Folder,
        batches: Sequence[Numbers],
        captions: Sequence[str],
        originals: Originals | None,
        sizes: Sizes | None,
        prepare: Callable[[], None],
    ) -> None:
        """Sample the pictures that are missing, each batch on one rank; with a decoder some at a time. Collective."""
        rank, ranks, settings = self._world.rank, self._world.ranks, self.settings

        def prompts_of(batch: Numbers) -> PromptBatch:
            image_BCHW = None if originals is None else originals.read(batch).image_BCHW
            guide = None if image_BCHW is None else Guide(image_BCHW=image_BCHW, numbers=batch)
            texts = tuple(captions[number] for number in batch)
            return PromptBatch(captions=texts, numbers=batch, guide=guide, image_BCHW=image_BCHW)

        def save(batch: PromptBatch, image_BCHW: Tensor) -> None:
            folder.save(batch.numbers, image_BCHW)

        todo = from_rank_zero(lambda: [batch for batch in batches if not folder.has(batch)])
        at_once = ranks * max(1, SAVED_AT_ONCE // settings.batch_size) if decoder is not None else len(todo)
        if todo:
            prepare()
        for start in range(0, len(todo), at_once or 1):
            own = map(prompts_of, todo[start : start + at_once][rank::ranks])
            sample_images(model, decoder, own, save, sizes=sizes, seed=settings.seed, world=self._world)

    @cached_property
    def _networks(self) -> Networks:
        chosen: dict[str, Any] = self.settings.networks
        loaded: list[Networks] = []
        from_every_rank(lambda: loaded.append(load_networks(**chosen, device=self._world.device)))
        return loaded[0]

    def _real_pictures(self, model: TrainedModel, purpose: Purpose) -> Originals | None:
        """Pictures to compare with; None = none are needed."""
        settings = self.settings
        if not (purpose.follows or not settings.prompts or settings.features is not None):
            return None
        if self._originals is None:
            opened: list[Originals] = []
            from_every_rank(lambda: opened.append(open_originals(model.cfg, settings.real)))
            self._originals = opened[0].first(settings.real_samples, seed=settings.seed)
        return self._originals

    def _check_enough(self, images: int, real: Originals | None) -> None:
        if self.settings.features is not None and real is not None and min(images, len(real)) < LEAST:
            raise ConfigError(
                f"features={self.settings.features}: sets of {images} images and {len(real)} real pictures are too "
                f"small to compare; at least {LEAST} of each are needed, and thousands for numbers that mean "
                "something. Give more, or features=null."
            )

    def _measure(
        self,
        networks: Networks,
        purpose: Purpose,
        pictures: Pictures,
        captions: Sequence[str],
        originals: Originals | None,
        real: Originals | None,
    ) -> dict[str, float]:
        measures: dict[str, float] = {}
        if networks.features is not None and real is not None:
            sampled_ND = pictures.features(networks.features)
            real_ND = self._real_ND
            if real_ND is None:
                batches = real.batches(self.settings.batch_size)
                real_ND = replace(pictures, batches=batches, read=real.images).features(networks.features)
                self._real_ND = real_ND
            sets = from_rank_zero(lambda: set_measures(sampled_ND, real_ND))
            measures |= {"rfid": sets["fid"]} if purpose.reconstructs else sets
        if networks.clip is not None:
            measures |= pictures.caption_measures(captions, networks.clip)
        if purpose.reconstructs and originals is not None:
            measures |= pictures.pair_measures(originals.images, networks.lpips)
        return measures


def check_fits(settings: Settings, model: TrainedModel, decoder: TrainedModel | None, purpose: Purpose) -> None:
    """Refuse settings that mean nothing for a model."""
    if not purpose.reconstructs and settings.lpips is not None:
        raise ConfigError(f"lpips={settings.lpips}: compares reconstructions with originals; for a Stage B or A.")
    if not purpose.reconstructs and settings.features is None and settings.clip is None:
        raise ConfigError(
            "features=null and clip=null measure nothing, and Inception V3 is not on this machine. Download it with "
            "cascade-train download inception, or give features=<its file> for FID, KID, precision and recall, "
            "clip=<folder> for CLIPScore, or both."
        )
    if not purpose.follows:
        return
    if settings.prompts or settings.count != 1 or decoder is not None:
        key = "prompts" if settings.prompts else "decoder" if decoder is not None else f"count={settings.count}"
        raise ConfigError(
            f"{key}: is for a Stage C that samples from captions alone, and {model.origin} makes one picture of each "
            "real one. Leave it out; real= names the pictures."
        )
    for key in ("height", "width", "compression"):
        if getattr(settings, key) is not None:
            raise ConfigError(f"{key}={getattr(settings, key)}: {model.origin} follows real pictures and their sizes.")


def stages_of(model: TrainedModel, decoder: TrainedModel | None, stamp: str | None) -> dict[str, Any]:
    """Weights and sampling of the stages, as JSON values by argument; `stamp` names the weights of the first."""
    stages = {"from": model, **({} if decoder is None else {"decoder": decoder})}
    values: dict[str, Any] = {}
    for key, stage in stages.items():
        codec = stage.cfg.model.get("stage_a", {}).get("weights")
        values[key] = weights_of(str(stage.cfg.model.weights if stage.export is None else stage.export))
        values[f"sample of {key}"] = to_plain(stage.cfg)["sample"]
        values[f"codec of {key}"] = None if codec is None else weights_of(str(codec))
    return values if stamp is None else {**values, "from": stamp}


def weights_of(source: str) -> str:
    """Changes with the files of weights: their names, sizes and times, or a name on the hub."""
    place = local_path(source)
    files = sorted(place.rglob("*.safetensors")) if place.is_dir() else [place]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    return f"{place.resolve() if stats else source} {hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]}"


def claim(out: Path, settings: Mapping[str, Any], *, run: Path | None = None) -> None:
    """Begin an evaluation in a folder, or continue it; a ConfigError if it has pictures of other settings.

    Pictures of weights that `run` itself has replaced since are removed with a warning.
    """
    path, owner = make_folder(out) / SETTINGS, None if run is None else str(run.resolve())
    if not path.is_file():
        check_unused(out)
    else:
        there = load_mapping(path)
        former = there.pop("run", None)
        changed = sorted(key for key in {*there, *settings} if there.get(key) != settings.get(key))
        if not changed:
            return
        if owner is None or former != owner or changed != ["from"]:
            names = ", ".join(changed).replace("captions", "count or captions")
            raise ConfigError(
                f"out={out}: holds pictures of another evaluation, which differs in {names}. Choose "
                "another out=, or remove the folder."
            )
        log.warning("%s: the run has saved this step again since; its pictures are sampled anew.", out)
        shutil.rmtree(out / "pictures", ignore_errors=True)
        (out / METRICS).unlink(missing_ok=True)
    write_durably(path, json.dumps({**settings, "run": owner}, indent=2) + "\n")
