"""Change one operator, comparison, constant or condition of the source at a time; count what no test notices.

    python bench/mutants.py --count 200 --out bench/results/mutants.md

Works on a copy of the checkout. A mutant is tried by the tests of its module, then by those of its room and the golden
cases, then by all unit tests, then by those of whole runs. Each verdict is appended to `<out>.jsonl` at once; the same
command goes on after a kill. Tests run in forks of this process, which has imported the libraries: cosmic-ray starts
a Python for each mutant, and 7 s of imports would precede 2 s of tests.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "diffusion", "engine", "models", "results", "tasks")
LIBRARIES = ("torch", "numpy", "PIL", "transformers", "diffusers", "peft", "hydra", "omegaconf", "accelerate", "cv2")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
SECONDS = {"module": 240, "room": 600, "unit": 1500, "runs": 2400}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: `before` of the source at `line` is written as `after`.

    Attributes:
        file: below the package.
        digest: of the file's text, so that a verdict holds for this text alone.
        line: 1-based.
        begin: offset of the change in the file, in bytes.
        before: what stands there.
        after: what is tried in its place.
    """

    file: str
    digest: str
    line: int
    begin: int
    before: str
    after: str

    @property
    def text(self) -> str:
        """The change in one line."""
        return f"{self.file}:{self.line}: `{self.before}` -> `{self.after}`".replace("\n", " ")


def mutants_of(path: Path, package: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file; texts, annotations, messages of errors and log lines are left alone."""
    source = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(source) if byte == ord("\n"))]
    digest = hashlib.sha256(source).hexdigest()[:16]
    for node, changed in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(
            file=path.relative_to(package).as_posix(),
            digest=digest,
            line=node.lineno,
            begin=begin,
            before=source[begin:end].decode(),
            after=f"({ast.unparse(changed)})",
        )


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_log(child):
                yield from _changes(child)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield node, ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
        yield node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, ast.Constant(other)
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) or isinstance(getattr(side, "value", None), str)
               for side in (node.left, node.right))  # fmt: skip


def _is_log(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "warnings."))


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, drawn evenly over all that the rooms have."""
    package = root / "src" / "cascade_train"
    paths = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    return random.Random(seed).sample([mutant for path in paths for mutant in mutants_of(path, package)], count)


def stages(root: Path, file: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the tests of each stage, the nearest first."""
    module = Path(file)
    dotted = "cascade_train." + ".".join(module.with_suffix("").parts)
    unit = root / "tests" / "unit"
    room = unit / module.parts[0]
    named = [path for path in sorted(room.rglob("test_*.py")) if path.stem == f"test_{module.stem}"]
    using = [path for path in sorted(room.rglob("test_*.py")) if dotted in path.read_text() and path not in named]
    if near := [*named, *using]:
        yield "module", [str(path) for path in near]
    yield "room", [str(room), str(root / "tests" / "golden")]
    yield "unit", [str(unit), str(root / "tests" / "style"), "--deselect=tests/style/test_docs_commands.py"]
    yield "runs", [str(root / "tests" / name) for name in ("additions", "integration", "distributed")]


def run_tests(root: Path, tests: list[str], seconds: float) -> bool:
    """Return whether a test fails, or the time ends; the tests run in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(root)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(_status_of(tests))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return True


def _status_of(tests: list[str]) -> int:
    """Return 1 where a test fails; the process must end with it, whatever the tests raise."""
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # the libraries that this process has
    try:
        return int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "-W", imported, *tests]) not in (0, 5))
    except BaseException:
        return 1


class Judge:
    """Tries mutants in one checkout. What fails without a mutant notices nothing, and is said once."""

    def __init__(self, root: Path, last: str) -> None:
        self._root, self._last = root, last
        self._sound: dict[tuple[str, ...], bool] = {}

    def judge(self, mutant: Mutant) -> str:
        """Return the stage whose tests notice a mutant; "nobody" where none up to the last does."""
        path = self._root / "src" / "cascade_train" / mutant.file
        source = path.read_bytes()
        end = mutant.begin + len(mutant.before.encode())
        changed = source[: mutant.begin] + mutant.after.encode() + source[end:]
        for name, tests in stages(self._root, mutant.file):
            path.write_bytes(changed)
            try:
                failed = run_tests(self._root, tests, SECONDS[name])
            finally:
                path.write_bytes(source)
            if failed and self._pass_without(tests):
                return name
            if name == self._last:
                break
        return "nobody"

    def _pass_without(self, tests: list[str]) -> bool:
        key = tuple(tests)
        if key not in self._sound:
            self._sound[key] = not run_tests(self._root, tests, max(SECONDS.values()))
            if not self._sound[key]:
                print(f"fail without a mutant: {' '.join(tests)}", flush=True)
        return self._sound[key]


def page(verdicts: list[dict[str, str]], command: str, commit: str) -> str:
    """Return the table in Markdown."""
    rooms = sorted({verdict["file"].partition("/")[0] for verdict in verdicts})
    lines = [
        "# Mutants of the source", "", f"`{command}` at {commit}, {datetime.now(UTC):%Y-%m-%d}.", "",
        "One operator, comparison, constant or condition changed at a time; the first tests that fail count.", "",
        "| room | mutants | module | room and golden | all unit tests | whole runs | nobody |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for room in [*rooms, ""]:
        counts = Counter(v["by"] for v in verdicts if v["file"].startswith(room))
        cells = [counts.total(), *(counts[name] for name in (*SECONDS, "nobody"))]
        lines.append(f"| {room or 'all'} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Noticed by nobody:", "", *(f"- {v['text']}" for v in verdicts if v["by"] == "nobody"), ""]
    return "\n".join(lines)


def main() -> None:
    """Draw mutants, try those without a verdict, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--last", choices=SECONDS, default="runs", help="the last tests that a survivor is tried by")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutants.md")
    args = parser.parse_args()
    out = args.out.resolve()
    journal = out.with_suffix(".jsonl")
    seen = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    known = {(v["text"], v["digest"]): v for v in seen}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for name in filter(None, names):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        sys.path.insert(0, str(root / "src"))
        os.environ |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        os.environ |= {"MKL_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", "HF_HUB_OFFLINE": "1"}
        sys.dont_write_bytecode = True
        for library in LIBRARIES:
            __import__(library)
        judge, verdicts = Judge(root, args.last), []
        for mutant in sample(root, args.count, args.seed):
            verdict = known.get((mutant.text, mutant.digest))
            if verdict is None:
                began = time.monotonic()
                by = judge.judge(mutant)
                verdict = {**asdict(mutant), "text": mutant.text, "by": by, "seconds": round(time.monotonic() - began)}
                with journal.open("a") as file:
                    file.write(json.dumps(verdict) + "\n")
                print(f"{verdict['by']:8} {verdict['seconds']:4} s  {mutant.text}", flush=True)
            verdicts.append(verdict)
    out.write_text(page(verdicts, f"python bench/mutants.py --count {args.count} --seed {args.seed}", commit))


if __name__ == "__main__":
    main()
