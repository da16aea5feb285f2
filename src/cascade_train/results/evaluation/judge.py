"""One evaluation: what is made, what it is compared with, and its numbers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cascade_train.assembly.components import build_component
from cascade_train.config.saved import to_plain
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.engine.run.lock import RunLock
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
from cascade_train.results.evaluation.pictures import Folder, Originals, PictureMaker, Work, open_originals
from cascade_train.results.evaluation.published import INCEPTION
from cascade_train.results.evaluation.verdict import Verdict
from cascade_train.results.find import TrainedModel
from cascade_train.results.sampling import Sizes, fit_sizes

log = logging.getLogger(__name__)

SETTINGS = "settings.json"
"""The file of a folder that names what its pictures depend on."""

TINY_PX = 96
"""Pictures of tiny models, at most."""


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
        """Return the purpose of a trained model. Builds nothing."""
        stage, objective = build_component(model.cfg, "model"), build_component(model.cfg, "objective")
        task = build_component(model.cfg, "task").for_objective(objective)
        reconstructs = stage.needs_image or not objective.denoises
        return cls(follows=reconstructs or task.needs_image, reconstructs=reconstructs)


def measurable(settings: Settings, model: TrainedModel) -> Settings:
    """Return settings with default features: Inception's, or a tiny model's own."""
    if settings.features is not None or settings.clip is not None or Purpose.of(model).reconstructs:
        return settings
    if model.cfg.model.image_size <= TINY_PX:
        return replace(settings, features=PACKAGED_FEATURES)
    return replace(settings, features=str(INCEPTION.path)) if INCEPTION.path.is_file() else settings


class Judge:
    """Evaluates models; keeps the networks and the features of the real pictures."""

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self._world = settings, world
        self._originals: Originals | None = None
        self._real: dict[int, Tensor] = {}

    def judge(
        self,
        model: TrainedModel,
        decoder: TrainedModel | None,
        out: Path,
        *,
        run: Path | None = None,
        stamp: str | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Make the pictures that are missing in `out`, measure all of them, and return the numbers. Collective.

        `stamp` names the weights of the model, None = by their files; where `run` has replaced them, pictures of the
        earlier ones are made anew. `prepare` is called before weights are loaded, if they are.

        Raises:
            ConfigError: settings that do not fit the model, a network that cannot be loaded, or a folder with pictures
                of other settings.
        """
        settings, purpose = self.settings, Purpose.of(model)
        check_fits(settings, model, decoder, purpose)
        sizes = None
        if not purpose.follows:
            given = {key: getattr(settings, key) for key in ("height", "width", "compression")}
            sizes = fit_sizes(model, decoder, **given)
        networks, real = self._networks, self._real_pictures(model, purpose)
        work = self._work(purpose, real)
        self._check_enough(work, real)
        plain = plain_settings(settings, model, decoder, work, sizes, stamp)
        from_rank_zero(lambda: claim(out, plain, run=run))
        folder = Folder(out)
        PictureMaker(model=model, decoder=decoder, work=work, folder=folder, sizes=sizes, world=self._world).make(
            prepare
        )
        real = work.originals if purpose.reconstructs else real
        return Verdict(
            origin=model.origin,
            images=len(work.captions),
            real=None if real is None else real.name,
            real_images=0 if real is None else len(real),
            networks=settings.networks,
            measures=self._measure(networks, purpose, work, folder, real),
            settings=self.digest(model, decoder),
            weights=plain["from"],
            captions=tuple(work.captions),
            count=settings.count,
            originals=None if work.originals is None else work.originals.images,
        )

    def digest(self, model: TrainedModel, decoder: TrainedModel | None) -> str:
        """Return a digest of how a model is evaluated, whatever its weights are. Collective."""
        check_fits(self.settings, model, decoder, purpose := Purpose.of(model))
        real = self._real_pictures(model, purpose)
        behind = None if decoder is None else [weights_stamp(decoder), _codec(decoder), _sampling(decoder)]
        pictures = None if real is None else real.digest
        return json_digest([asdict(self.settings), _sampling(model), _codec(model), behind, pictures])

    @cached_property
    def _networks(self) -> Networks:
        chosen: dict[str, Any] = self.settings.networks
        loaded: list[Networks] = []
        from_every_rank(lambda: loaded.append(load_networks(**chosen, device=self._world.device)))
        return loaded[0]

    def _real_pictures(self, model: TrainedModel, purpose: Purpose) -> Originals | None:
        """Return the pictures to compare with; None = none are needed."""
        settings = self.settings
        if not (purpose.follows or not settings.prompts or settings.features is not None):
            return None
        if self._originals is None:
            opened: list[Originals] = []
            from_every_rank(lambda: opened.append(open_originals(model.cfg, settings.real)))
            self._originals = opened[0].first(settings.real_samples, seed=settings.seed)
        return self._originals

    def _work(self, purpose: Purpose, real: Originals | None) -> Work:
        """Return what to make of the prompts, of real pictures' captions, or of these."""
        settings, size, source = self.settings, self.settings.batch_size, None
        prompts: Sequence[str] = settings.prompts[: settings.samples]
        if not settings.prompts:
            assert real is not None, "captions come from somewhere"
            source = real.first(settings.samples, seed=settings.seed)
            prompts = from_rank_zero(partial(source.captions, range(len(source))))
        if purpose.follows:
            assert source is not None, "prompts of one's own are refused"
            return Work(captions=prompts, batches=source.batches(size), seed=settings.seed, originals=source)
        prompts = [prompt for prompt in prompts for _ in range(settings.count)]
        numbers = range(len(prompts))
        batches = [tuple(numbers[start : start + size]) for start in numbers[::size]]
        return Work(captions=prompts, batches=batches, seed=settings.seed, originals=None)

    def _check_enough(self, work: Work, real: Originals | None) -> None:
        if self.settings.features is not None and real is not None and min(len(work.captions), len(real)) < LEAST:
            raise ConfigError(
                f"features={self.settings.features}: sets of {len(work.captions)} images and {len(real)} real pictures "
                f"are too small to compare; at least {LEAST} of each are needed, and thousands for numbers that mean "
                "something. Give more, or features=null."
            )

    def _measure(
        self, networks: Networks, purpose: Purpose, work: Work, folder: Folder, real: Originals | None
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        made = Pictures(batches=work.batches, read=folder.read_all, world=self._world)
        if networks.features is not None and real is not None:
            made_ND = made.features(networks.features)
            if len(real) not in self._real:
                batches = real.batches(self.settings.batch_size)
                originals = Pictures(batches=batches, read=real.images, world=self._world)
                self._real[len(real)] = originals.features(networks.features)
            sets = from_rank_zero(lambda: set_measures(made_ND, self._real[len(real)]))
            found |= {"rfid": sets["fid"]} if purpose.reconstructs else sets
        if networks.clip is not None:
            found |= made.caption_measures(work.captions, networks.clip)
        if purpose.reconstructs and work.originals is not None:
            found |= made.pair_measures(work.originals.images, networks.lpips)
        return found


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


def plain_settings(
    settings: Settings,
    model: TrainedModel,
    decoder: TrainedModel | None,
    work: Work,
    sizes: Sizes | None,
    stamp: str | None,
) -> dict[str, Any]:
    """Return what the pictures depend on, as JSON values."""
    found: dict[str, Any] = {"from": stamp or weights_stamp(model), "sample": _sampling(model), "codec": _codec(model)}
    if decoder is not None:
        found |= {"decoder": weights_stamp(decoder), "codec": _codec(decoder), "decoder_sample": _sampling(decoder)}
    captions = hashlib.sha256("\0".join(work.captions).encode()).hexdigest()[:16]
    shapes = None if sizes is None else [list(sizes.picture), list(sizes.sampled)]
    followed = None if work.originals is None else work.originals.digest
    return found | {"seed": settings.seed, "captions": [len(work.captions), captions], "size": shapes, "real": followed}


def _codec(model: TrainedModel) -> str | None:
    """Return a digest of the weights of a Stage B's Stage A; None = it names none."""
    named = model.cfg.model.get("stage_a", {}).get("weights")
    return None if named is None else _stamp(str(named))


def _sampling(model: TrainedModel) -> dict[str, Any]:
    sample = to_plain(model.cfg)["sample"]
    later = {"negative_prompt": sample["negative_prompt"]} if sample["negative_prompt"] else {}
    return {key: sample[key] for key in ("sampler", "steps", "guidance_scale", "shift")} | later


def weights_stamp(model: TrainedModel) -> str:
    """Return a digest of names, sizes and times of a model's files, or its name on the hub."""
    return _stamp(str(model.cfg.model.weights if model.export is None else model.export))


def _stamp(source: str) -> str:
    place = local_path(source)
    files = sorted(path for path in place.rglob("*.safetensors")) if place.is_dir() else [place]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    return json_digest([str(place.resolve()) if place.exists() else source, stats])


def json_digest(value: Any) -> str:
    """Return 16 hex digits that change with a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def locked(out: Path, world: World) -> Iterator[None]:
    """Make and lock the folder of an evaluation; one left empty is removed. Collective."""
    lock = RunLock(out, key="out", other="out=")
    made = [path for path in (out, *out.parents) if not path.exists()]

    def enter() -> None:
        make_folder(out)
        lock.acquire()

    try:
        from_rank_zero(enter)
        yield
    finally:
        lock.release()
        with suppress(OSError):
            for path in made if world.is_main else ():
                path.rmdir()


def claim(out: Path, settings: Mapping[str, Any], *, run: Path | None = None) -> None:
    """Begin an evaluation in a folder, or continue it; a ConfigError where it has pictures of other settings.

    Pictures of weights that `run` itself has replaced since are removed with a warning.
    """
    path, owner = out / SETTINGS, None if run is None else str(run.resolve())
    if path.is_file():
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
        log.warning("%s: the run has saved this step again since; its pictures are made anew.", out)
        Folder(out).clear()
    else:
        check_unused(out)
    write_durably(path, json.dumps({**settings, "run": owner}, indent=2) + "\n")
