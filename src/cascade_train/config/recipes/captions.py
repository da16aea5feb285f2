"""The original's `captions_getter`, a part of a sample and an expression, as keys of data.captions.

The expression is parsed, never run: what is understood is a key, texts put together, and a draw between two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

WHOLE = "txt"
"""The name, among keys, of the caption beside a picture."""

_DRAWS = {"random.random", "np.random.rand", "np.random.random", "numpy.random.rand"}
_SAME_TEXT = {"identity", "str", "json.loads"}
_NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")

Piece = tuple[str, bool]
"""A text, and whether it is a key's name rather than the text itself."""


def caption_keys(getter: Sequence[Any]) -> dict[str, Any] | None:
    """Return the keys that make the same captions; None = they cannot be expressed.

    Args:
        getter: `[txt, identity]`, `[json, captions_getter]`, or an expression such as `lambda x: x["caption"]`.
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
        """Return an expression of text as pieces.

        Raises:
            ValueError: it is another expression.
        """
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
