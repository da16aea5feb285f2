"""Try the library on what its users will install next. What `make canary` runs.

Installs the newest release of every dependency, beyond our upper bounds, and pre-releases of Hydra's packages, into a
folder of its own; runs the unit tests there; and reports which failed, by the library that the failure came from.
`constraints.txt` and `.venv` stay as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import setup_venv
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = setup_venv.ROOT
CANARY = ROOT / ".canary"
PYTHON = CANARY / "bin" / "python"
REPORT = CANARY / "report.xml"
PRE_RELEASES = ("hydra-core", "omegaconf", "hydra-submitit-launcher")
OURS = "cascade_train"

_INSTALLED = re.compile(r"site-packages/([\w.-]+?)(?:\.py)?[/:]")


def newest(requirement: str) -> str:
    """Return a requirement without its upper bounds."""
    parsed = Requirement(requirement)
    parsed.specifier = SpecifierSet(",".join(str(bound) for bound in parsed.specifier if bound.operator == ">="))
    return str(parsed)


def requirements(project: dict[str, object]) -> list[str]:
    """Return what the library and its extra `dev` ask for, upper bounds left out.

    Args:
        project: the table `project` of pyproject.toml.
    """
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    found: list[str] = list(project["dependencies"])  # type: ignore[call-overload]
    wanted = ["dev"]
    for extra in wanted:
        for requirement in extras[extra]:
            own = re.fullmatch(r"cascade-train\[([\w,-]+)]", requirement)
            if own is None:
                found.append(requirement)
            else:
                wanted += own[1].split(",")
    return [newest(requirement) for requirement in found]


def install() -> None:
    """Make the folder's environment, or bring it up to date."""
    environ = setup_venv.environment()
    uv = [str(setup_venv.UV), "pip"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    early = [f"--prerelease-package={name}=allow" for name in PRE_RELEASES]
    steps = [
        [sys.executable, "-m", "venv", str(CANARY)],
        [*uv, "install", "--python", str(PYTHON), "--upgrade", *early, *requirements(project)],
        [*uv, "install", "--python", str(PYTHON), "--no-deps", "--editable", "."],
    ]
    for step in steps:
        if not setup_venv.call(step, environ):
            sys.exit("canary: the newest packages could not be installed together (the message is above)")


def changed_versions(pinned: str, installed: str) -> list[str]:
    """Return `name old -> new` for each package that differs from constraints.txt.

    Args:
        pinned: the text of constraints.txt.
        installed: what `uv pip freeze` printed.
    """
    before, after = (dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)) for text in (pinned, installed))
    return [
        f"{name} {before[name]} -> {after[name]}"
        for name in sorted(before)
        if after.get(name, before[name]) != before[name]
    ]


def culprit(traceback: str) -> str:
    """Return the library whose code a failure came out of: the last one in its traceback, else ours."""
    found = [name for name in _INSTALLED.findall(traceback) if name not in ("_pytest", "pytest", "pluggy", "xdist")]
    return found[-1] if found else OURS


def failures(report: Path) -> dict[str, list[str]]:
    """Return the tests that failed, by the library that each failure came out of."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname')}.{case.get('name')}: {(problem.get('message') or '').splitlines()[0][:160]}"
            found[culprit(problem.text or "")].append(name)
    return dict(found)


def page(changes: Iterable[str], failed: dict[str, list[str]]) -> str:
    """Return what to print: versions that differ from ours, then failures by library, the most first."""
    lines = ["Newer than constraints.txt:", *(f"  {change}" for change in changes)]
    for library, tests in sorted(failed.items(), key=lambda item: -len(item[1])):
        lines += [f"{len(tests)} failed in {library}:", *(f"  {test}" for test in tests)]
    return "\n".join(lines if failed else [*lines, "Nothing failed."])


def main() -> int:
    """Install, test, report; return the exit code of the tests."""
    install()
    REPORT.unlink(missing_ok=True)
    tests = [str(PYTHON), "-m", "pytest", "tests/unit", f"--junitxml={REPORT}", *sys.argv[1:]]
    code = subprocess.run(tests, cwd=ROOT, check=False).returncode
    freeze = [str(setup_venv.UV), "pip", "freeze", "--python", str(PYTHON)]
    installed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    if not REPORT.exists():
        sys.exit("canary: the tests did not begin (their message is above)")
    sys.stdout.write(page(changed_versions((ROOT / "constraints.txt").read_text(), installed), failures(REPORT)) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
