"""Make `.venv` and install `.[dev]` into it, pinned by constraints.txt. What `make setup` runs.

Standard library only: this file runs before anything is installed. An interrupted set-up is repaired by
the next call; a finished one is recognised by its stamp, without starting any tool.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
STAMP = VENV / ".installed"
UNFINISHED = VENV / ".unfinished"
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup_venv.py")
OLDEST_PYTHON = (3, 11)

# Where pip has an index and uv has none, uv is given pip's. Not pip's extra indexes and wheel folders: a
# CPU-only torch from there beside a CUDA-built torchvision from the main index fails on import.
UV_NAME_OF_PIP_OPTION = {
    "index-url": "UV_DEFAULT_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")

# Half of all bytes: tests of packages, and folders of which a run imports a few modules, which Python compiles then.
SELDOM_IMPORTED = (
    r"site-packages/(.*/)?(tests?|testing|moto/(?!core|s3|utilities)[a-z0-9_]+|transformers/models/(?!auto|clip)[a-z0-9_]+"
    r"|diffusers/(modular_)?pipelines|networkx/algorithms|pygments/lexers|sympy/physics|mypyc?|pip)/"
)

IMPORT_BOTH = """
import torch, torchvision
box = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
torchvision.ops.nms(box, torch.ones(1), 0.5)
"""

MISMATCH = """
torch and torchvision are installed but do not work together. They must come from the same index: a CPU-only torch
beside a CUDA-built torchvision (or the reverse) fails on import. Point uv at one index that has both, for example
    UV_TORCH_BACKEND=cpu make setup        (or cu130, or auto)
and see that no UV_FIND_LINKS, UV_INDEX or uv.toml adds a second source of torch.
"""


def stamp() -> str:
    """Return what a finished set-up of this checkout, in this place, from these files, is known by."""
    parts = [str(ROOT), *(hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in INPUTS)]
    return "\n".join(parts) + "\n"


def uv_environment(environ: Mapping[str, str], pip_options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for uv: the user's own, completed by pip's main index where uv has no setting.

    Args:
        environ: the environment of this process.
        pip_options: pip's settings by option name, as `pip config list` gives them.
    """
    own_index = any(environ.get(name) for name in UV_INDEX_VARIABLES)
    found = {
        variable: pip_options[option]
        for option, variable in UV_NAME_OF_PIP_OPTION.items()
        if option in pip_options and not (option == "index-url" and own_index)
    }
    return {**found, **environ}


def pip_options_from_listing(listing: str) -> dict[str, str]:
    """Return option -> value from the text of `pip config list`; the environment's `:env:` lines win."""
    options: dict[str, str] = {}
    own: dict[str, str] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            section, _, option = key.rpartition(".")
            (own if section == ":env:" else options)[option] = str(ast.literal_eval(value))
    return {**options, **own}


def call(command: list[str], environ: Mapping[str, str] | None = None) -> bool:
    """Run a command in the checkout with its output shown; return whether it succeeded."""
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0


def works(command: list[str]) -> bool:
    """Return whether a command runs and succeeds, without showing its output."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def environment() -> dict[str, str]:
    """Return the environment for uv on this machine, with the settings of its pip."""
    listing = subprocess.run(
        [str(PYTHON), "-m", "pip", "config", "list"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return uv_environment(os.environ, pip_options_from_listing(listing.stdout))


def make_venv() -> None:
    """Make `.venv` where it is missing, broken, too old, half installed, or made for a checkout in another place."""
    check = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    moved = STAMP.exists() and STAMP.read_text().splitlines()[0] != str(ROOT)
    usable = works([str(PYTHON), "-c", check]) and works([str(PYTHON), "-m", "pip", "--version"])
    if usable and not moved and not UNFINISHED.exists():
        return
    if not call([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit("setup: python3 -m venv failed; on Debian and Ubuntu install the package python3-venv first")


def bootstrap_uv() -> None:
    """Install uv into `.venv` with its own pip, from the user's index."""
    if works([str(UV), "--version"]):
        return
    arguments = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", "constraints.txt"]
    if not call([str(PYTHON), *arguments, "--force-reinstall", "uv"]):
        sys.exit("setup: pip could not install uv; is the package index reachable (PIP_INDEX_URL, pip.conf)?")


def install(environ: Mapping[str, str]) -> None:
    """Install `.[dev]` editable: first see that it can be done, so that a refusal leaves `.venv` as it was."""
    pins = ["--constraints", "constraints.txt", "--build-constraints", "constraints.txt"]
    command = [str(UV), "pip", "install", "--python", str(PYTHON), *pins, "--editable", ".[dev]"]
    refused = "setup: uv could not install the packages (its message is above); `make setup` tries again"
    if not call([*command, "--dry-run", "--quiet"], environ):
        sys.exit(refused)
    STAMP.unlink(missing_ok=True)
    UNFINISHED.touch()
    if not call(command, environ):
        sys.exit(refused)


def compile_bytecode() -> None:
    """Compile what runs import, on every core, so that no later start does; templates that are no Python stay."""
    quietly = ["-W", "ignore", "-m", "compileall", "-qq", "-j", "0", "-x", SELDOM_IMPORTED]
    call([str(PYTHON), *quietly, *map(str, VENV.glob("lib/python*/site-packages"))])


def check_torch(environ: Mapping[str, str]) -> None:
    """Import torch and torchvision together once; lay both down again where that fails, then give up loudly."""
    if works([str(PYTHON), "-c", IMPORT_BOTH]):
        return
    sys.stderr.write("setup: torch and torchvision do not work together; installing both again\n")
    pins = ["--constraints", "constraints.txt", "--reinstall", "--no-deps", "torch", "torchvision"]
    call([str(UV), "pip", "install", "--python", str(PYTHON), *pins], environ)
    if not call([str(PYTHON), "-c", IMPORT_BOTH]):
        sys.exit(f"setup: {MISMATCH.strip()}")


def main() -> None:
    """Bring `.venv` up to date; return at once when it is."""
    if STAMP.exists() and STAMP.read_text() == stamp() and PYTHON.exists():
        return
    make_venv()
    bootstrap_uv()
    environ = environment()
    install(environ)
    compile_bytecode()
    check_torch(environ)
    UNFINISHED.unlink(missing_ok=True)
    STAMP.write_text(stamp())


if __name__ == "__main__":
    main()
