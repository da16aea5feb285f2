"""Meshes, agreement on errors, and an orderly end."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from cascade_train.distributed.process_group import agree, build_mesh, gather_objects, mesh_shape, process_group
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
        ("fsdp", 4, 2, True, (2, 2)),
    ],
)
def test_every_mode_is_a_point_of_one_mesh(mode, ranks, shard_size, fits, shape):
    assert mesh_shape(mode, ranks, shard_size=shard_size, fits=fits) == shape


def test_single_on_several_ranks_is_refused():
    with pytest.raises(ConfigError, match="unsynchronised copies would train apart"):
        mesh_shape("single", 2, shard_size=None, fits=True)


def test_a_shard_size_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="parallel.shard_size=3 does not divide the 4 ranks"):
        mesh_shape("fsdp", 4, shard_size=3, fits=True)


def test_a_rank_alone_has_a_group_and_a_mesh_and_leaves_them():
    with process_group() as world:
        assert (world.rank, world.ranks, world.is_main) == (0, 1, True)
        assert build_mesh(world, (1, 1)).shape == (1, 1)
        assert gather_objects({"a": 1}) == [{"a": 1}]
    assert not dist.is_initialized()


def test_the_group_is_left_after_an_error_too():
    with pytest.raises(RunError, match="torn"), process_group():
        raise RunError("torn")
    assert not dist.is_initialized()


def test_agreement_passes_the_own_error_on():
    with process_group():
        with agree():
            pass
        with pytest.raises(RunError, match="mine"), agree():
            raise RunError("mine")


SCRIPT = """
import sys
from cascade_train.distributed.process_group import agree, process_group
from cascade_train.errors import RunError
with process_group() as world:
    try:
        with agree():
            if world.rank == 1:
                raise RunError("disk of rank 1 is full")
    except RunError as error:
        print(f"<{world.rank}: {error}>", flush=True)
"""


@pytest.mark.distributed
def test_an_error_of_one_rank_reaches_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ))
    assert sorted(part for part in done.stdout.replace("><", ">\n<").split("\n") if part) == [
        "<0: disk of rank 1 is full>",
        "<1: disk of rank 1 is full>",
    ]


def test_deterministic_switch_is_torchs_own():
    from cascade_train.distributed.rng import seed_micro_batch, set_deterministic

    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    draws = []
    for step, micro, rank in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)):
        seed_micro_batch(5, step=step, micro=micro, rank=rank)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
