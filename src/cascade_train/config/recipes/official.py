"""What the keys of Stable Cascade's own training files (configs/training/*.yaml) mean here, by official.yaml.

The expression in `captions_getter` is parsed, never run: what is understood is a key, texts put together, and a draw
between two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.config.recipes.table import load_table, take
from cascade_train.errors import ConfigError

TABLE = load_table("official")
FIRST = ("run", "model", "data", "task", "objective", "train", "optimizer", "lr_scheduler", "ema", "parallel")


def is_official(source: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of the original trainer's."""
    return {"experiment_id", "model_version"} <= source.keys()


def from_official(source: Mapping[str, Any], *, ranks: int, behaviour: str) -> Recipe:
    """Translate one configuration, which gives accumulation steps; its micro-batch follows from the `ranks`.

    Where the file says nothing, the `behaviour` is "original" or "ours".

    Raises:
        ConfigError: a model that does not exist, or a batch that does not divide.
    """
    given = {key: value for key, value in source.items() if value is not None}
    recipe = Recipe(groups=_groups(given))
    take(recipe, given, TABLE)
    recipe.values |= _values(given, ranks) | _ema(given) | _control(given)
    _note(given, recipe)
    switches = original_behaviour(given, task=recipe.groups["task"], is_stage_b=_is_stage_b(given))
    recipe.values |= switches if behaviour == "original" else {}
    recipe.remarks.append(describe(behaviour, switches))
    order = {node: number for number, node in enumerate(FIRST)}
    recipe.values = dict(sorted(recipe.values.items(), key=lambda item: order.get(item[0].split(".")[0], len(order))))
    return recipe


def _groups(given: Mapping[str, Any]) -> dict[str, str]:
    version = str(given["model_version"])
    if version not in TABLE["models"]:
        raise ConfigError(f"model_version={version} is no model of Stable Cascade: {', '.join(TABLE['models'])} are.")
    chosen = {"task": _task(given), "model": TABLE["models"][version], "data": "webdataset"}
    if "controlnet_filter" in given:
        chosen["filter@task.filter"] = TABLE["filters"].get(str(given["controlnet_filter"]), "own")
    if given.get("adaptive_loss_weight"):
        chosen["objective"] = "adaptive"
    elif given.get("edm_objective"):
        chosen["objective"] = "v"
    if given.get("use_fsdp"):
        chosen["parallel"] = "fsdp"
    if "wandb_project" in given:
        chosen["tracker"] = "wandb"
    return chosen


def _task(given: Mapping[str, Any]) -> str:
    if "controlnet_blocks" in given:
        return "controlnet"
    if "module_filters" in given:
        return "lora"
    return "reconstruction" if _is_stage_b(given) else "finetune"


def _is_stage_b(given: Mapping[str, Any]) -> bool:
    return str(TABLE["models"][str(given["model_version"])]).startswith("b_")


def _values(given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "checkpoint_path" in given:
        values["run.dir"] = f"{str(given['checkpoint_path']).rstrip('/')}/{given['experiment_id']}"
    if "save_every" in given:
        values |= {"checkpoint.every_steps": given["save_every"], "sample.every_steps": given["save_every"]}
    if "generator_checkpoint_path" not in given:
        values["model.weights"] = None
    passes = int(given.get("grad_accum_steps", 1))
    if passes > 1:
        batch = int(given["batch_size"])
        if batch % (passes * ranks):
            raise ConfigError(
                f"batch_size={batch} does not divide into grad_accum_steps={passes} passes of {ranks} ranks. "
                "Give the number of processes: ranks=<number>."
            )
        values["train.micro_batch_size"] = batch // passes // ranks
    if given.get("adaptive_loss_weight") and given.get("edm_objective"):
        values["objective.target._target_"] = "cascade_train.diffusion.target.VTarget"
    values |= caption_keys(given.get("captions_getter", ("txt", "identity"))) or {}
    sampling = (
        {"sample.steps": 10, "sample.guidance_scale": 1.5} if _is_stage_b(given) else {"sample.guidance_scale": 5.0}
    )
    return values | sampling


def _ema(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the average's cadence in optimizer steps; the original counts micro-batches."""
    if "ema_beta" not in given:
        return {}
    passes = int(given.get("grad_accum_steps", 1))
    return {
        "ema.start_step": int(given.get("ema_start_iters", 0)) // passes + 1,
        "ema.every_steps": max(1, int(given.get("ema_iters", 1)) // passes),
    }


def _control(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given.get("controlnet_filter_params") or {}
    values = {f"task.filter.{TABLE['filter_arguments'].get(key, key)}": value for key, value in arguments.items()}
    if "controlnet_filter" in given and given.get("controlnet_bottleneck_mode", "effnet") == "effnet":
        values["task.backbone_weights"] = "imagenet"
    return values


def _note(given: Mapping[str, Any], recipe: Recipe) -> None:
    name = given.get("controlnet_filter")
    if name in TABLE["filter_files"]:
        recipe.note("controlnet_filter", TABLE["filter_files"][name])
    elif name is not None and name not in TABLE["filters"]:
        recipe.note(
            "controlnet_filter",
            f"{name} is no filter of the original: name your class by task.filter._target_ (docs/add-a-filter.md)",
        )
    if "captions_getter" in given and caption_keys(given["captions_getter"]) is None:
        recipe.note(
            "captions_getter",
            f"{given['captions_getter']} is not taken over, and captions are read from .txt: data.captions.key names a"
            " key of the json, or several with weights, and data.captions.template puts texts together",
        )
    urls = given.get("webdataset_path", [])
    if isinstance(urls, str) and urls.strip().endswith(".yml"):
        recipe.note("webdataset_path", f"data.urls=[...], the entries of {recipe.values.pop('data.urls')}")
    for url in [urls] if isinstance(urls, str) else urls:
        if url.startswith("s3:"):
            recipe.note("webdataset_path", f"data.urls={urls}: s3:// is read through boto3, install the extra s3")
        elif url.startswith("http"):
            recipe.note("webdataset_path", f"{url} is not read by itself: stream it through pipe:curl in data.urls")
    if given.get("edm_objective"):
        why = "the original cannot load this key; taken as its file's name says: a velocity target"
        recipe.note("edm_objective", why, Kind.TAKEN)


BEHAVIOURS = ("original", "ours")
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
"""Belong together: the learning rates of the original's recipes are made for these first values at this scale."""


def original_behaviour(given: Mapping[str, Any], *, task: str, is_stage_b: bool) -> dict[str, Any]:
    """Return the keys that make this library do as the original, of those that a task reads."""
    several_shapes = "multi_aspect_ratio" in given
    values: dict[str, Any] = {
        "data.replacement": True,
        "data.crop": "random" if several_shapes else "saliency",
        "optimizer.decay": "all",
        "lr_scheduler.from_zero": True,
    }
    values |= {"objective.noise.square_grids": True} if is_stage_b else {"model.image_encoder.antialias": False}
    if several_shapes:
        values |= {"data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
    if given.get("adaptive_loss_weight"):
        values |= {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
    return values | (ADAPTERS if task == "lora" else {})


def describe(behaviour: str, values: Mapping[str, Any]) -> str:
    """Return a sentence on the chosen behaviour, and the values that the original's sets."""
    keys = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    if behaviour == "original":
        return (
            f"behaviour=original: set as the original trainer does, where this library does otherwise: {keys}. What has"
            " no key is in docs/differences.md. behaviour=ours leaves these to this library."
        )
    return f"behaviour=ours: left to this library, docs/differences.md says why. behaviour=original sets {keys}."


WHOLE = "txt"
"""The name, among keys, of the caption beside a picture."""

_DRAWS = {"random.random", "np.random.rand", "np.random.random", "numpy.random.rand"}
_SAME_TEXT = {"identity", "str", "json.loads"}
_NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")

Piece = tuple[str, bool]
"""A text, and whether it is a key's name rather than the text itself."""


def caption_keys(getter: Sequence[Any]) -> dict[str, Any] | None:
    """Return the keys that make the same captions; None = they cannot be expressed.

    `getter` is `[txt, identity]`, `[json, captions_getter]`, or an expression such as `lambda x: x["caption"]`.
    """
    part, expression = (str(each).strip() for each in getter) if len(getter) == 2 else ("", "")
    if (part, expression) == ("txt", "identity"):
        return {}
    if (part, expression) == ("json", "captions_getter"):
        return {"data.captions.key": {"caption": 0.95, "old_caption.og_caption": 0.05}}
    try:
        tree = ast.parse(expression, mode="eval").body
        if part not in ("txt", "json") or not isinstance(tree, ast.Lambda) or len(tree.args.args) != 1:
            return None
        return _keys(_options(tree.body, _Reader(tree.args.args[0].arg, part)))
    except (SyntaxError, ValueError, RecursionError):
        return None


class _Reader:
    """Reads expressions of one argument, which is the caption's text, or the mapping of a sample's json."""

    def __init__(self, argument: str, part: str) -> None:
        self._argument, self._part = argument, part

    def pieces(self, node: ast.expr) -> list[Piece]:
        """Return an expression of text as pieces; a ValueError for any other."""
        match node:
            case ast.Constant(value=str(text)):
                return [(text, False)]
            case ast.BinOp(op=ast.Add()):
                return [*self.pieces(node.left), *self.pieces(node.right)]
            case ast.JoinedStr():
                return [piece for value in node.values for piece in self.pieces(value)]
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self.pieces(node.value)
        path = self._path(node)
        if bool(path) != (self._part == "json"):
            raise ValueError("a mapping is no text, and a text has no keys")
        return [(".".join(path) or WHOLE, True)]

    def _path(self, node: ast.expr) -> list[str]:
        """Return the keys that lead from the argument to a value."""
        match node:
            case ast.Name(id=name) if name == self._argument:
                return []
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                return [*self._path(node.value), key]
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key))], keywords=[]):
                return [*self._path(node.func.value), key]  # type: ignore[attr-defined]
            case ast.Call(args=[inner], keywords=[]) if ast.unparse(node.func) in _SAME_TEXT:
                return self._path(inner)
        raise ValueError(ast.unparse(node))


def _options(node: ast.expr, reader: _Reader) -> list[tuple[float, list[Piece]]]:
    """Return what an expression gives, each with its probability; `a if np.random.rand() < 0.1 else b` gives two."""
    if not isinstance(node, ast.IfExp):
        return [(1.0, reader.pieces(node))]
    match node.test:
        case ast.Compare(left=ast.Call() as draw, ops=[ast.Lt() | ast.LtE()], comparators=[ast.Constant(value=share)]):
            if ast.unparse(draw.func) not in _DRAWS or draw.args or not 0.0 < float(share) < 1.0:  # type: ignore[arg-type]
                raise ValueError(ast.unparse(node.test))
            first, second = _options(node.body, reader), _options(node.orelse, reader)
            weight = float(share)  # type: ignore[arg-type]
            return [(w * weight, p) for w, p in first] + [(w * (1.0 - weight), p) for w, p in second]
    raise ValueError(ast.unparse(node.test))


def _keys(options: list[tuple[float, list[Piece]]]) -> dict[str, Any] | None:
    if len(options) == 1:
        return _template(options[0][1])
    if any(len(pieces) != 1 or not pieces[0][1] for _, pieces in options):
        return None  # templates have no weights
    weights: dict[str, float] = {}
    for weight, [(key, _)] in options:
        weights[key] = round(weights.get(key, 0.0) + weight, 6)
    return {"data.captions.key": weights}


def _template(pieces: list[Piece]) -> dict[str, Any] | None:
    """Return one text's keys: of the values in it one is the caption, which the template calls so."""
    names = [text for text, is_key in pieces if is_key]
    if not names:
        return None
    key = "caption" if "caption" in names else names[0]
    chosen = {} if key == WHOLE else {"data.captions.key": key}
    if len(pieces) == 1:
        return chosen
    if not all(_NAME.fullmatch(name) for name in names):
        return None
    places = [
        ("{caption}" if text == key else f"{{{text}}}") if is_key else text.replace("{", "{{").replace("}", "}}")
        for text, is_key in pieces
    ]
    return chosen | {"data.captions.template": "".join(places)}
