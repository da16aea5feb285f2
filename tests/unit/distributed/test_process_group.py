"""Meshes, agreement on errors, and an orderly end."""

import json
import os
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cascade_train.distributed import process_group as module
from cascade_train.distributed.process_group import World, build_mesh, mesh_shape, own_device, process_group
from cascade_train.errors import ConfigError, RunError
from tests.slurm.cluster import free_ports
from tests.warm.programs import warm_programs


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


@pytest.mark.parametrize(
    ("mode", "ranks", "shard_size", "message"),
    [
        ("single", 2, None, "unsynchronised copies would train apart"),
        ("hsdp", 4, 3, "parallel.shard_size=3 does not divide the 4 ranks"),
        ("hsdp", 12, None, "shard_size=8 does not divide the 12 ranks.*on every machine"),
    ],
)
def test_a_mode_that_these_ranks_cannot_form_is_refused(mode, ranks, shard_size, message):
    with pytest.raises(ConfigError, match=message):
        mesh_shape(mode, ranks, shard_size=shard_size, machine_ranks=8, fits=True)


def test_a_rank_alone_has_a_group_and_a_mesh_and_leaves_them():
    with process_group() as world:
        assert (world.rank, world.ranks, world.is_main) == (0, 1, True)
        assert build_mesh(world, (1, 1)).shape == (1, 1)
    assert not dist.is_initialized()


def see(monkeypatch, *gpus, local_rank=0):
    """Let this process see some GPUs, as rank of its machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[index]))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))


def noted(*gpus, seen=2):
    """Return a store in which ranks have noted their GPUs, the first one rank 0."""
    store = dist.HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"gpu_of_{rank}", json.dumps([gpu, seen if gpu else 0, "a.example"]))
    return store


@pytest.mark.parametrize(
    ("gpus", "others", "index"),
    [(("x", "y"), ("x",), 1), (("y",), ("x",), 0)],
    ids=["all of the machine", "its own alone, as with --gpus-per-task"],
)
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_sees(monkeypatch, gpus, others, index):
    see(monkeypatch, *gpus, local_rank=1)
    assert own_device(noted(*others), 1, 2) == torch.device("cuda", index)


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_are_refused_on_every_rank(monkeypatch, rank):
    store = noted("x", "y", "x", "x")
    see(monkeypatch, "x", "y", local_rank=rank)
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 have the same GPU, one of 2 .*: each.*--nproc_per_node 2 or"):
        own_device(store, rank, 4)


def test_ranks_with_and_without_gpus_are_refused(monkeypatch):
    see(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"rank 1 on .* sees 0 GPUs, unlike rank 0: all ranks .* Ask for GPUs on every"
    ):
        own_device(noted("x"), 1, 2)
    assert own_device(noted(""), 1, 2) == torch.device("cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_meet_say_where_they_tried(monkeypatch, rank):
    monkeypatch.setattr(module, "MEETING_SECONDS", 1.0)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match="MASTER_ADDR=not set"), process_group():
        pass
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    match = rf"Rank {rank} of 2 on .* at MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+: .* In a job of SLURM, .* sbatch/env.sh"
    with pytest.raises(RunError, match=match), process_group():
        pass
    assert not dist.is_initialized()


def test_ranks_meet_for_minutes_and_load_for_hours(world):
    assert module.MEETING_SECONDS == 300
    group = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == module.SET_UP_SECONDS


MEETING = """
from cascade_train.config.error_messages import exit_code
from cascade_train.distributed.process_group import process_group
from cascade_train.signals import Signals

def meet():
    with Signals(), process_group():
        pass

print("meeting", flush=True)
raise SystemExit(exit_code(meet))
"""


@pytest.mark.slow
def test_a_signal_is_heard_while_ranks_wait_for_each_other():
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    command, environment = [str(warm_programs() / "python"), "-c", MEETING], {**os.environ, **place}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "meeting\n"
        time.sleep(1)
        rank.terminate()
        _, errors = rank.communicate(timeout=120)
    assert rank.returncode == 75, errors


def test_the_group_is_left_after_an_error_too():
    with pytest.raises(RunError, match="torn"), process_group():
        raise RunError("torn")
    assert not dist.is_initialized()


def test_several_gpus_do_not_wait_for_each_other_after_an_error_alone(monkeypatch):
    ends = []
    monkeypatch.setattr(module.dist, "barrier", lambda: ends.append("met"))
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda: ends.append("left"))
    for kind, ranks, left in (("cuda", 2, []), ("cuda", 1, ["left"]), ("cpu", 2, ["left"])):
        world = World(rank=0, ranks=ranks, machine_ranks=ranks, device=torch.device(kind))
        monkeypatch.setattr(module, "_join", lambda world=world: world)
        ends.clear()
        with pytest.raises(RunError, match="torn"), process_group():
            raise RunError("torn")
        assert ends == left
        ends.clear()
        with process_group():
            pass
        assert ends == ["met", "left"]


def test_deterministic_switch_is_torchs_own(monkeypatch):
    from cascade_train.distributed.rng import seed_micro_batch, set_deterministic

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "cuBLAS refuses deterministic products without"
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark, "buckets would be timed one by one"
    draws = []
    for step, micro, rank in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)):
        seed_micro_batch(5, step=step, micro=micro, rank=rank)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
