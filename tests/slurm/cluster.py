"""A real SLURM of two virtual nodes on this machine, in a folder of its own and on ports of its own.

It needs Debian's packages (`apt-get install slurm-wlm munge`) and root, and touches nothing outside its folder. Its
daemons end with this process, however that ends. Partitions: `main`; `low`, whose jobs `high` takes the nodes from;
`abrupt`, likewise, without a grace time.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "setpriv")
SECONDS_OF_A_CALL = 20
"""A client waits for long where the controller is gone; no call may take longer."""

CONFIG = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait={grace}
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 CoresPerSocket=4 RealMemory=8000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 CoresPerSocket=4 RealMemory=8000 Gres=gpu:2
PartitionName=main Nodes=n[1-2] Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=n[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=abrupt Nodes=n[1-2] PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-2] PriorityTier=20 PreemptMode=OFF
"""
"""No cgroups, no binding, no accounting; two nodes that are this machine. `grace` is in seconds."""

GPUS = """
AutoDetect=off
NodeName=n[1-2] Name=gpu File=/dev/zero
NodeName=n[1-2] Name=gpu File=/dev/full
"""
"""Two devices of each node that SLURM takes for GPUs; nobody opens them."""


class Cluster:
    """The daemons, and the calls that tests make."""

    def __init__(self, root: Path, *, grace: int = 60) -> None:
        self.root = root
        self.grace = grace
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        for folder in ("state", "spool.n1", "spool.n2"):
            (self.root / folder).mkdir(parents=True)
        self.root.chmod(0o755)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        controller, first, second = free_ports(3)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            root=self.root,
            grace=self.grace,
            controller=controller,
            first=first,
            second=second,
        )
        (self.root / "slurm.conf").write_text(text)
        (self.root / "gres.conf").write_text(GPUS)
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._spawn("munged", "--foreground", "--force", *[f"--{k}={self.root}/munge.{v}" for k, v in files.items()])
        wait_for(lambda: (self.root / "munge.sock").exists())
        self._spawn("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._spawn("slurmd", "-D", "-N", node)
        wait_for(lambda: self.call("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split() == ["n1", "n2"])

    def stop(self) -> None:
        """End every job, then the daemons that this object started."""
        if self._daemons:
            self.call("scancel", "-f", "-u", "root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=120)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a client and return what it printed."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=SECONDS_OF_A_CALL,
            check=False,
        )
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """Submit a job and return its number."""
        said = self.call("sbatch", "--parsable", *arguments, cwd=cwd, **environment)
        assert said.strip().isdigit(), said
        return said.strip()

    def state(self, job: str) -> str:
        """Return a job's state, e.g. RUNNING."""
        return self.facts(job)["JobState"]

    def facts(self, job: str) -> dict[str, str]:
        """Return what SLURM knows of a job: JobState, ExitCode, Restarts, …"""
        said = self.call("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def start_requeued(self, job: str) -> None:
        """Start a requeued job now, without the two minutes for which SLURM holds it back.

        Not at once: in the second in which the job was requeued, nodes take its new start for the revoked one.
        """
        wait_for(lambda: self.state(job) == "PENDING")
        time.sleep(2)
        wait_for(lambda: self.call("scontrol", "update", f"jobid={job}", "StartTime=now") == "")

    def _spawn(self, *command: str) -> None:
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        with (self.root / "daemons.log").open("ab") as log:
            ending_with_us = ["setpriv", "--pdeathsig", "TERM", "--", str(program), *command[1:]]
            self._daemons.append(
                subprocess.Popen(ending_with_us, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )


def missing() -> str | None:
    """Return why this machine cannot start a cluster; None where it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"needs SLURM ({', '.join(absent)} not found): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "needs root, to start a SLURM of its own"


def wait_for(happened: Callable[[], bool], *, seconds: float = 180) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
