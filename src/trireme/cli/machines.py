"""A run on several machines, as one of its processes sees it: who it is, how it reaches the others, and its ranks."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trireme.base.errors import FINAL_EXIT_CODES, ConfigError
from trireme.base.network import interface_of, own_address, stay_on_loopback
from trireme.base.token import adopt_token, sealed
from trireme.config.files import ProcessName, write_run
from trireme.config.load import Invocation
from trireme.config.resolve import resuming
from trireme.config.run import NODE, RunConfig, find_node
from trireme.launch.ranks import KEEPER, report_failed


def node_of(config: RunConfig, name: ProcessName, invocation: Invocation) -> int:
    """Return the number of this machine; 0 for a dry run if it cannot be found.

    Raises: ConfigError if it cannot be found.
    """
    addresses = config.hosts.by_process[name]
    try:
        return find_node(f"hosts.{name}", addresses, None if name == "orchestrator" else invocation.node)
    except ConfigError:
        if not invocation.dry_run:
            raise
        return 0


def join_network(config: RunConfig, name: ProcessName, node: int) -> None:
    """Read the token, and configure torch and vLLM with the network interface that leads to the other machines.

    By themselves they take the address of the machine's own name, which is often one that only it knows.
    """
    adopt_token(config.hosts.token_file)
    if config.hosts.are_loopback:
        stay_on_loopback()
        return

    # Find the interface by the route to another machine of the run.
    addresses = config.hosts.by_process[name]
    here = addresses[min(node, len(addresses) - 1)].partition(":")[0]
    peer = next((host for host in config.hosts.all if host != here), here)
    address = own_address(here, peer=peer)

    os.environ[NODE] = str(node)
    os.environ.setdefault("VLLM_HOST_IP", address)
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# ranks on several machines


def torchrun_arguments(config: RunConfig) -> list[str]:
    """Return torchrun's arguments for this machine; none if all ranks are on one machine."""
    hosts = config.hosts.trainer
    if len(hosts) == 1:
        return []
    number = int(os.environ.get(NODE, 0))
    arguments = {
        "--nnodes": len(hosts),
        "--node-rank": number,
        "--master-addr": hosts[0],  # address at which the ranks rendezvous
        "--master-port": config.ports.ranks or 0,
        "--local-addr": own_address(hosts[number], peer=hosts[0] if number else hosts[1]),
        "--rdzv-id": hashlib.sha256(sealed(f"ranks of {config.run_id}").encode()).hexdigest()[:32],
        "--rdzv-conf": f"timeout={int(config.inference.start_timeout_s)}",
        "--max-restarts": 0,  # each machine's keeper restarts its ranks
        "--nproc-per-node": (config.trainer.num_ranks or 1) // len(hosts),
    }
    return [str(word) for pair in arguments.items() for word in pair]


def run_torchrun(arguments: Sequence[str], command: Sequence[str]) -> int:
    """Run this machine's ranks with torchrun. Return its exit code; that of `report_failed` if ranks failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        # After `--` nothing is torchrun's: it would take our `--run` for its `--run-path`.
        run(parse_args([*arguments, "-m", "--", *command]))
        return 0
    except ChildFailedError as error:
        return report_failed({rank: failure.exitcode for rank, failure in sorted(error.failures.items())})
    except SignalException as error:
        return 128 + int(error.sigval)


def keep_ranks(config: RunConfig, run_file: Path) -> int:
    """Start this machine's ranks, and restart them when they end because others did: no launcher sees all machines.

    A rank that dies, or is cut off, ends all others within seconds. Each machine then starts its own again, and they
    wait for each other; they resume from the newest checkpoint. `[supervisor]` has the limits, as for `rl`.
    """
    from trireme.launch.restarts import Trained  # no other command needs it

    trained, newest, in_a_row = Trained(config.paths.metrics), -1, 0
    while True:
        code = _run_ranks(run_file)
        if code in (0, *FINAL_EXIT_CODES) or code >= 128 or not config.supervisor.restart:
            return code

        # Only failures without progress count towards the limit.
        if (now := trained.newest()) > newest:
            newest, in_a_row = now, 0
        if in_a_row >= config.supervisor.max_restarts:
            print(f"the ranks were restarted {in_a_row} times in a row without progress: giving up", flush=True)
            return code
        # In the meantime other machines notice: new ranks must not meet ranks that are ending.
        in_a_row += 1
        delay_s = config.supervisor.delay_s(in_a_row)
        print(f"this machine's ranks ended with code {code}: restart in {delay_s:g} s", flush=True)
        time.sleep(delay_s)
        write_run(resuming(config), run_file)


def _run_ranks(run_file: Path) -> int:
    """Run the ranks until all have ended, also if this process is asked to end."""
    command = [sys.executable, "-m", "trireme.cli.trainer", "--run", str(run_file)]
    process = subprocess.Popen(command, env=os.environ | {KEEPER: str(os.getpid())})
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        process.send_signal(number)

    # A scheduler sends SIGTERM to this process: pass it on, and stay until the ranks have ended.
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the ranks were interrupted as well
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return 128 + asked[0] if asked else code
