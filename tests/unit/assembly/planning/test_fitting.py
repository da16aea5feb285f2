"""Micro-batches and savings of memory are chosen by computed peaks, and no start is refused for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.assembly.planning import devices, fitting, memory
from cascade_train.assembly.planning.devices import HOST_USABLE, USABLE, Budget, free_host_bytes
from cascade_train.assembly.planning.fitting import (
    _of_8_bits,
    change,
    changed,
    choose,
    choose_or_skip,
    exact_savings,
    free_gb,
    offloading,
    remedy,
    rounding_savings,
)
from cascade_train.assembly.planning.memory import Memory, memory_of, over_ranks
from cascade_train.assembly.planning.rehearsal import Rehearsed
from cascade_train.distributed import sharded
from cascade_train.errors import ConfigError
from tests.integration.runs import SMALL
from tests.unit.config.composing import checked

pytestmark = pytest.mark.slow

TINY = ("model=c_tiny", "model.image_size=512", "data=shapes", "train.global_batch_size=16", "train.precision=bf16")
LARGE = Budget(gb=80)


REHEARSED: dict[str, tuple[Memory, Rehearsed]] = {}
"""Of these tests, whose units are gathered alone."""


@pytest.fixture(autouse=True)
def _gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_REHEARSED", REHEARSED)
    monkeypatch.setattr(sharded, "GATHERED_AT_ONCE_BYTES", 0)  # so that the tiny model's units are those of a real one


def budget_for(cfg: DictConfig, micro: int, *kept: str, on_cuda: bool = True) -> Budget:
    """Return a device that a micro-batch just fits."""
    found, _ = memory_of(cfg, on_cuda=on_cuda)
    need = found.total(micro, max(1, cfg.train.global_batch_size // micro))
    return Budget(gb=need * 1.0001 / (USABLE if on_cuda else HOST_USABLE) / 1e9, on_cuda=on_cuda, kept=kept)


def savings(cfg: DictConfig, budget: Budget) -> list[str]:
    """Return the keys that may be set to save memory, in the order in which they are tried."""
    found = (*exact_savings(cfg, budget), *rounding_savings(cfg), *offloading(cfg, budget))
    return [key for saving in found for key in saving]


def test_auto_is_the_largest_micro_batch_that_divides_and_fits():
    cfg = checked(*TINY, "task=finetune", "train.micro_batch_size=auto")
    assert cfg.train.micro_batch_size == "auto"
    found = choose(cfg, budget_for(cfg, 4))
    assert (found.micro_batch_size, found.values, found.fits) == (4, {}, True)
    found = choose(cfg, Budget(gb=0.01))
    assert (found.micro_batch_size, found.values, found.fits) == (1, {}, False)


def test_savings_are_added_from_the_cheapest_until_the_training_fits():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=24gb")
    exact = {"ema.device": "cpu", "activation_checkpointing": True}
    small = {**exact, "optimizer.algorithm": _of_8_bits(cfg.optimizer)}
    rounded = {**small, "train.master_weights": "bf16"}
    assert choose(cfg, LARGE).values == {}
    for values, micro in ((exact, 4), (small, 1), (rounded, 1), ({**exact, "parallel.cpu_offload": True}, 1)):
        gb = budget_for(changed(cfg, values), micro).gb
        found = choose(changed(cfg, {"memory.budget_gb": gb}), LARGE)
        assert (found.values, found.micro_batch_size, found.fits) == (values, micro, True)
    assert savings(cfg, replace(LARGE, on_cuda=False)) == [
        "activation_checkpointing", "optimizer.algorithm", "train.master_weights"
    ]  # fmt: skip


def test_a_host_that_is_too_small_gets_no_weights():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto")
    offloaded = budget_for(changed(cfg, {"activation_checkpointing": True, "parallel.cpu_offload": True}), 1)
    found = choose(cfg, replace(offloaded, host_gb=0.001))
    assert not found.fits
    assert not found.layout.on_host
    assert "train.master_weights" in found.values, "what needs least of all else"


def test_a_host_that_takes_weights_but_not_copies_of_them_gets_saves_that_wait():
    cfg = checked(*TINY, "task=finetune", "memory=auto")
    offloaded = changed(cfg, {"activation_checkpointing": True, "parallel.cpu_offload": True})
    lies, _ = memory_of(offloaded)
    host_gb = (lies.host_bytes() - lies.copies / 2) / HOST_USABLE / 1e9
    budget = replace(budget_for(offloaded, 1), host_gb=host_gb)
    values = {"activation_checkpointing": True, "parallel.cpu_offload": True}
    assert choose(cfg, replace(budget, host_gb=2 * host_gb)).values == values
    assert choose(cfg, budget).values == {**values, "checkpoint.asynchronous": False}
    assert not choose(cfg, replace(budget, kept=("checkpoint.asynchronous",))).fits


@pytest.mark.parametrize("kind", ["ema.decay=0.9", "ema.post_hoc=[0.05,0.1]"])
@pytest.mark.parametrize(("host_gb", "average"), [(60.0, {"ema.device": "cpu"}), (0.001, {})])
def test_an_average_goes_to_a_host_that_can_take_it_and_other_savings_are_tried_else(
    host_gb: float, average: dict, kind: str
):
    cfg = checked(*TINY, "task=finetune", kind, "memory=auto", "checkpoint.keep_last=null")
    values = {**average, "activation_checkpointing": True}
    found = choose(cfg, replace(budget_for(changed(cfg, values), 4), host_gb=host_gb))
    assert (found.values, found.micro_batch_size, bool(found.layout.on_host)) == (values, 4, bool(average))


def test_what_the_command_line_sets_stays():
    cfg = checked(*TINY, "task=finetune", "memory=auto", "train.micro_batch_size=8", "activation_checkpointing=false")
    budget = budget_for(changed(cfg, {"activation_checkpointing": True}), 4)
    chosen = choose(cfg, budget)
    assert (chosen.values, chosen.micro_batch_size) == ({"activation_checkpointing": True}, 4)
    kept = ("train.micro_batch_size", "activation_checkpointing", "optimizer.algorithm.betas", "parallel.cpu_offload")
    chosen = choose(cfg, replace(budget, gb=budget.gb / 2, kept=(*kept, "train.master_weights")))
    assert (chosen.values, chosen.micro_batch_size, chosen.fits) == ({}, 8, False)


def test_a_tier_that_nothing_fits_starts_with_what_needs_least_and_names_the_nearest_that_takes_it(caplog):
    cfg = checked(*TINY, "task=lora", "memory.budget_gb=0.61", "optimizer=lion")
    values = choose_or_skip(cfg, LARGE)
    assert (values["train.micro_batch_size"], values["parallel.cpu_offload"]) == (1, True)
    for words in (
        "memory.budget_gb=0.61: nothing fits. What needs least is taken, train.micro_batch_size=1 with",
        "activation_checkpointing=true parallel.cpu_offload=true: 0.6",
        "the nearest tier that takes it is memory=16gb",
    ):
        assert words in caplog.text


def test_moments_of_8_bits_take_adamw_s_settings_and_the_place_of_adamw_alone():
    cfg = checked(*TINY, "task=finetune", "optimizer.algorithm.betas=[0.8,0.9]", "memory=auto")
    change(cfg, {"optimizer.algorithm": _of_8_bits(cfg.optimizer)})
    from_group = checked(*TINY, "task=finetune", "optimizer=adamw_8bit")
    assert cfg.optimizer.algorithm == {**from_group.optimizer.algorithm, "betas": [0.8, 0.9]}


def test_a_start_that_does_not_fit_is_logged_with_what_does(caplog):
    cfg = checked(*TINY, "task=finetune")
    assert cfg.train.micro_batch_size == 16
    assert choose_or_skip(cfg, budget_for(cfg, 2)) == {"train.micro_batch_size": 16}
    assert "This run needs" in caplog.text
    assert "at train.micro_batch_size=16: train.micro_batch_size=2 fits." in caplog.text
    caplog.clear()
    choose_or_skip(cfg, LARGE)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_remedy_names_savings_where_no_micro_batch_fits():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9")
    here = budget_for(changed(cfg, {"ema.device": "cpu"}), 1, "train.micro_batch_size")
    assert remedy(cfg, here) == "memory=auto fits, by ema.device=cpu at train.micro_batch_size=1"
    assert "no choice of memory= makes it fit" in remedy(cfg, replace(here, gb=0.2))


def test_a_budget_does_not_change_how_ranks_share_weights():
    """The run decides that by its device, which may be larger than the budget."""
    cfg = checked(*TINY, "task=finetune", "memory.budget_gb=0.61", "train.micro_batch_size=2", ranks=4)
    whole, _ = memory_of(cfg)
    found = fitting._computed(cfg, {}, replace(LARGE, ranks=4), [2])
    assert found.bytes == whole.total(2, 2) > whole.over(4).total(2, 2)
    found = fitting._computed(cfg, {}, Budget(gb=0.001, on_cuda=False, ranks=4), [2])
    assert found.bytes == memory_of(cfg, on_cuda=False)[0].total(2, 2), "on a CPU each rank holds all"


def test_savings_that_the_run_would_refuse_are_not_tried():
    keys = {}
    for name, changes in {
        "previewer": ("task=reconstruction", "model=c_tiny", "objective=preview"),
        "came": ("task=finetune", "model=c_tiny", "optimizer=came"),
        "amsgrad": ("task=finetune", "model=c_tiny", "+optimizer.algorithm.amsgrad=true"),
        **{name: ("task=finetune", "model=c_tiny", f"optimizer={name}") for name in ("adafactor", "lion", "muon")},
        "schedule_free": ("task=finetune", "model=c_tiny", "optimizer=schedule_free", "lr_scheduler=constant"),
    }.items():
        keys[name] = set(savings(checked(*changes, "train.precision=bf16", "memory=auto"), LARGE))
    recomputed, rounded = "activation_checkpointing", "train.master_weights"
    offloaded = {"parallel.cpu_offload", "checkpoint.asynchronous"}
    assert keys["previewer"] == {"optimizer.algorithm", *offloaded}
    assert keys["came"] == {recomputed}
    assert keys["amsgrad"] == keys["lion"] == {recomputed, rounded, *offloaded}
    assert keys["adafactor"] == {recomputed, rounded}
    assert keys["muon"] == keys["schedule_free"] == {recomputed, *offloaded}


def continuing(cfg: DictConfig, saved: DictConfig, budget: Budget, *, step: int | None) -> dict[str, object]:
    """Return the values that are set for a run with a checkpoint of a step, None = with none."""
    folder = Path(cfg.run.dir)
    folder.joinpath("checkpoints", *([] if step is None else [f"step_{step}"])).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(saved, folder / "config.yaml")
    return choose_or_skip(cfg, budget)


def test_a_run_that_continues_keeps_what_its_checkpoints_hold(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto", f"run.dir={tmp_path / 'run'}")
    small = _of_8_bits(cfg.optimizer)
    bound = {"optimizer.algorithm": small, "train.master_weights": "bf16", "train.base_weights": None}
    set_before = {"ema.device": "cpu", "activation_checkpointing": True, **bound}
    saved = changed(cfg, {**set_before, "train.micro_batch_size": 8})
    tight, large = budget_for(saved, 1), LARGE
    assert continuing(cfg, saved, large, step=None) == {"train.micro_batch_size": 16}, "no checkpoint: chosen anew"
    for budget, micro in ((large, 8), (tight, 1)):
        kept = {**set_before, "train.micro_batch_size": micro}
        assert continuing(cfg, saved, budget, step=2).items() >= kept.items()
    other = changed(cfg, {"memory.budget_gb": 48.0})
    chosen = continuing(other, saved, large, step=2)
    assert chosen == {**bound, "train.micro_batch_size": 16}
    began = changed(cfg, {"run.dir": str(tmp_path / "new"), "run.resume": str(tmp_path / "run/checkpoints/step_2")})
    caplog.clear()
    assert choose_or_skip(began, large) == chosen
    assert caplog.messages[1] == "memory.budget_gb=auto chose optimizer=adamw_8bit train.master_weights=bf16"


def test_split_weights_are_divided_where_the_mode_does_it():
    cfg = checked(*TINY, "task=finetune", "train.micro_batch_size=2", ranks=4)
    alone, _ = memory_of(cfg)
    needs = {}
    whole_modes = ("ddp", True), ("auto", True)
    for mode, offloaded in (("ddp", False), ("fsdp", False), ("auto", False), ("hsdp", False), *whole_modes):
        change(cfg, {"parallel.mode": mode, "parallel.cpu_offload": offloaded})
        whole = memory_of(cfg)[0] if offloaded else alone
        needs[mode, offloaded] = over_ranks(cfg, whole, 4, machine_ranks=2, device_gb=24).total(2)
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
    assert free_host_bytes() == 8000 * 1024
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
    monkeypatch.setattr(fitting, "free_gb", lambda *_: (next(free), 60.0))
    own = ("train.micro_batch_size=auto", "log.every_steps=1", f"run.dir={tmp_path / 'run'}")
    for steps in (2, 3):
        with caplog.at_level("INFO"):
            assert launch([*SMALL, *SMALL_NETWORK, "task=finetune", *own, f"train.max_steps={steps}"]) == 0
        saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert saved["train"]["micro_batch_size"] == 2
    assert "micro_batch_size=2: 0.0" in caplog.text


def test_a_start_that_nothing_fits_trains_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(fitting, "free_gb", lambda *_: (0.001, 60.0))
    own = (*SMALL, *SMALL_NETWORK, "task=finetune", "train.max_steps=1")
    assert launch([*own, "train.micro_batch_size=auto", f"run.dir={tmp_path / 'run'}"]) == 0
    assert (
        "train.micro_batch_size=auto: nothing fits. What needs least is taken, train.micro_batch_size=1" in caplog.text
    )
    caplog.clear()
    monkeypatch.setattr(fitting, "choose_or_skip", None)
    assert launch([*own, f"run.dir={tmp_path / 'plain'}"]) == 0, "on a CPU nothing is computed that nobody asked for"


def test_a_training_that_cannot_be_rehearsed_starts_unless_a_choice_is_asked_for(monkeypatch, caplog):
    def reads_a_value(cfg: DictConfig, *, on_cuda: bool = True) -> tuple[Memory, Rehearsed]:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    caplog.set_level("INFO")
    monkeypatch.setattr(fitting, "memory_of", reads_a_value)
    assert choose_or_skip(checked(*TINY, "task=lora"), LARGE) == {}
    assert "is not computed beforehand (RuntimeError: Tensor.item() cannot be called on meta tensors)" in caplog.text
    with pytest.raises(
        ConfigError, match=r"cannot be computed beforehand \(RuntimeError: Tensor\.item.* Set train\.micro"
    ):
        choose_or_skip(checked(*TINY, "task=lora", "train.micro_batch_size=auto"), LARGE)


def test_the_log_names_the_budget_that_was_asked_for_and_what_the_peak_is_computed_from(caplog) -> None:
    caplog.set_level("INFO")
    choose_or_skip(checked(*TINY, "task=lora", "memory.budget_gb=0.5"), Budget(gb=23.8, on_cuda=False))
    choose_or_skip(checked(*TINY, "task=lora", "memory=auto"), LARGE)
    asked, chosen, free, _ = caplog.messages
    assert " GB by its computed peak, of memory.budget_gb=0.5, here are 23.8 GB free on this host (computed" in asked
    assert chosen == "memory.budget_gb=0.5 chose nothing more"
    assert " GB by its computed peak, of 80.0 GB (computed from the run's own step, not measured)" in free
