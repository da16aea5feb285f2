"""Micro-batches and means that save memory are chosen by computed peaks, and what cannot fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.__main__ import launch
from cascade_train.assembly.planning import devices, fitting, means, memory
from cascade_train.assembly.planning.devices import USABLE, Room, free_host_bytes, own_room
from cascade_train.assembly.planning.fitting import Place, change, changed, check, choose, remedy
from cascade_train.assembly.planning.means import Means, _of_8_bits
from cascade_train.assembly.planning.memory import Memory, over_ranks
from cascade_train.assembly.planning.rehearsal import Rehearsed, count_parameters
from cascade_train.distributed import sharded
from cascade_train.errors import ConfigError
from tests.integration.runs import SMALL
from tests.unit.config.composing import checked

TINY = ("model=c_tiny", "model.image_size=512", "data=shapes", "train.global_batch_size=16", "train.precision=bf16")


MEMORY: dict[str, tuple[Memory, Rehearsed]] = {}
"""Of configurations that were rehearsed, which takes a second each."""


@pytest.fixture(autouse=True)
def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "memory_of", memory_of)
    monkeypatch.setattr(sharded, "GATHERED_AT_ONCE_BYTES", 0)  # so that the tiny model's units are those of a real one


def memory_of(cfg: DictConfig, *, on_cuda: bool = True) -> tuple[Memory, Rehearsed]:
    beside = {"memory.budget_gb": None, "memory.allow_overflow": False, "run.dir": "-", "run.resume": "auto"}
    trial = changed(cfg, {"train.micro_batch_size": None, **beside})
    key = f"{on_cuda} {OmegaConf.to_yaml(trial)}"
    if key not in MEMORY:
        MEMORY[key] = memory.memory_of(cfg, on_cuda=on_cuda)
    return MEMORY[key]


def room_for(cfg: DictConfig, micro: int, *, on_cuda: bool = True) -> Room:
    """Return a device that a micro-batch just fits."""
    found, _ = memory_of(cfg, on_cuda=on_cuda)
    need = found.total(micro, max(1, cfg.train.global_batch_size // micro))
    share = USABLE if on_cuda else devices.HOST_USABLE
    return Room(gb=need * 1.0001 / share / 1e9, on_cuda=on_cuda)


def place(room: Room, *kept: str, ranks: int = 1) -> Place:
    return Place(room=room, ranks=ranks, machine_ranks=ranks, kept=kept)


def ladder(cfg: DictConfig, here: Place) -> Iterator[Means]:
    return means.ladder(cfg, here.room, here.kept)


def test_auto_is_the_largest_micro_batch_that_divides_and_fits():
    cfg = checked(*TINY, "task=finetune", "train.micro_batch_size=auto")
    assert cfg.train.micro_batch_size == "auto"
    room = room_for(cfg, 4)
    assert choose(cfg, place(room)).micro_batch_size == 4
    assert choose(cfg, place(room)).values == {}
    with pytest.raises(
        ConfigError, match=r"micro_batch_size=auto: no micro-batch fits\. 1 a rank needs 0\.\d+ GB by its"
    ):
        choose(cfg, place(replace(room, gb=0.01)))


def test_means_are_added_from_the_cheapest_until_the_training_fits():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=24gb")
    sets = [means.values for means in ladder(cfg, place(Room(gb=24, on_cuda=True)))]
    names = [set(values) for values in sets]
    exact, small = {"ema.device", "activation_checkpointing"}, {"optimizer.algorithm"}
    rounding = {*small, "train.master_weights"}
    assert names == [set(), {"ema.device"}, exact, exact | small, exact | rounding, exact | {"parallel.cpu_offload"}]
    kept = ("ema.device", "optimizer", "activation_checkpointing", "parallel.cpu_offload", "train.master_weights")
    assert [means.values for means in ladder(cfg, place(Room(gb=24, on_cuda=True), *kept))] == [{}]
    on_cpu = [set(means.values) for means in ladder(cfg, place(Room(gb=24, on_cuda=False)))]
    recomputing = {"activation_checkpointing"}
    assert on_cpu == [set(), recomputing, recomputing | small, recomputing | rounding]
    assert choose(cfg, place(Room(gb=80, on_cuda=True))).values == {}
    for values, micro in ((sets[2], 4), (sets[3], 1), (sets[4], 1), (sets[5], 1)):
        room = room_for(changed(cfg, values), micro)
        found = choose(changed(cfg, {"memory.budget_gb": room.gb}), place(Room(gb=80, on_cuda=True)))
        assert (found.values, found.micro_batch_size) == (values, micro)


def test_a_host_that_is_too_small_gets_no_weights():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto")
    room = room_for(changed(cfg, {"ema.device": "cpu", "activation_checkpointing": True}), 4)
    assert choose(cfg, place(room)).values["ema.device"] == "cpu"
    room = replace(
        room_for(changed(cfg, {"activation_checkpointing": True, "parallel.cpu_offload": True}), 1), host_gb=0.01
    )
    with pytest.raises(
        ConfigError, match=r"may fill 0\.\d+ of 0\.\d+, beside 0\.0\d of the 0\.01 GB .* of its host\. What"
    ):
        choose(cfg, place(room))


def test_an_average_that_the_host_cannot_take_stays_on_the_device_and_other_means_are_tried():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto")
    room = replace(room_for(changed(cfg, {"activation_checkpointing": True}), 4), host_gb=0.001)
    found = choose(cfg, place(room))
    assert (found.values, found.micro_batch_size, found.host_bytes) == ({"activation_checkpointing": True}, 4, 0)


def test_what_the_command_line_sets_stays():
    cfg = checked(*TINY, "task=finetune", "memory=auto", "train.micro_batch_size=8", "activation_checkpointing=false")
    room = room_for(changed(cfg, {"activation_checkpointing": True}), 4)
    chosen = choose(cfg, place(room))
    assert (chosen.values, chosen.micro_batch_size) == ({"activation_checkpointing": True}, 4)
    kept = ("train.micro_batch_size", "activation_checkpointing", "optimizer.algorithm.betas", "parallel.cpu_offload")
    kept += ("train.master_weights",)
    with pytest.raises(ConfigError, match=r"memory\.budget_gb=auto: no micro-batch fits\. 8 a rank needs"):
        choose(cfg, place(replace(room, gb=room.gb / 2), *kept))


def test_a_tier_names_its_means_where_nothing_fits():
    cfg = checked(*TINY, "task=lora", "memory=16gb", "optimizer=lion")
    cfg.memory.budget_gb = 0.61
    with pytest.raises(
        ConfigError, match=r"budget_gb=0\.61: no micro-batch fits with activation_checkpointing=true paral"
    ):
        choose(cfg, place(Room(gb=24, on_cuda=True)))


def test_moments_of_8_bits_take_adamw_s_settings_and_the_place_of_adamw_alone():
    cfg = checked(*TINY, "task=finetune", "optimizer.algorithm.betas=[0.8,0.9]", "memory=auto")
    change(cfg, list(ladder(cfg, place(Room(gb=24, on_cuda=True))))[2].values)
    from_group = checked(*TINY, "task=finetune", "optimizer=adamw_8bit")
    assert cfg.optimizer.algorithm == {**from_group.optimizer.algorithm, "betas": [0.8, 0.9]}


def test_a_run_that_does_not_fit_is_refused_with_what_does():
    cfg = checked(*TINY, "task=finetune")
    assert cfg.train.micro_batch_size == 16
    room = room_for(cfg, 2)
    here = place(room)
    choice = choose(cfg, here)
    assert choice.micro_batch_size == 16
    with pytest.raises(
        ConfigError,
        match=r"This run needs .* each rank has .* train\.micro_batch_size=16: train\.micro_batch_size=2 fits\.",
    ):
        check(cfg, choice, here)
    assert remedy(cfg, here) == "train.micro_batch_size=2 fits"
    check(cfg, choice, place(Room(gb=choice.bytes / 1e9 / 1.04, on_cuda=True)))
    cfg.memory.allow_overflow = True
    check(cfg, choice, here)


def test_the_remedy_names_means_where_no_micro_batch_fits():
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9")
    here = place(room_for(changed(cfg, {"ema.device": "cpu"}), 1), "train.micro_batch_size")
    assert remedy(cfg, here) == "memory=auto fits, by ema.device=cpu at train.micro_batch_size=1"
    assert "no choice of memory= makes it fit" in remedy(cfg, place(replace(here.room, gb=0.2)))


def test_a_budget_does_not_change_how_ranks_share_weights():
    """The run decides that by its device, which may be larger than the budget."""
    cfg = checked(*TINY, "task=finetune", "memory.budget_gb=0.61", "train.micro_batch_size=2", ranks=4)
    whole, _ = memory_of(cfg)
    room, small = Room(gb=80, on_cuda=True), Room(gb=0.61, on_cuda=True)
    found = fitting._rehearsed(cfg, Means(values={}), place(room, ranks=4), small, [2])
    assert found.bytes == whole.total(2, 2) > whole.over(4).total(2, 2)
    on_cpu = Room(gb=0.001, on_cuda=False)
    found = fitting._rehearsed(cfg, Means(values={}), place(on_cpu, ranks=4), on_cpu, [2])
    assert found.bytes == memory_of(cfg, on_cuda=False)[0].total(2, 2), "on a CPU each rank holds all"


def test_means_that_the_run_would_refuse_are_not_tried():
    keys = {}
    for name, changes in {
        "previewer": ("task=reconstruction", "model=c_tiny", "objective=preview"),
        "came": ("task=finetune", "model=c_tiny", "optimizer=came"),
        "amsgrad": ("task=finetune", "model=c_tiny", "+optimizer.algorithm.amsgrad=true"),
        **{name: ("task=finetune", "model=c_tiny", f"optimizer={name}") for name in ("adafactor", "lion", "muon")},
        "schedule_free": ("task=finetune", "model=c_tiny", "optimizer=schedule_free", "lr_scheduler=constant"),
    }.items():
        sets = ladder(checked(*changes, "train.precision=bf16", "memory=auto"), place(Room(gb=24, on_cuda=True)))
        keys[name] = {key for means in sets for key in means.values}
    assert keys["previewer"] == {"optimizer.algorithm", "parallel.cpu_offload"}
    assert keys["came"] == {"activation_checkpointing"}
    recomputed, rounded, offloaded = "activation_checkpointing", "train.master_weights", "parallel.cpu_offload"
    assert keys["amsgrad"] == keys["lion"] == {recomputed, rounded, offloaded}
    assert keys["adafactor"] == {recomputed, rounded}
    assert keys["muon"] == keys["schedule_free"] == {recomputed, offloaded}


def test_an_overflow_that_is_allowed_starts_with_the_last_means(caplog):
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto", "memory.allow_overflow=true")
    here = place(Room(gb=0.3, on_cuda=True))
    values, _ = fitting._known(cfg, here)
    assert (values["train.micro_batch_size"], values["parallel.cpu_offload"]) == (1, True)
    assert "no choice of memory= makes it fit" in caplog.text


def continuing(cfg: DictConfig, saved: DictConfig, room: Room, *, step: int | None) -> dict[str, object]:
    """Return what is set for a run with a checkpoint of a step, None = with none, of a saved configuration."""
    folder = Path(cfg.run.dir)
    folder.joinpath("checkpoints", *([] if step is None else [f"step_{step}"])).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(saved, folder / "config.yaml")
    return fitting._known(cfg, place(room))[0]


def test_a_run_that_continues_keeps_what_its_checkpoints_hold(tmp_path: Path):
    cfg = checked(*TINY, "task=finetune", "ema.decay=0.9", "memory=auto", f"run.dir={tmp_path / 'run'}")
    small = _of_8_bits(cfg.optimizer)
    bound = {"optimizer.algorithm": small, "train.master_weights": "bf16", "train.base_weights": None}
    set_before = {"ema.device": "cpu", "activation_checkpointing": True, **bound}
    saved = changed(cfg, {**set_before, "train.micro_batch_size": 8})
    tight, large = room_for(saved, 1), Room(gb=80, on_cuda=True)
    assert continuing(cfg, saved, large, step=None) == {"train.micro_batch_size": 16}, "no checkpoint: chosen anew"
    kept = continuing(cfg, saved, large, step=2)
    assert {key: kept[key] for key in saved_keys(set_before)} == {**set_before, "train.micro_batch_size": 8}
    again = continuing(cfg, saved, tight, step=2)
    assert {key: again[key] for key in saved_keys(set_before)} == {**set_before, "train.micro_batch_size": 1}, (
        "it fits no more"
    )
    other = changed(cfg, {"memory.budget_gb": 48.0})
    chosen = continuing(other, saved, large, step=2)
    assert chosen == {**bound, "train.micro_batch_size": 16}
    began = changed(cfg, {"run.dir": str(tmp_path / "new"), "run.resume": str(tmp_path / "run/checkpoints/step_2")})
    values, notes = fitting._known(began, place(large))
    assert values == chosen
    assert notes[1] == "memory.budget_gb=auto chose optimizer=adamw_8bit train.master_weights=bf16"


def saved_keys(means: dict[str, object]) -> tuple[str, ...]:
    return (*means, "train.micro_batch_size")


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


def test_a_rank_has_its_share_of_what_is_free_on_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = free_host_bytes()
    assert 10**8 < free < 2**50
    assert own_room(torch.device("cpu"), 4).gb == pytest.approx(free / 4e9, rel=0.2)
    assert not own_room(torch.device("cpu"), 1).on_cuda


def test_parameters_are_counted_without_memory():
    tiny = count_parameters(checked("model=c_tiny", "task=lora"))
    assert tiny < fitting.CHECKED_PARAMETERS < count_parameters(checked("model=c_1b", "task=lora"))


def test_a_run_has_the_number_that_was_chosen_and_a_resume_the_first(tmp_path: Path, monkeypatch, caplog):
    cfg = checked(*SMALL, "task=finetune", "train.micro_batch_size=auto")
    rooms = iter([room_for(cfg, 2, on_cuda=False), Room(gb=60.0, on_cuda=False)])
    monkeypatch.setattr(fitting, "own_room", lambda *_: next(rooms))
    command = [
        *SMALL,
        "task=finetune",
        "train.micro_batch_size=auto",
        "log.every_steps=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    with caplog.at_level("INFO"):
        assert launch([*command, "train.max_steps=2"]) == 0
    assert "micro_batch_size=2: 0.0" in caplog.text
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["train"]["micro_batch_size"] == 2
    assert launch([*command, "train.max_steps=3"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]["micro_batch_size"] == 2


def test_a_start_that_cannot_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(fitting, "own_room", lambda *_: Room(gb=0.02, on_cuda=False))
    monkeypatch.setattr(fitting, "CHECKED_PARAMETERS", 0)
    assert launch([*SMALL, "task=finetune", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "memory.allow_overflow=true starts it nevertheless." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_training_that_cannot_be_rehearsed_starts_unless_something_is_to_be_chosen(monkeypatch: pytest.MonkeyPatch):
    def reads_a_value(cfg: DictConfig, *, on_cuda: bool = True) -> tuple[Memory, Rehearsed]:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(fitting, "CHECKED_PARAMETERS", 0)
    monkeypatch.setattr(fitting, "memory_of", reads_a_value)
    here = place(Room(gb=24.0, on_cuda=True))
    values, (note,) = fitting._known(checked(*TINY, "task=lora"), here)
    assert values == {}
    assert "is not computed beforehand (RuntimeError: Tensor.item() cannot be called on meta tensors)" in note
    with pytest.raises(
        ConfigError, match=r"cannot be computed beforehand \(RuntimeError: Tensor\.item.* Set train\.micro"
    ):
        fitting._known(checked(*TINY, "task=lora", "train.micro_batch_size=auto"), here)


def test_the_log_names_the_budget_that_was_asked_for() -> None:
    cfg = checked(*TINY, "task=lora", "memory.budget_gb=0.5")
    said, chosen = fitting._known(cfg, place(Room(gb=23.8, on_cuda=False)))[1]
    assert said.endswith(" GB by its computed peak, of memory.budget_gb=0.5, here are 23.8 GB free on this host")
    assert chosen == "memory.budget_gb=0.5 chose nothing more"
    notes = fitting._known(checked(*TINY, "task=lora", "memory=auto"), place(Room(gb=80, on_cuda=True)))[1]
    assert notes[0].endswith(" GB by its computed peak, of 80.0 GB")
