"""Meshes, agreement on errors, and an orderly end."""

import os

import pytest
import torch
import torch.distributed as dist

from cascade_train.distributed.process_group import build_mesh, mesh_shape, process_group
from cascade_train.errors import ConfigError, RunError


@pytest.mark.parametrize(
    ("mode", "ranks", "shard_size", "fits", "shape"),
    [
        ("single", 1, None, True, (1, 1)),
        ("auto", 1, None, True, (1, 1)),
        ("auto", 4, None, True, (4, 1)),
        ("auto", 4, None, False, (1, 4)),
        ("ddp", 4, None, False, (4, 1)),
        ("fsdp", 4, None, True, (1, 4)),
        ("hsdp", 4, 2, True, (2, 2)),
        ("hsdp", 16, None, True, (2, 8)),
        ("hsdp", 8, None, False, (1, 8)),
    ],
)
def test_every_mode_is_a_point_of_one_mesh(mode, ranks, shard_size, fits, shape):
    assert mesh_shape(mode, ranks, shard_size=shard_size, machine_ranks=8, fits=fits) == shape


def test_single_on_several_ranks_is_refused():
    with pytest.raises(ConfigError, match="unsynchronised copies would train apart"):
        mesh_shape("single", 2, shard_size=None, machine_ranks=2, fits=True)


def test_a_shard_size_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="parallel.shard_size=3 does not divide the 4 ranks"):
        mesh_shape("hsdp", 4, shard_size=3, machine_ranks=4, fits=True)


def test_machines_of_different_size_form_no_groups_by_machine():
    with pytest.raises(ConfigError, match="shard_size=8 does not divide the 12 ranks.*on every machine"):
        mesh_shape("hsdp", 12, shard_size=None, machine_ranks=8, fits=True)


def test_a_rank_alone_has_a_group_and_a_mesh_and_leaves_them():
    with process_group() as world:
        assert (world.rank, world.ranks, world.is_main) == (0, 1, True)
        assert build_mesh(world, (1, 1)).shape == (1, 1)
    assert not dist.is_initialized()


def test_more_processes_than_gpus_are_refused_on_every_rank_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes on a machine with 2 GPUs.*--nproc_per_node 2"), process_group():
        pass


def test_the_group_is_left_after_an_error_too():
    with pytest.raises(RunError, match="torn"), process_group():
        raise RunError("torn")
    assert not dist.is_initialized()


def test_deterministic_switch_is_torchs_own(monkeypatch):
    from cascade_train.distributed.rng import seed_micro_batch, set_deterministic

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "cuBLAS refuses deterministic products without"
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    draws = []
    for step, micro, rank in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)):
        seed_micro_batch(5, step=step, micro=micro, rank=rank)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
