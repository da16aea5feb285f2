"""Change one operator, comparison, constant or condition of the source at a time; count what no test notices.

    python bench/mutants.py --count 200 --out bench/results/mutants.md

Works on a copy of the checkout. The rooms' unit tests and golden cases run there once under coverage, which records the
tests that run each line. A mutant is tried by those of its line, or of its module where that runs at import, and what
they let pass by the tests of whole runs. Each verdict is appended to `<out>.jsonl` at once; the same command goes on
after a kill. Tests run in forks of this process, which has imported the libraries: cosmic-ray starts a Python for each
mutant, and 7 s of imports would precede 2 s of tests.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import select
import shutil
import signal
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
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "diffusion", "engine", "models", "results", "tasks")
LIBRARIES = ("torch", "numpy", "PIL", "transformers", "diffusers", "peft", "hydra", "omegaconf", "accelerate", "cv2")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
SECONDS = {"lines": 900, "runs": 3600}
COVERED = (*(f"tests/unit/{room}" for room in ROOMS), "tests/golden")
RUNS = ("tests/additions", "tests/integration", "tests/distributed")


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


class Coverage:
    """The tests that run each line of the package."""

    def __init__(self, root: Path, path: Path) -> None:
        """Read `path`, which is made by running the tests of the checkout `root` where it does not exist."""
        if not path.exists():
            settings = root / "coverage.ini"
            settings.write_text("[run]\nrelative_files = true\n")
            command = [sys.executable, "-m", "pytest", "-n2", "--cov=cascade_train", "--cov-context=test"]
            command += ["--cov-report=", f"--cov-config={settings}", *COVERED]
            subprocess.run(command, cwd=root, env={**os.environ, "COVERAGE_FILE": str(path)}, check=False)
        self._root, self._data = root, CoverageData(path)
        self._data.read()
        self._of_file: dict[str, set[str]] = {}  # the tests of each file
        for context in self._data.measured_contexts() - {""}:
            test = context.rpartition("|")[0]
            self._of_file.setdefault(test.partition("::")[0], set()).add(test)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the ids of the tests that run a mutant's line, those of its module first."""
        path = f"src/cascade_train/{mutant.file}"
        contexts = self._data.contexts_by_lineno(path)
        tree = ast.parse((self._root / path).read_bytes())
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
        first = max(node.lineno for node in statements if node.lineno <= mutant.line <= node.end_lineno)
        found = {*contexts.get(mutant.line, ()), *contexts.get(first, ())} - {""}
        if not found:  # runs at import
            found = {context for each in contexts.values() for context in each} - {""}
        ids = set[str]()
        for test, _, when in (context.rpartition("|") for context in found):  # a fixture may serve a whole file
            ids |= self._of_file[test.partition("::")[0]] if when == "setup" else {test}
        stem = f"test_{Path(mutant.file).stem}"
        room = f"/{mutant.file.partition('/')[0]}/"
        return sorted(ids, key=lambda each: (stem not in each, room not in each, each))


def run_tests(root: Path, tests: list[str], seconds: float) -> str | None:
    """Return the id of the first test that fails, "time" where the time ends; run in a fork of this process."""
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(root)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.write(sends, _first_failure(tests).encode())
        os._exit(0)
    os.close(sends)
    ended, _, _ = select.select([receives], [], [], seconds)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    failed = os.read(receives, 4096).decode() if ended else "time"
    os.close(receives)
    os.waitpid(child, 0)
    return failed.removeprefix("passed") or None if failed else tests[0]  # nothing written: the process died


def _first_failure(tests: list[str]) -> str:
    """Return the id of the first test that fails, or "passed", whatever the tests raise."""
    first: list[str] = []

    class Reports:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                first.append(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                first.append(report.nodeid)

    imported = "ignore::pytest.PytestAssertRewriteWarning"  # the libraries that this process has
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-p", "no:pytest_cov", "-o", "timeout=120", "-W", imported]
    try:
        code = pytest.main([*options, *tests], plugins=[Reports()])
    except BaseException:
        return tests[0]
    return first[0] if first else "passed" if code in (0, 5) else tests[0]


class Judge:
    """Tries mutants in one checkout. A test that fails without a mutant, too, is said once and not asked again."""

    def __init__(self, root: Path, coverage: Coverage, last: str) -> None:
        self._root, self._coverage, self._last = root, coverage, last
        self._passes_alone: dict[str, bool] = {}

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Return the stage whose tests notice a mutant, and the first of them; "nobody" where none does."""
        for name, tests in {"lines": self._coverage.tests(mutant), "runs": list(RUNS)}.items():
            if test := self._notices(mutant, tests, SECONDS[name]):
                return name, test
            if name == self._last:
                break
        return "nobody", ""

    def _notices(self, mutant: Mutant, tests: list[str], seconds: float) -> str:
        path = self._root / "src" / "cascade_train" / mutant.file
        source = path.read_bytes()
        end = mutant.begin + len(mutant.before.encode())
        while tests := [each for each in tests if self._passes_alone.get(each, True)]:
            path.write_bytes(source[: mutant.begin] + mutant.after.encode() + source[end:])
            try:
                failed = run_tests(self._root, tests, seconds)
            finally:
                path.write_bytes(source)
            if failed is None:
                break
            if failed == "time":
                return "" if run_tests(self._root, tests, seconds) == "time" else "the time of its tests"
            if failed not in self._passes_alone:
                self._passes_alone[failed] = run_tests(self._root, [failed], seconds) is None
            if self._passes_alone[failed]:
                return failed
            print(f"fails without a mutant: {failed}", flush=True)
            tests = [each for each in tests if each != failed] if failed in tests else [*tests, f"--deselect={failed}"]
        return ""


def page(verdicts: list[dict[str, str]], command: str, commit: str) -> str:
    """Return the table in Markdown."""
    rooms = sorted({verdict["file"].partition("/")[0] for verdict in verdicts})
    lines = [
        "# Mutants of the source", "", f"`{command}` at {commit}, {datetime.now(UTC):%Y-%m-%d}.", "",
        "One operator, comparison, constant or condition changed at a time; the first tests that fail count.", "",
        "| room | mutants | unit tests and golden cases | whole runs | nobody |", "|---|---|---|---|---|",
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
    parser.add_argument("--coverage", type=Path, default=Path("mutants.coverage"), help="made where it does not exist")
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
        judge, verdicts = Judge(root, Coverage(root, args.coverage.resolve()), args.last), []
        for mutant in sample(root, args.count, args.seed):
            verdict = known.get((mutant.text, mutant.digest))
            if verdict is None:
                began = time.monotonic()
                by, test = judge.judge(mutant)
                verdict = {**asdict(mutant), "text": mutant.text, "by": by, "test": test}
                verdict["seconds"] = round(time.monotonic() - began)
                with journal.open("a") as file:
                    file.write(json.dumps(verdict) + "\n")
                print(f"{verdict['by']:8} {verdict['seconds']:4} s  {mutant.text}", flush=True)
            verdicts.append(verdict)
    out.write_text(page(verdicts, f"python bench/mutants.py --count {args.count} --seed {args.seed}", commit))


if __name__ == "__main__":
    main()
