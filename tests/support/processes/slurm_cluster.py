"""A real Slurm of several machines: a controller, and a daemon for each, in a folder. They are all this one, or network
namespaces (`machines.open_machines`), in which their names `m0`, `m1`, … stand for their addresses."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import psutil

from support.processes.machines import Machine
from trireme.base.processes import free_port

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
START_S = 60.0
END_S = 20.0


def missing() -> str:
    """Why there can be none here; nothing where there can."""
    absent = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"Slurm's {', '.join(absent)} is not installed"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "slurmd wants to see control groups"
    return "" if os.geteuid() == 0 else "slurmd wants to be root"


@dataclass(frozen=True)
class Cluster:
    folder: Path
    environment: dict[str, str]  # for Slurm's commands
    machines: Sequence[Machine] = ()

    def ask(self, *command: str) -> str:
        words = [*self.on(0), *command]
        answer = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        return answer.stdout.strip()

    def on(self, number: int) -> list[str]:
        if not self.machines:
            return []
        named = ["bash", "-c", f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"', "bash"]
        # not `ip netns exec`: it shows another /sys, without the control groups that slurmd wants to see
        return ["nsenter", f"--net=/var/run/netns/{self.machines[number].name}", "unshare", "--mount", *named]

    def state(self, job: str) -> str:
        shown = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return next((word.partition("=")[2] for word in shown if word.startswith("JobState=")), "")

    def waiting(self, job: str) -> str:
        return self.ask("squeue", "--noheader", f"--jobs={job}", "--format=%T")

    def wait_until(self, job: str, *states: str, within_s: float = 60.0) -> str:
        give_up = time.monotonic() + within_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < give_up, f"{job} is {state}: {self.ask('scontrol', 'show', 'job', job)}"
            time.sleep(0.05)
        return state


@contextmanager
def open_cluster(folder: Path, *, machines: int | Sequence[Machine], gpus: int = 0) -> Iterator[Cluster]:
    """Partition `tiny`, machines `m0`, `m1`, …; GPUs are files that no process opens."""
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    given = () if isinstance(machines, int) else machines
    addresses = ["127.0.0.1"] * machines if isinstance(machines, int) else [machine.address for machine in machines]
    cluster = Cluster(folder, environment, given)
    _write(folder, addresses, gpus)
    with ExitStack() as daemons:
        daemons.callback(_kill_all_of, environment["SLURM_CONF"])
        daemons.enter_context(_daemon(cluster, 0, "slurmctld", "-D", "-c"))
        for number in range(len(addresses)):
            daemons.enter_context(_daemon(cluster, number, "slurmd", "-D", "-N", f"m{number}"))
        _wait_for_machines(cluster, len(addresses))
        yield cluster


def _write(folder: Path, addresses: Sequence[str], gpus: int) -> None:
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    for name in ("state", *(f"spool-m{number}" for number in range(len(addresses)))):
        (folder / name).mkdir(parents=True)
    for number in range(gpus):
        (folder / f"nvidia{number}").touch()
    room = f"CPUs={os.cpu_count()} RealMemory=500 State=UNKNOWN{f' Gres=gpu:{gpus}' if gpus else ''}"
    nodes = [
        f"NodeName=m{number} NodeHostname={host} NodeAddr={address} Port={free_port()} {room}"
        for number, address in enumerate(addresses)
    ]
    lines = f"""
        ClusterName=tiny
        SlurmctldHost={host}({addresses[0]})
        SlurmctldPort={free_port()}
        SlurmUser={user}
        SlurmdUser={user}
        AuthType=auth/none
        CredType=cred/none
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool-%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd-%n.pid
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        MpiDefault=none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        JobAcctGatherType=jobacct_gather/none
        ReturnToService=2
        KillWait=15
        MailProg=/bin/true
        PartitionName=tiny Nodes=m[0-{len(addresses) - 1}] Default=YES MaxTime=30 State=UP
    """
    (folder / "slurm.conf").write_text("\n".join([*(["GresTypes=gpu"] if gpus else []), *nodes, dedent(lines)]))
    named = [f"{address} m{number}" for number, address in enumerate(addresses)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{addresses[0]} {host}", *named]) + "\n")
    if gpus:
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-{gpus - 1}]\n")


@contextmanager
def _daemon(cluster: Cluster, machine: int, name: str, *flags: str) -> Iterator[None]:
    words = [*cluster.on(machine), str(shutil.which(name, path=cluster.environment["PATH"])), *flags]
    with open(cluster.folder / f"{name}{flags[-1]}.log", "w") as log:
        process = subprocess.Popen(words, env=cluster.environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def _kill_all_of(configuration: str) -> None:
    """Whatever jobs have left behind. Each of them knows its Slurm."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == configuration:
                process.kill()


def _wait_for_machines(cluster: Cluster, machines: int) -> None:
    give_up = time.monotonic() + START_S
    while (states := cluster.ask("sinfo", "--noheader", "--Node", "--format=%t").split()) != ["idle"] * machines:
        said = "\n".join(log.read_text() for log in cluster.folder.glob("*.log"))
        assert time.monotonic() < give_up, f"machines are {states} after {START_S:.0f} s\n{said}"
        time.sleep(0.05)
