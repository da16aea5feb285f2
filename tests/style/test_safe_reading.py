"""Nothing that reads a file from elsewhere can be made to run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.style.source import SourceFile, library

FORBIDDEN = {
    "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads",
    "joblib.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.jit.load",
    "tempfile.mktemp", "tar.extract", "tar.extractall", "archive.extract", "archive.extractall",
}  # fmt: skip
DEMANDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def calls(file: SourceFile) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(file.tree) if isinstance(node, ast.Call))


def fault(call: ast.Call) -> str | None:
    """Return what is wrong with a call; None = nothing."""
    name = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in FORBIDDEN:
        return f"{name} runs or writes what a file says"
    if name in DEMANDED and given.get(DEMANDED[name][0]) != str(DEMANDED[name][1]):
        return f"{name} without {DEMANDED[name][0]}={DEMANDED[name][1]}"
    if given.get("trust_remote_code", "False") != "False":
        return "trust_remote_code runs code of the hub"
    shell = given.get("shell", "False") != "False"
    return "shell=True" if shell else None


def test_no_file_is_read_in_a_way_that_runs_it() -> None:
    found = [(file, call) for file in library() for call in calls(file)]
    assert len(found) > 3000
    assert sum(ast.unparse(call.func) in DEMANDED for _, call in found) >= 4
    broken = [f"{file.name}:{call.lineno} {fault(call)}" for file, call in found if fault(call)]
    assert not broken, "\n".join(broken)


WRONG = (
    "eval('1')",
    "torch.load(f)",
    "torch.load(f, weights_only=False)",
    "np.load(f)",
    "run(a, shell=True)",
    "AutoModel.from_pretrained(a, trust_remote_code=True)",
    "pickle.loads(b)",
    "yaml.load(t, Loader=L)",
)


def test_the_rules_find_what_they_forbid() -> None:
    for text in WRONG:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert fault(call), text
