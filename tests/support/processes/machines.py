"""Several machines on one: network namespaces on a switch of their own, each with an address, cut off at will.

Example:
    with open_machines(3) as machines:
        machines[0].start("orchestrator", "@", "run.toml", log=folder / "orchestrator.log")
        machines[2].cut()
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.runs.real_run import REPOSITORY, Process, command

IP = shutil.which("ip") or "/usr/sbin/ip"
TC = shutil.which("tc") or "/usr/sbin/tc"  # not in /usr/bin, where Debian has `ip` too
DEADLINE_S = 60.0


def why_not() -> str | None:
    """Why there can be no such machines here; None where there can."""
    if not Path(IP).exists():
        return "iproute2 is not installed"
    name = f"trireme-probe-{os.getpid()}"
    made = subprocess.run([IP, "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    bridge = subprocess.run([IP, "-n", name, "link", "add", "sw", "type", "bridge"], capture_output=True, text=True)
    _ip("netns", "del", name)
    return f"no bridges here: {bridge.stderr.strip()}" if bridge.returncode else None


@dataclass
class Machine:
    number: int
    name: str
    switch: str
    env: dict[str, str] = field(default_factory=dict)  # of what is started on it

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    def start(self, program: str, *arguments: str | Path, log: Path, env: Mapping[str, str] | None = None) -> Process:
        words = (program, *arguments) if "/" in program else (command(program), *arguments)
        variables = self.env | dict(env or {})
        return Process(IP, "netns", "exec", self.name, *words, log=log, env=variables)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in self.env} | dict(env or {})
        words = (IP, "netns", "exec", self.name, *words)
        return subprocess.run(words, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=DEADLINE_S)

    def run_python(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        done = self.run(sys.executable, "-c", code, *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cut(self) -> None:
        _ip("-n", self.switch, "link", "set", f"port{self.number}", "down")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", f"port{self.number}", "up")

    def slow_down(self, rate: str) -> None:
        """Send no more per second than this, in the words of `tc`."""
        limits = ("tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        done = self.run(TC, "qdisc", "add", "dev", "eth0", "root", *limits)
        assert done.returncode == 0, done.stderr

    def num_received(self) -> int:
        """Bytes that have come over the network."""
        return int(self.run("cat", "/sys/class/net/eth0/statistics/rx_bytes").stdout)

    def listening(self) -> set[str]:
        """Addresses, each with its port, at which something can be reached from outside."""
        lines = self.run("ss", "-Htln").stdout.splitlines()
        addresses = {line.split()[3] for line in lines}
        return {address for address in addresses if not address.startswith(("127.", "[::1]", "[::ffff:127."))}


@contextmanager
def open_machines(count: int, **env: str) -> Iterator[list[Machine]]:
    tag = f"trireme-{os.getpid()}"
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{tag}-switch"))
        _ip("-n", switch, "link", "add", "sw", "type", "bridge")
        _ip("-n", switch, "link", "set", "sw", "up")
        yield [stack.enter_context(_machine(number, f"{tag}-{number}", switch, env)) for number in range(count)]


@contextmanager
def _machine(number: int, name: str, switch: str, env: dict[str, str]) -> Iterator[Machine]:
    with _namespace(name):
        machine = Machine(number, name, switch, dict(env))
        port = f"port{number}"
        _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", port, "master", "sw")
        _ip("-n", switch, "link", "set", port, "up")
        _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        yield machine


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    done = subprocess.run([IP, *words], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
