"""Micro-batches and savings of memory are chosen by predicted peaks, and no start is refused for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.assembly.planning import devices, memory, strategies
from cascade_train.assembly.planning.devices import HOST_USABLE, USABLE, Budget, free_host_bytes
from cascade_train.assembly.planning.memory import Memory, changed, layout_of, memory_of, over_ranks
from cascade_train.assembly.planning.memory_trace import MemoryTrace
from cascade_train.assembly.planning.strategies import EXACT, MICRO, ROUNDING, Values, choose, chosen, free_gb, savings
from cascade_train.distributed import sharded
from cascade_train.errors import ConfigError
from tests.integration.runs import SMALL
from tests.unit.config.composing import checked

pytestmark = pytest.mark.slow

TINY = ("model=c_tiny", "model.image_size=512", "data=shapes", "train.global_batch_size=16", "train.precision=bf16")
LARGE = Budget(gb=80)
TRACED: dict[str, tuple[Memory, MemoryTrace]] = {}
"""Of these tests, whose units are gathered alone."""


@pytest.fixture(autouse=True)
def _gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_TRACED", TRACED)
    monkeypatch.setattr(sharded, "GATHERED_AT_ONCE_BYTES", 0)  # so that the tiny model's units are those of a real one


def budget_for(cfg: DictConfig, micro: int, *kept: str, on_cuda: bool = True) -> Budget:
    """Return a device that a micro-batch just fits."""
    whole, _ = memory_of(cfg, on_cuda=on_cuda)
    need = whole.total(micro, max(1, cfg.train.global_batch_size // micro))
    return Budget(gb=need * 1.0001 / (USABLE if on_cuda else HOST_USABLE) / 1e9, on_cuda=on_cuda, kept=kept)


def test_auto_is_the_largest_micro_batch_that_divides_and_fits():
    cfg = checked(*TINY, "task=finetune", "train.micro_batch_size=auto")
    assert cfg.train.micro_batch_size == "auto"
    choice = choose(cfg, budget_for(cfg, 4))
    assert (choice.values, choice.fits) == ({MICRO: 4}, True)
    choice = choose(cfg, Budget(gb=0.01))
    assert (choice.values, choice.fits) == ({MICRO: 1}, False)


def test_the_first_strategy_that_fits_is_taken():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "optimizer.algorithm.betas=[0.8,0.9]", "memory=24gb")
    exact = {"ema.device": "cpu", "activation_checkpointing": True}
    small = savings(cfg, LARGE)["optimizer.algorithm"]
    assert small == {**checked(*TINY, "task=finetune", "optimizer=adamw_8bit").optimizer.algorithm, "betas": [0.8, 0.9]}
    assert choose(cfg, LARGE).values == {MICRO: 16}
    cases: tuple[tuple[Values, int], ...] = (
        (exact, 4),
        ({**exact, "optimizer.algorithm": small}, 1),
        ({**exact, "optimizer.algorithm": small, "train.master_weights": "bf16"}, 1),
        ({**exact, "parallel.cpu_offload": True}, 1),
    )
    for values, micro in cases:
        gb = budget_for(changed(cfg, values), micro).gb
        choice = choose(changed(cfg, {"memory.budget_gb": gb}), LARGE)
        assert (choice.values, choice.fits) == ({**values, MICRO: micro}, True)
    offloaded = budget_for(changed(cfg, cases[-1][0]), 1)
    choice = choose(changed(cfg, {"memory.budget_gb": "auto"}), replace(offloaded, host_gb=0.001))
    assert (choice.fits, "parallel.cpu_offload" in choice.values) == (False, False), "a host that is too small"


def test_what_the_command_line_sets_stays():
    cfg = checked(*TINY, "task=finetune", "memory=auto", "train.micro_batch_size=8", "activation_checkpointing=false")
    budget = budget_for(changed(cfg, {"activation_checkpointing": True}), 4)
    assert choose(cfg, budget).values == {"activation_checkpointing": True, MICRO: 4}
    kept = (MICRO, "activation_checkpointing", "optimizer.algorithm.betas", "parallel.cpu_offload")
    choice = choose(cfg, replace(budget, gb=budget.gb / 2, kept=(*kept, "train.master_weights")))
    assert (choice.values, choice.fits) == ({MICRO: 8}, False)


def test_savings_that_the_run_would_refuse_are_not_tried():
    keys = {}
    for name, overrides in {
        "previewer": ("task=reconstruction", "model=c_tiny", "objective=preview"),
        "lora": ("task=lora", "model=c_tiny"),
        "came": ("task=finetune", "model=c_tiny", "optimizer=came"),
        "amsgrad": ("task=finetune", "model=c_tiny", "+optimizer.algorithm.amsgrad=true"),
        **{name: ("task=finetune", "model=c_tiny", f"optimizer={name}") for name in ("adafactor", "lion", "muon")},
    }.items():
        keys[name] = set(savings(checked(*overrides, "train.precision=bf16", "memory=auto"), LARGE))
    recomputed, rounded, offloaded = EXACT[1], ROUNDING[2], "parallel.cpu_offload"
    assert keys["previewer"] == {"optimizer.algorithm", offloaded}
    assert keys["lora"] == {recomputed, "train.base_weights", "optimizer.algorithm", offloaded}
    assert keys["came"] == {recomputed}
    assert keys["amsgrad"] == keys["lion"] == {recomputed, rounded, offloaded}
    assert keys["adafactor"] == {recomputed, rounded}
    assert keys["muon"] == {recomputed, offloaded}


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [(("task=finetune",), "train.micro_batch_size=2 fits"), (("task=lora", "memory.budget_gb=0.61"), "memory=auto")],
)
def test_a_start_that_does_not_fit_is_warned_of_with_what_does(overrides: tuple[str, ...], remedy: str, caplog):
    cfg = checked(*TINY, *overrides)
    chosen(cfg, budget_for(cfg, 2) if "task=finetune" in overrides else LARGE)
    assert "may not fit" in caplog.text
    assert remedy in caplog.text


def test_a_run_that_continues_keeps_what_it_chose(tmp_path: Path):
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto", f"run.dir={tmp_path / 'run'}")
    bound = {"optimizer.algorithm": savings(cfg, LARGE)["optimizer.algorithm"], "train.master_weights": "bf16"}
    before = {"ema.device": "cpu", "activation_checkpointing": True, **bound, MICRO: 8}
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    OmegaConf.save(changed(cfg, before), tmp_path / "run/config.yaml")
    assert chosen(cfg, LARGE) == {MICRO: 16}, "no checkpoint: chosen anew"
    (tmp_path / "run/checkpoints/step_2").mkdir()
    for budget in (LARGE, budget_for(changed(cfg, before), 1)):
        assert chosen(cfg, budget).items() >= before.items()
    other = chosen(changed(cfg, {"memory.budget_gb": 48.0}), LARGE)
    assert other == {**bound, "train.base_weights": None, MICRO: 16}, "what binds its checkpoints"


def test_split_weights_are_divided_where_the_mode_does_it():
    cfg = checked(*TINY, "task=finetune", "train.micro_batch_size=2", ranks=4)
    alone, _ = memory_of(cfg)
    needs = {}
    whole_modes = ("ddp", True), ("auto", True)
    for mode, offloaded in (("ddp", False), ("fsdp", False), ("auto", False), ("hsdp", False), *whole_modes):
        other = changed(cfg, {"parallel.mode": mode, "parallel.cpu_offload": offloaded})
        needs[mode, offloaded] = layout_of(other, Budget(gb=24, ranks=4, machine_ranks=2)).total(2)
    assert needs["ddp", False] == needs["auto", False] == alone.total(2)
    assert needs["ddp", True] == needs["auto", True] > alone.gathered, "offloaded weights are gathered to compute"
    assert needs["fsdp", False] == alone.over(4).total(2) < needs["hsdp", False] == alone.over(2).total(2)
    assert over_ranks(cfg, alone, 4, machine_ranks=4, device_gb=0.001).total(2) == needs["fsdp", False]


def test_a_rank_has_its_share_of_what_is_free_on_its_host():
    free = free_host_bytes()
    assert 10**8 < free < 2**50
    assert free_gb(torch.device("cpu"), 4)[0] == pytest.approx(free / 4e9, rel=0.2)


def test_the_limit_of_a_job_is_that_of_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a step of SLURM, whose limit lies below the root of the groups that the process sees."""
    monkeypatch.setattr(devices, "Path", lambda path: tmp_path / path.lstrip("/"))

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write("proc/self/cgroup", "1:cpu:/elsewhere\n0::/slurm/job_1/step_0\n")
    assert free_host_bytes() == 8000 * 1024
    for group, most in (("", "7000000"), ("slurm/job_1/", "5000"), ("slurm/job_1/step_0/", "max")):
        write(f"sys/fs/cgroup/{group}memory.max", f"{most}\n")
        write(f"sys/fs/cgroup/{group}memory.current", "3000\n")
        write(f"sys/fs/cgroup/{group}memory.stat", "anon 5\ninactive_file 200\n")
    assert free_host_bytes() == 5000 - 3000 + 200
    write("proc/self/cgroup", "0::/\n")
    assert free_host_bytes() == 7000000 - 3000 + 200, "inside of a container's namespace"


def test_a_run_has_the_number_that_was_chosen_and_a_resume_the_first(tmp_path: Path, monkeypatch, caplog):
    cfg = checked(*SMALL, *SMALL_NETWORK, "task=finetune", "train.micro_batch_size=auto")
    free = iter([budget_for(cfg, 2, on_cuda=False).gb, 60.0])
    monkeypatch.setattr(strategies, "free_gb", lambda *_: (next(free), 60.0))
    own = ("train.micro_batch_size=auto", "log.every_steps=1", f"run.dir={tmp_path / 'run'}")
    for steps in (2, 3):
        with caplog.at_level("INFO"):
            assert launch([*SMALL, *SMALL_NETWORK, "task=finetune", *own, f"train.max_steps={steps}"]) == 0
        saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert saved["train"]["micro_batch_size"] == 2
    assert "train.micro_batch_size=2: 0.0" in caplog.text
    assert "GB by its computed peak, of 60.0 GB (computed" in caplog.text


def test_a_start_that_nothing_fits_trains_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(strategies, "free_gb", lambda *_: (0.001, 60.0))
    own = (*SMALL, *SMALL_NETWORK, "task=finetune", "train.max_steps=1")
    assert launch([*own, "train.micro_batch_size=auto", f"run.dir={tmp_path / 'run'}"]) == 0
    assert "may not fit" in caplog.text
    monkeypatch.setattr(strategies, "chosen", None)
    assert launch([*own, f"run.dir={tmp_path / 'plain'}"]) == 0, "on a CPU nothing is computed that nobody asked for"


def test_a_training_that_cannot_be_traced_starts_unless_a_choice_is_asked_for(monkeypatch, caplog):
    def reads_a_value(cfg: DictConfig, budget: Budget) -> Memory:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    caplog.set_level("INFO")
    monkeypatch.setattr(strategies, "layout_of", reads_a_value)
    assert chosen(checked(*TINY, "task=lora"), LARGE) == {}
    assert "is not predicted (RuntimeError: Tensor.item() cannot be called on meta tensors)" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot be predicted \(RuntimeError: .* Set train\.micro_batch_size"):
        chosen(checked(*TINY, "task=lora", "train.micro_batch_size=auto"), LARGE)
