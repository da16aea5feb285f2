import os
import subprocess
import sys

import pytest

from cascade_train.config.sweeps.slurm import adopt_slurm_step, first_host, one_thread_a_rank, tasks_per_node
from cascade_train.errors import ConfigError

BATCH_SHELL = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
"""What a batch script, or a shell of salloc, has."""

STEP = {
    **BATCH_SHELL,
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
"""What the third of three tasks has, alone on the second node."""


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_a_task_of_a_step_becomes_a_rank():
    environment = dict(STEP)
    adopt_slurm_step(environment)
    assert {key: value for key, value in environment.items() if key not in STEP} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "13456",
    }


def test_where_ranks_meet_may_be_given():
    environment = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt_slurm_step(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert environment["RANK"] == "2"


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH_SHELL, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, **TORCHRUN}],
    ids=["no SLURM", "a batch script", "a step of one task", "torchrun in a step"],
)
def test_other_processes_are_left_as_they_are(environment: dict[str, str]):
    before = dict(environment)
    adopt_slurm_step(environment)
    assert environment == before


def test_variables_that_are_set_and_empty_are_unset():
    environment = {"RANK": "", "WORLD_SIZE": " ", "LOCAL_RANK": "", "MASTER_PORT": "\n", "OTHER": ""}
    adopt_slurm_step(environment)
    assert environment == {"OTHER": ""}


@pytest.mark.parametrize("environment", [{"RANK": "0"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, TORCHRUN])
def test_variables_of_one_process_and_of_torchrun_pass(environment: dict[str, str]):
    before = dict(environment)
    adopt_slurm_step(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0 and WORLD_SIZE=1 without MASTER_ADDR and MASTER_PORT: torchrun",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK and"),
        ({"RANK": "1"}, "RANK=1 without WORLD_SIZE and"),
        ({**TORCHRUN, "MASTER_PORT": " "}, "without MASTER_PORT: .* unset RANK and WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 must be less than WORLD_SIZE=8"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two must be a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 must be a whole number"),
    ],
)
def test_variables_that_describe_no_rank_are_refused(environment: dict[str, str], message: str):
    environment = dict(environment)
    with pytest.raises(ConfigError, match=message):
        adopt_slurm_step(environment)
    assert "RANK" not in environment, "so that this process reports it"


def test_lists_of_nodes_and_tasks_in_slurms_notation():
    nodes = ("n1", "n1,n2", "gpu[07-09,12],cpu1", "rack[1-2]n[3,5].example.org", "a,gpu[1-2]")
    assert [*map(first_host, nodes)] == ["n1", "n1", "gpu07", "rack1n3.example.org", "a"]
    assert [*map(tasks_per_node, ("2", "2(x3)", "4(x2),1,2(x2)"))] == [[2], [2, 2, 2], [4, 4, 1, 2, 2]]


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, "1"),
        ({"WORLD_SIZE": "2", "OMP_NUM_THREADS": "4"}, "4"),
    ],
    ids=["alone", "one rank", "several", "as the user says"],
)
def test_each_of_several_ranks_computes_in_one_thread(given: dict[str, str], threads: str | None):
    environment = dict(given)
    one_thread_a_rank(environment)
    assert environment.get("OMP_NUM_THREADS") == threads


def test_torch_heeds_the_number_of_threads():
    program = """
from cascade_train.errors import ConfigError
from cascade_train.config.sweeps.slurm import one_thread_a_rank
one_thread_a_rank()
import torch
print(torch.get_num_threads())
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment["WORLD_SIZE"] = "2"
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == "1\n"
