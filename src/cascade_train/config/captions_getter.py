"""The original's `captions_getter` as keys of data.captions.

The expression is parsed, never run. Supported: a key, texts joined, and a draw between two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

WHOLE = "txt"
"""The name, among keys, of the caption beside a picture."""
DRAWS = {"random.random", "np.random.rand", "np.random.random", "numpy.random.rand"}
SAME_TEXT = {"identity", "str", "json.loads"}
NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")
Piece = tuple[str, bool]
"""A text, and whether it is a key's name rather than the text itself."""


def caption_keys(getter: Sequence[Any]) -> dict[str, Any] | None:
    """Keys that make the same captions; None = they cannot be expressed.

    `getter` is `[txt, identity]`, `[json, captions_getter]`, or an expression such as `lambda x: x["caption"]`.
    """
    part, expression = (str(text).strip() for text in getter) if len(getter) == 2 else ("", "")
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
    """What an expression gives, with probabilities; `a if np.random.rand() < 0.1 else b` gives two.

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
            first, second = (_options(body, argument, part) for body in (node.body, node.orelse))
            return [(w * share, p) for w, p in first] + [(w * (1.0 - share), p) for w, p in second]
    raise ValueError(ast.unparse(node.test))


def _pieces(node: ast.expr, argument: str, part: str) -> list[Piece]:
    """An expression of text as pieces; a ValueError for any other."""
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
    """The keys that lead from the argument to a value."""
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
    """The keys of weighted options; None = they cannot be expressed."""
    if len(options) == 1:
        return _template(options[0][1])
    if any(len(pieces) != 1 or not pieces[0][1] for _, pieces in options):
        return None  # templates have no weights
    weights: dict[str, float] = {}
    for weight, [(key, _)] in options:
        weights[key] = round(weights.get(key, 0.0) + weight, 6)
    return {"data.captions.key": weights}


def _template(pieces: list[Piece]) -> dict[str, Any] | None:
    """The keys of one text, whose values include one that the template calls caption."""
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
