"""Which rank this process is in a step that SLURM's srun started, and with how many threads, as torchrun has it.

Nothing here submits or requeues a job, and nothing imports torch: refusals come before that.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

FIRST_PORT, PORTS = 10000, 20000
"""Where the ranks of a job meet: a port chosen by its number, below those that systems hand out."""


def adopt_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from SLURM's variables.

    Only in a step of several tasks that torchrun did not start: a batch script and an interactive shell have
    SLURM_PROCID too, but no number of tasks of a step. MASTER_ADDR and MASTER_PORT stay where they are set.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "RANK" in environment:
        return
    node = int(environment["SLURM_NODEID"])
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["LOCAL_WORLD_SIZE"] = str(tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS))


def one_thread_a_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_NUM_THREADS to 1 where there are several ranks and it is not set, whatever has started them.

    Sums on a CPU differ in bits by the number of threads, and torchrun sets it so for several ranks of a machine. To be
    called before torch or numpy is imported.
    """
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")


def first_host(nodes: str) -> str:
    """Return the first name of a list of nodes in SLURM's notation: `gpu[07-09,12],cpu1` begins with `gpu07`."""
    return re.sub(r"\[(\w+)[^]]*]", r"\1", nodes).partition(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Return how many tasks each node has, from SLURM's notation: `4(x2),1` is [4, 4, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]
