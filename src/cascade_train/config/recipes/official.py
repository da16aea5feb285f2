"""Stable Cascade's own training files (configs/training/*.yaml): what official.yaml leaves to code.

The expression in `captions_getter` is parsed, never run. Supported: a key, texts joined, and a draw between two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from cascade_train.config.recipes.layouts import Given
from cascade_train.config.recipes.recipe import Kind, Recipe
from cascade_train.config.recipes.table import Values, whole

FILTER_FILES = {
    "InpaintFilter": "its saliency network is task.filter.weights=saliency_model.pt; null draws holes at random",
    "IdentityFilter": "its networks are task.filter.detector=det_10g.onnx and task.filter.recogniser=w600k_r50.onnx",
    "PidiFilter": "its network is task.filter.weights=table5_pidinet.pth",
}
"""Files of the original's filters, and the keys that name them here."""


def finish_official(recipe: Recipe, laid: Given) -> None:
    """Take what ties several keys together, and what the original does by itself."""
    given = laid.keys
    is_stage_b = recipe.groups["model"].startswith("b_")
    if given.get("adaptive_loss_weight") and given.get("edm_objective"):
        recipe.put("edm_objective", {"objective.target._target_": "cascade_train.diffusion.target.VTarget"})
    if "captions_getter" in given:
        _captions(recipe, given)
    if given.get("ema_beta"):
        start = int(given.get("ema_start_iters") or 0) // whole(given, "grad_accum_steps") + 1
        recipe.put("ema_start_iters", {"ema.start_step": start, "ema.ramp": False})
    _control(recipe, given)
    _urls(recipe, given.get("webdataset_path") or [])
    steps = {"sample.steps": 10, "sample.guidance_scale": 1.5} if is_stage_b else {"sample.guidance_scale": 5.0}
    recipe.values |= steps
    _behaviour(recipe, given, is_stage_b=is_stage_b, fills=laid.fills)


def _captions(recipe: Recipe, given: Values) -> None:
    getter = given.get("captions_getter")
    keys = caption_keys(getter or ("txt", "identity"))
    if keys:
        recipe.put("captions_getter", keys)
    elif keys is not None:
        recipe.note("captions_getter", "captions are read from .txt, as here", Kind.SAME)
    else:
        why = "data.captions.key names a key of the json, or several with weights, and data.captions.template puts"
        why = f"{getter} is not taken over, and captions are read from .txt: {why} texts together"
        recipe.note("captions_getter", why)


def _control(recipe: Recipe, given: Values) -> None:
    name = given.get("controlnet_filter")
    for key, value in given.items():
        node, _, argument = key.partition(".")
        if node == "controlnet_filter_params":
            recipe.put(key, {f"task.filter.{argument.replace('thresold', 'threshold')}": value})
    if name in FILTER_FILES:
        recipe.note(f"controlnet_filter {name}", FILTER_FILES[name])
    elif name is not None and "controlnet_filter" not in recipe.taken():
        recipe.groups["filter@task.filter"] = "own"
        why = f"{name} is no filter of the original: name your class by task.filter._target_ (docs/add-a-filter.md)"
        recipe.note("controlnet_filter", why)
    if name is not None and given.get("controlnet_bottleneck_mode", "effnet") == "effnet":
        recipe.values["task.backbone_weights"] = "imagenet"


def _urls(recipe: Recipe, urls: Any) -> None:
    if isinstance(urls, str) and urls.strip().endswith(".yml"):
        recipe.drop("data.urls", f"data.urls=[...], the entries of {urls}")
    for url in [urls] if isinstance(urls, str) else urls:
        if str(url).startswith("s3:"):
            recipe.note("webdataset_path on s3", "s3:// is read through boto3, install the extra s3")
        elif str(url).startswith("http"):
            recipe.note("webdataset_path on the web", f"{url} is not read by itself: stream it through curl")


BEHAVIOURS = ("original", "ours")
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
"""The learning rates of the original's recipes are made for these first values at this scale."""


def _behaviour(recipe: Recipe, given: Values, *, is_stage_b: bool, fills: bool) -> None:
    """Set the keys that make this library do as the original, of those that the task reads, or say what they are."""
    buckets = {"data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
    several = buckets if "multi_aspect_ratio" in given else {}
    values: dict[str, Any] = {"data.replacement": True, "data.crop": "random" if several else "saliency"}
    values |= {"optimizer.decay": "all", "lr_scheduler.from_zero": True}
    values |= {"objective.noise.square_grids": True} if is_stage_b else {"model.image_encoder.antialias": False}
    values |= several
    if given.get("adaptive_loss_weight"):
        values |= {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
    values |= ADAPTERS if recipe.groups["task"] == "lora" else {}
    keys = ", ".join(f"{key}={str(value).lower()}" for key, value in values.items())
    remark = f"behaviour=ours: left to this library, docs/differences.md says why. behaviour=original sets {keys}."
    if fills:
        recipe.values |= values
        remark = (
            f"behaviour=original: set as the original trainer does, where this library does otherwise: {keys}. What has"
            " no key is in docs/differences.md. behaviour=ours leaves these to this library."
        )
    recipe.remarks.append(remark)


WHOLE = "txt"
"""The name, among keys, of the caption beside a picture."""
DRAWS = {"random.random", "np.random.rand", "np.random.random", "numpy.random.rand"}
SAME_TEXT = {"identity", "str", "json.loads"}
NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")
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
        return _keys(_options(tree.body, tree.args.args[0].arg, part))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _options(node: ast.expr, argument: str, part: str) -> list[tuple[float, list[Piece]]]:
    """Return what an expression gives, each with its probability; `a if np.random.rand() < 0.1 else b` gives two.

    `argument` is the caption's text, or, for the part json, the mapping of a sample's json.
    """
    if not isinstance(node, ast.IfExp):
        return [(1.0, _pieces(node, argument, part))]
    match node.test:
        case ast.Compare(
            left=ast.Call(args=[]) as draw,
            ops=[ast.Lt() | ast.LtE()],
            comparators=[ast.Constant(value=int() | float() as share)],
        ) if ast.unparse(draw.func) in DRAWS and 0.0 < share < 1.0:
            first, second = (_options(each, argument, part) for each in (node.body, node.orelse))
            return [(w * share, p) for w, p in first] + [(w * (1.0 - share), p) for w, p in second]
    raise ValueError(ast.unparse(node.test))


def _pieces(node: ast.expr, argument: str, part: str) -> list[Piece]:
    """Return an expression of text as pieces; a ValueError for any other."""
    match node:
        case ast.Constant(value=str(text)):
            return [(text, False)]
        case ast.BinOp(op=ast.Add()):
            return [*_pieces(node.left, argument, part), *_pieces(node.right, argument, part)]
        case ast.JoinedStr():
            return [piece for value in node.values for piece in _pieces(value, argument, part)]
        case ast.FormattedValue(conversion=-1, format_spec=None):
            return _pieces(node.value, argument, part)
    path = _path(node, argument)
    if bool(path) != (part == "json"):
        raise ValueError("a mapping is no text, and a text has no keys")
    return [(".".join(path) or WHOLE, True)]


def _path(node: ast.expr, argument: str) -> list[str]:
    """Return the keys that lead from the argument to a value."""
    match node:
        case ast.Name(id=name) if name == argument:
            return []
        case ast.Subscript(value=inner, slice=ast.Constant(value=str(key))):
            return [*_path(inner, argument), key]
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=str(key))], keywords=[]):
            return [*_path(inner, argument), key]
        case ast.Call(args=[inner], keywords=[]) if ast.unparse(node.func) in SAME_TEXT:
            return _path(inner, argument)
    raise ValueError(ast.unparse(node))


def _keys(options: list[tuple[float, list[Piece]]]) -> dict[str, Any] | None:
    """Return the keys of weighted options; None = they cannot be expressed."""
    if len(options) == 1:
        return _template(options[0][1])
    if any(len(pieces) != 1 or not pieces[0][1] for _, pieces in options):
        return None  # templates have no weights
    weights: dict[str, float] = {}
    for weight, [(key, _)] in options:
        weights[key] = round(weights.get(key, 0.0) + weight, 6)
    return {"data.captions.key": weights}


def _template(pieces: list[Piece]) -> dict[str, Any] | None:
    """Return the keys of one text, whose values include one that the template calls caption."""
    names = [text for text, is_key in pieces if is_key]
    if not names or (len(pieces) > 1 and not all(map(NAME.fullmatch, names))):
        return None
    key = "caption" if "caption" in names else names[0]
    chosen = {} if key == WHOLE else {"data.captions.key": key}
    if len(pieces) == 1:
        return chosen
    places = [
        ("{caption}" if text == key else f"{{{text}}}") if is_key else text.replace("{", "{{").replace("}", "}}")
        for text, is_key in pieces
    ]
    return chosen | {"data.captions.template": "".join(places)}
