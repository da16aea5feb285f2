"""The model card beside an export: README.md, with the front matter that the hub reads.

Nothing in it depends on when or where it was written, so that equal runs leave equal cards.
"""

from __future__ import annotations

import re
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cascade_train.assembly.components import families
from cascade_train.config.saved import CONFIG_NAME, load_yaml
from cascade_train.config.targets import class_constant
from cascade_train.engine.run.report import newest_grid, read_metrics
from cascade_train.files.durable import to_yaml, write_durably
from cascade_train.files.hub import parse_source
from cascade_train.models.family import Family
from cascade_train.redaction import redacted

CARD, SAMPLES = "README.md", "samples.png"

LICENSE = {
    "license": "other",
    "license_name": "stable-cascade-nc-community",
    "license_link": "https://huggingface.co/stabilityai/stable-cascade/blob/main/LICENSE",
}
"""Of the weights that Stability AI published, as the front matter of their own cards names it."""

SHOWN = ("model", "task", "objective", "data", "train", "optimizer", "lr_scheduler", "ema")
"""Nodes of the configuration that decide what was learned."""

_FOLDERS = re.compile(r"(?<![\w/.~-])(?:file://)?~?/(?:[^\s'\"/]+/)+")
"""Folders of this machine within a text, such as a command that reads a tar."""


def write_card(out: Path, names: Sequence[str], *, source: str, run: Path | None, step: int | None) -> None:
    """Write `README.md` beside the exports `names` in `out`, and the newest grid of the run's samples.

    `run` is the folder with the configuration that trained them, and its metrics and samples, which count up to `step`
    (None = all); None = unknown, and the weights are those of `source`.
    """
    saved = None if run is None else OmegaConf.to_container(load_yaml(run / CONFIG_NAME))
    plain: Any = {} if saved is None else _without_places(redacted(saved))
    folder = None if run is None else newest_grid(run, step, "grid.png")
    uses, kind = dict(_family(plain.get("model", {}), names).uses), plain.get("task", {}).get("kind", "lora")
    if kind != "lora":
        uses["lora"] = (
            f"`lora/` holds adapters of the kind {kind}: `PeftModel.from_pretrained(network, 'lora')` of peft."
        )
    (out / SAMPLES).unlink(missing_ok=True)
    if folder is not None:
        shutil.copyfile(folder / "grid.png", out / SAMPLES)
    title = plain["run"]["name"] if plain else "Stable Cascade weights"
    parts = [
        f"---\n{to_yaml(_front_matter(names, plain.get('model', {'weights': source}), is_plain=kind == 'lora'))}---\n",
        f"# {title}\n",
    ]
    parts += [f"![Samples]({SAMPLES})\n"] if folder is not None else []
    parts += ["## Use\n", "In a copy of this folder (`hf download <repository> --local-dir .`):\n"]
    parts += ["".join(f"- {uses.get(name, f'`{name}` is for cascade_train.')}\n" for name in names)]
    if plain:
        metrics = {} if run is None else _metrics(run, step)
        shown = to_yaml({key: plain[key] for key in SHOWN if key in plain})
        details = f"<details><summary>Configuration</summary>\n\n```yaml\n{shown}```\n\n</details>\n"
        parts += ["## Training\n", _training(plain, metrics), details]
    write_durably(out / CARD, "\n".join(parts))


def _front_matter(names: Sequence[str], model: Mapping[str, Any], *, is_plain: bool) -> dict[str, Any]:
    base, kind = parse_source(str(model.get("weights"))), [*names, "weights"][0].partition(".")[0]
    found: dict[str, Any] = {}
    if base is not None:
        relation = "adapter" if kind in ("lora", "controlnet") else "finetune"
        found = {"base_model": base.repo, "base_model_relation": relation}
    if _loads_published(model):
        found |= LICENSE
    family = _family(model, names)
    in_diffusers = family.in_diffusers if is_plain else family.in_diffusers - {"lora"}
    library = "diffusers" if in_diffusers & {*names} else "peft" if "lora" in names else "cascade_train"
    tag = {} if kind in ("vqgan", "stage_a", "vae") else {"pipeline_tag": "text-to-image"}
    return {**found, "library_name": library, **tag, "tags": [family.tag, kind, "cascade_train"]}


def _family(model: Mapping[str, Any], names: Sequence[str]) -> Family:
    """Return the family of a model's node; of weights alone, the first that writes such exports."""
    own: Family | None = class_constant(str(model.get("_target_")), "family")
    if own is not None:
        return own
    known = families()
    return next((each for each in known if {*names} & each.uses.keys()), known[0])


def _loads_published(model: Mapping[str, Any]) -> bool:
    parts = [] if model.get("random_encoders") else [node for node in model.values() if isinstance(node, Mapping)]
    sources = [parse_source(str(node.get("weights"))) for node in (model, *parts)]
    return any(source is not None and source.repo.startswith("stabilityai/stable-cascade") for source in sources)


def _training(plain: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    model, task, data = (str(plain[node]["_target_"]).rpartition(".")[2] for node in ("model", "task", "data"))
    batch, lr = plain["train"]["global_batch_size"], plain["optimizer"]["lr"]
    weights, side = (plain["model"].get(key) for key in ("weights", "image_size"))  # a stage of one's own may lack both
    lines = [
        f"- {task} of {model}, from `{weights or 'random values'}`",
        f"- data: {data}{'' if side is None else f', pictures of {side} px'}",
        f"- batches of {batch}, learning rate {lr:g}, {plain['train']['precision']}, seed {plain['run']['seed']}",
        *(f"- {name}: {value:.4g}" for name, value in metrics.items()),
    ]
    return "\n".join(lines) + "\n"


def _metrics(run: Path, step: int | None) -> dict[str, float]:
    found = {}
    for name, (steps, values) in read_metrics(run).items():
        count = len(steps) if step is None else bisect_right(steps, step)
        if count and (name in ("step", "samples_seen", "loss") or name.startswith("validate/")):
            found[name] = values[count - 1]
    return found


def _without_places(value: Any) -> Any:
    """Return nested values with local paths cut to their last part: cards are published."""
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return Path(value).name if Path(value).is_absolute() else _FOLDERS.sub("", value)
