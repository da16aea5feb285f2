"""What the library imports is declared by the project: nothing is there only because another package needs it."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from typing import Any

import pytest

from tests.style.source import ROOT, library

EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "fsspec": "fsspec",
    **{name: name for name in ("aim", "clearml", "dvclive", "swanlab", "trackio", "wandb")},
    "comet_ml": "comet",
    "mlflow": "mlflow",
    "xformers": "xformers",
    "tensorboard": "tensorboard",
    "cv2": "filters",
    "pyarrow": "parquet",
    "pytorch_optimizer": "optimizers",
    "onnxruntime": "filters",
    "torch_fidelity": "metrics",
    "torchmetrics": "metrics",
}
"""Libraries that are imported only when chosen -> the extra that brings them."""

DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}
"""Where a library that may not be installed has another name than its distribution."""

BROUGHT = {"triton": "torch", "psutil": "accelerate"}
"""Libraries that a dependency brings: torch's own wheels where they have it, accelerate always."""


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    """Return the normalised names of distributions in a list of requirements."""
    return {normal(re.split(r"[\s<>=!~\[;]", each, maxsplit=1)[0]) for each in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


distributions_of = cache(packages_distributions)
"""Package -> the distributions that hold it: read once, since it looks at every installed file."""


@cache
def imported() -> dict[str, list[str]]:
    """Return package -> the places of the library that import it, without the standard library and ourselves."""
    found: dict[str, list[str]] = {}
    for file in library():
        for module, line in file.imports():
            package = module.partition(".")[0]
            if package not in {*sys.stdlib_module_names, "cascade_train"}:
                found.setdefault(package, []).append(f"{file.name}:{line}")
    return found


def test_every_import_is_a_declared_dependency() -> None:
    declared = names(project()["dependencies"])
    distributions = distributions_of()
    assert len(imported()) >= 15
    assert imported().keys() - EXTRAS.keys() - BROUGHT.keys() <= distributions.keys()
    assert set(BROUGHT.values()) <= declared
    undeclared = {
        package: places
        for package, places in imported().items()
        if package not in EXTRAS | BROUGHT and not {normal(d) for d in distributions[package]} & declared
    }
    assert not undeclared


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_what_is_imported_on_demand_is_an_extra(package: str) -> None:
    brought_by = {normal(d) for d in distributions_of().get(package, [DISTRIBUTIONS.get(package, package)])}
    assert brought_by & names(project()["optional-dependencies"][EXTRAS[package]])
