"""The model card beside an export: README.md, with the front matter that the hub reads.

Nothing in it depends on when or where it was written, so that equal runs leave equal cards.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from omegaconf import OmegaConf

from cascade_train.assembly.components import families
from cascade_train.config.saved import CONFIG_NAME, load_yaml
from cascade_train.config.targets import class_constant
from cascade_train.engine.run.report import newest_grid, read_metrics
from cascade_train.files.durable import write_durably
from cascade_train.files.hub import parse_source
from cascade_train.models.family import Family

CARD, SAMPLES = "README.md", "samples.png"

LICENSE = {
    "license": "other",
    "license_name": "stable-cascade-nc-community",
    "license_link": "https://huggingface.co/stabilityai/stable-cascade/blob/main/LICENSE",
}
"""Of the weights that Stability AI published, as the front matter of their own cards names it."""


def write_card(out: Path, names: Sequence[str], *, source: str, run: Path | None, step: int | None) -> None:
    """Write `README.md` beside the exports `names` in `out`, and the newest grid of the run's samples.

    `run` is the folder with the configuration that trained them, and its metrics and samples, which count up to `step`
    (None = all); None = unknown, and the weights are those of `source`.
    """
    cfg: Any = {} if run is None else OmegaConf.to_container(load_yaml(run / CONFIG_NAME))
    grid = None if run is None else newest_grid(run, step, "grid.png")
    model, kind = cfg.get("model", {"weights": source}), cfg.get("task", {}).get("kind", "lora")
    family = _family(model, names)
    of_kind = f"`lora/` holds adapters of the kind {kind}: `PeftModel.from_pretrained(network, 'lora')` of peft."
    uses = {**family.uses, **({} if kind == "lora" else {"lora": of_kind})}
    (out / SAMPLES).unlink(missing_ok=True)
    if grid is not None:
        shutil.copyfile(grid / "grid.png", out / SAMPLES)
    data = _card_data(family, names, model, is_plain=kind == "lora")
    parts = [f"---\n{data.to_yaml()}\n---\n", f"# {cfg['run']['name'] if cfg else 'Stable Cascade weights'}\n"]
    parts += [f"![Samples]({SAMPLES})\n"] if grid is not None else []
    parts += ["## Use\n", "In a copy of this folder (`hf download <repository> --local-dir .`):\n"]
    parts += ["".join(f"- {uses.get(name, f'`{name}` is for cascade_train.')}\n" for name in names)]
    parts += [] if run is None else ["## Training\n", _training(cfg, _metrics(run, step))]
    write_durably(out / CARD, str(ModelCard("\n".join(parts))))


def _card_data(family: Family, names: Sequence[str], model: Mapping[str, Any], *, is_plain: bool) -> ModelCardData:
    base, kind = parse_source(str(model.get("weights"))), [*names, "weights"][0].partition(".")[0]
    relation = "adapter" if kind in ("lora", "controlnet") else "finetune"
    of_published: dict[str, Any] = LICENSE if _loads_published(model) else {}
    in_diffusers = family.in_diffusers if is_plain else family.in_diffusers - {"lora"}
    return ModelCardData(
        base_model=None if base is None else base.repo,
        base_model_relation=None if base is None else relation,
        library_name="diffusers" if in_diffusers & {*names} else "peft" if "lora" in names else "cascade_train",
        pipeline_tag=None if kind in ("vqgan", "stage_a", "vae") else "text-to-image",
        tags=[family.tag, kind, "cascade_train"],
        **of_published,
    )


def _family(model: Mapping[str, Any], names: Sequence[str]) -> Family:
    """Family of a model's node; of weights alone, the first that writes such exports."""
    own: Family | None = class_constant(str(model.get("_target_")), "family")
    if own is not None:
        return own
    known = families()
    return next((each for each in known if {*names} & each.uses.keys()), known[0])


def _loads_published(model: Mapping[str, Any]) -> bool:
    parts = [] if model.get("random_encoders") else [node for node in model.values() if isinstance(node, Mapping)]
    sources = [parse_source(str(node.get("weights"))) for node in (model, *parts)]
    return any(source is not None and source.repo.startswith("stabilityai/stable-cascade") for source in sources)


def _training(cfg: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    model, task, data = (str(cfg[node]["_target_"]).rpartition(".")[2] for node in ("model", "task", "data"))
    weights, side = (cfg["model"].get(key) for key in ("weights", "image_size"))  # a stage of one's own may lack both
    weights = Path(weights).name if Path(str(weights)).is_absolute() else weights or "random values"
    lines = [
        f"- {task} of {model}, from `{weights}`",
        f"- data: {data}{'' if side is None else f', pictures of {side} px'}",
        f"- batches of {cfg['train']['global_batch_size']}, learning rate {cfg['optimizer']['lr']:g}, "
        f"{cfg['train']['precision']}, seed {cfg['run']['seed']}",
        *(f"- {name}: {value:.4g}" for name, value in metrics.items()),
    ]
    return "\n".join(lines) + "\n"


def _metrics(run: Path, step: int | None) -> dict[str, float]:
    curves = read_metrics(run, until=math.inf if step is None else step)
    named = ("step", "samples_seen", "loss")
    return {name: curve.value for name, curve in curves.items() if name in named or name.startswith("validate/")}
