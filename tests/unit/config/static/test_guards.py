"""What constructors refuse is refused from their source, before torch is imported."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_train.config.static.expressions import UNKNOWN
from cascade_train.config.static.guards import refusal
from cascade_train.config.static.signatures import definition_chain
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked

SOURCE = '''
from dataclasses import dataclass, field
from cascade_train.errors import ConfigError
CHOICES = ("a", "b")

def check(key, value, low=0.0):
    """Refuse."""
    if not value > low:
        raise ConfigError(f"{key}={value} must be above {low:g}")

class Base:
    def __init__(self, share, rest=1):
        for key, value in (("share", share), ("rest", rest)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key}={value!r} is a share")

class Whole(Base):
    def __init__(self, *, rank, share, choice="a", size=None, other=None, opened=0):
        super().__init__(share)
        rank = int(rank)
        if rank < 1:
            raise ValueError(f"rank={rank} is small")
        if size is not None and size % 2:
            raise ValueError(f"size={size}: one of {', '.join(CHOICES)}")
        if (size is None) != (other is None):
            raise ValueError("size and other belong together")
        if choice not in CHOICES:
            raise ValueError(f"choice={choice}")
        opened = open(opened)
        if opened < 0:
            raise ValueError("not known here")
        check("share", share, low=-1)
        check("size", 2 if size is None else size)

@dataclass
class Fields:
    lr: float
    names: tuple = ("lr", "decay")
    decay: float = 0.5
    made: list = field(default_factory=list)

    def __post_init__(self):
        self._check()
        self.lr = self.lr * unknown()
        if self.lr > 10:
            raise ValueError("stale")
        if not self.made:
            raise ValueError("not known here")

    def _check(self):
        for name in self.names:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
'''


ACCEPTED = """
from dataclasses import dataclass
KINDS = ["a"]
KINDS.append("b")
def fill(names):
    names.append("b")

class Continue:
    def __init__(self, names):
        for name in names:
            if name in ("a", "b"):
                continue
            raise ValueError(f"names={name} is unknown")

class Append:
    def __init__(self, sizes):
        even = []
        for size in sizes:
            if size % 2 == 0:
                even.append(size)
        if not even:
            raise ValueError(f"sizes={sizes}: none is even")

class Sort:
    def __init__(self, names):
        rest = list(names)
        rest.sort()
        if rest[0] != "a":
            raise ValueError("first")

class Load:
    def __init__(self, path):
        self.loaded = None
        self.load(path)
        if self.loaded is None:
            raise ValueError(f"path={path}: nothing loaded")

    def load(self, path):
        self.loaded = path

class LoadByHelp(Load):
    def load(self, path):
        vars(self)["loaded"] = path

class Low:
    def __init__(self, share):
        self.share = share
        self.check()

    def check(self):
        if self.share > 1:
            raise ValueError(f"share={self.share} is above 1")

class Override(Low):
    def check(self):
        if self.share > 10:
            raise ValueError(f"share={self.share} is above 10")

class Two:
    def __init__(self, low=0.0, high=1.0):
        if low >= high:
            raise ValueError(f"low={low} must be below high={high}")

class Rest(Two):
    def __init__(self, low, **rest):
        super().__init__(low, **rest)

class Grown:
    def __init__(self, kind):
        known = ["a"]
        known += ["b"]
        if kind not in known:
            raise ValueError("unknown")

class Constant:
    def __init__(self, kind):
        if kind not in KINDS:
            raise ValueError("unknown")

class Filled:
    def __init__(self, kind):
        known = ["a"]
        fill(known)
        if kind not in known:
            raise ValueError("unknown")

class Builtin:
    def __init__(self, max):
        if max is not None:
            raise ValueError("max is given")

class Caught:
    def __init__(self, size):
        try:
            if size < 0:
                raise ValueError("negative")
        except ValueError:
            size = 0

class Setter:
    def __init__(self, size):
        self.half = None
        self.size = size
        if self.half is None:
            raise ValueError("unset")

    size = property(lambda self: 2 * self.half, lambda self, size: setattr(self, "half", size / 2))

@dataclass
class Replaced(Two):
    low: float
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "guarded.py").write_text(SOURCE)
    (tmp_path / "accepting.py").write_text(ACCEPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "accepting", raising=False)
    return lambda name, **given: refusal(definition_chain(name if "." in name else f"guarded.{name}"), given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"rank": 0}, "rank=0 is small"),
        ({"rank": UNKNOWN, "size": 3, "other": 1}, "size=3: one of a, b"),
        ({"share": 2}, "share=2 is a share"),
        ({"choice": "c"}, "choice=c"),
        ({"size": 2}, "size and other belong together"),
        ({"size": 2, "other": UNKNOWN}, None),
        ({"size": 0, "other": 1}, "size=0 must be above 0"),
        ({"size": "x", "other": 1}, None),
    ],
)
def test_the_checks_of_a_constructor_are_evaluated(made, given, said):
    assert made("Whole", **{"rank": 4, "share": 0.5, **given}) == said


@pytest.mark.parametrize(
    ("given", "said"), [({"lr": 1}, None), ({"lr": -1}, "lr=-1 is negative"), ({"lr": 20, "decay": 0}, None)]
)
def test_the_checks_of_a_dataclass_are_evaluated_and_what_changed_is_unknown(made, given, said):
    assert made("Fields", **given) == said


def test_a_function_is_checked_like_a_constructor(made):
    assert made("check", key="k", value=-1) == "k=-1 must be above 0"
    assert made("check", key="k", value=1) is None


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Continue", {"names": ["a", "b"]}),
        ("Append", {"sizes": [2, 3]}),
        ("Sort", {"names": ["b", "a"]}),
        ("Load", {"path": "x"}),
        ("LoadByHelp", {"path": "x"}),
        ("Override", {"share": 5}),
        ("Rest", {"low": 2.0, "high": 3.0}),
        ("Grown", {"kind": "b"}),
        ("Constant", {"kind": "b"}),
        ("Filled", {"kind": "b"}),
        ("Builtin", {"max": None}),
        ("Caught", {"size": -1}),
        ("Setter", {"size": 4}),
        ("Replaced", {"low": 2.0}),
    ],
)
def test_what_a_constructor_accepts_is_not_refused(made, name, given):
    unknown = dict.fromkeys(given, UNKNOWN)
    assert made(f"accepting.{name}", **given) is None
    assert made(f"accepting.{name}", **unknown) is None
    constructor = getattr(importlib.import_module("accepting"), name)
    assert isinstance(constructor(**given), constructor)


def test_an_override_is_what_is_evaluated(made):
    assert made("accepting.Override", share=11) == "share=11 is above 10"


REFUSED = {
    "optimizer.lr=-1": r"^optimizer\.lr=-1 must be positive",
    "optimizer.weight_decay=-1": r"^optimizer\.weight_decay=-1 must be 0 or more",
    "optimizer.algorithm.eps=-1": r"^optimizer\.algorithm: Invalid epsilon value: -1",
    "optimizer.algorithm.betas=[2.0,0.9]": r"^optimizer\.algorithm: Invalid beta parameter at index 0",
    "lr_scheduler.warmup_steps=-1": r"^lr_scheduler\.warmup_steps=-1 must be 0 or more",
    "lr_scheduler=cosine lr_scheduler.min_factor=2": r"^lr_scheduler\.min_factor=2",
    "task.rank=0": r"^task\.rank=0: an adapter needs",
    "task.alpha=0": r"^task\.alpha=0: ",
    "task.dropout=1": r"^task\.dropout=1: ",
    "task.cond_drop_prob=2": r"^task\.cond_drop_prob=2: is a share",
    "task.train_tokens=[]": r"^task\.train_tokens=\[\]: names no token",
    "data.samples=0": r"^data\.samples=0 must be at least 1",
    "data.flip_prob=3": r"^data\.flip_prob=3 must lie between 0 and 1",
    "data.max_file_mib=0": r"^data\.max_file_mib=0 must be at least 1",
    "data.num_workers=-1": r"^data\.num_workers=-1",
    "data.buckets.multiple_px=0": r"^data\.buckets\.multiple_px=0",
    "data.captions.tags.keep_first=-1": r"keep_first=-1",
    "objective.schedule.s=7": r"^objective\.schedule\.s=7 must lie in",
    "objective.timestep_bias.portion=-1": r"^objective\.timestep_bias\.portion=-1 must",
    "objective.offset_noise=-1": r"^objective\.offset_noise=-1 must lie in",
    "task=reconstruction model=b_tiny task.cond_drop_prob=2": r"^task\.cond_drop_prob=2: is a share",
    "task=reconstruction model=a_tiny objective=vqgan objective.codebook_weight=-1": r"^objective\.codebook_weight=-1",
    "data=parquet data.path=a.parquet data.width_column=w": r"^data\.width_column and data\.height_column belong",
    "data=regularised data.share=1.5": r"^data\.share=1.5 must lie between 0 and 1",
    "task=controlnet task.control_drop_prob=2": r"^task\.control_drop_prob=2: is a share",
    "task=controlnet task.filter.low=300": r"^task\.filter\.low=300",
    "task=controlnet task.blocks=[1,1]": r"^task\.blocks=\[1, 1\]: names no block, or one twice",
}


@pytest.mark.parametrize("line", REFUSED)
def test_values_out_of_range_are_refused_by_preflight(line: str):
    with pytest.raises(ConfigError, match=REFUSED[line]):
        checked("task=lora", "model=c_tiny", *line.split())


def test_a_refusal_imports_no_torch(tmp_path: Path):
    code = (
        "import sys\nfrom cascade_train.__main__ import launch\n"
        "assert launch(['task=lora', 'model=c_tiny', 'task.rank=0']) == 2\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "task.rank=0: an adapter needs at least one column, give 1 or more\n"
