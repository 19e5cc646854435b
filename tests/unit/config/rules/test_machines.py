"""A run on several machines: what is refused before anything starts, and how a machine finds out which one it is."""

import os
import shlex
from pathlib import Path

import pytest

from support.runs import resolved_runs
from support.runs.resolved_runs import CPU
from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN
from trireme.cli.machines import join_network, node_of, torchrun_arguments
from trireme.config.files import PROCESSES, ProcessName
from trireme.config.load import Invocation, load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import launch_problems, problems
from trireme.config.run import NODE, RunConfig, find_node

SECRET = "a-token-for-tests-0123456789"
MODEL = f"{resolved_runs.ENV} --model.name a/b "
OTHERS = ("203.0.113.1", "203.0.113.2", "203.0.113.3")  # reserved for documentation
SPREAD = f"--device cpu --hosts.inference {OTHERS[0]} {OTHERS[1]} --hosts.orchestrator {OTHERS[2]} "
ALL = f"{SPREAD} --hosts.trainer {OTHERS[2]} "
BAD = ("203.0.113.1:port", "203.0.113.1:65536", "203.0.113.1:0", ":8003")
RANKS = "--device cpu --hosts.trainer 127.0.0.1 127.0.0.2 "


@pytest.fixture(autouse=True)
def _alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, NODE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)


def resolved(flags: str = "", section: ProcessName | None = None) -> RunConfig:
    return resolved_runs.resolved(MODEL + flags, section=section)


def loaded(flags: str, section: ProcessName) -> tuple[RunConfig, ProcessName, Invocation]:
    config, invocation = load_run_config(shlex.split(MODEL + flags), program=section, section=section)
    return config, section, invocation


def not_ready(flags: str = "", section: ProcessName | None = None) -> str:
    return "\n".join(launch_problems(resolved(flags, section), CPU, section=section))


def test_without_hosts_everything_is_on_loopback_and_no_token_is_needed():
    config = resolved()
    assert config.hosts.are_loopback
    assert config.engine_urls == [f"http://127.0.0.1:{config.inference.server.port}"]
    assert (config.inference.server.host, config.orchestrator.server.host) == ("127.0.0.1", "127.0.0.1")
    assert config.run_id == str(config.paths.root.resolve())
    assert TOKEN not in not_ready()
    assert config.ports.ranks is None


def test_inference_server_is_reached_at_the_address_it_binds():
    config = resolved("--inference.server.host 203.0.113.2 --device cpu")
    assert (config.hosts.inference, config.inference.server.host) == (("203.0.113.2",), "203.0.113.2")
    config = loaded("--hosts.inference 127.0.0.1:8000 127.0.0.1:65535", "inference")[0]
    config = resolve(config, CPU, section="inference", node=1)
    assert config.inference.server.port == 65535
    assert config.engine_urls == ["http://127.0.0.1:8000", "http://127.0.0.1:65535"]


def test_process_reached_through_another_address_listens_everywhere():
    """The address of a service or a router is not the machine's own, and clients come through it."""
    config = resolved(ALL, "orchestrator")
    assert config.engine_urls == ["http://203.0.113.1:8000", "http://203.0.113.2:8000"]
    assert problems(config, CPU, section="orchestrator") == []
    assert config.orchestrator.server.host == "0.0.0.0"
    own = {
        f"{ALL} --inference.server.host 127.0.0.3": "127.0.0.3",
        "--device cpu --hosts.inference 127.0.0.2": "127.0.0.2",
    }
    for flags, host in (own | {ALL: "0.0.0.0"}).items():
        assert resolved(flags, "inference").inference.server.host == host


def test_run_id_is_independent_of_the_working_directory(monkeypatch, tmp_path):
    first = resolved(ALL).run_id
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolved(ALL).run_id == first
    for flags in (ALL.replace("--device cpu", ""), "--inference.server.host ::1"):
        with pytest.raises(ConfigError, match=r"names .*, and `device` is not set"):
            resolved(flags)


@pytest.mark.parametrize(
    ("flags", "section", "words"),
    [
        ("--hosts.inference http://203.0.113.1:8000", None, "expected an address or a name, and maybe a port"),
        *((f"--hosts.inference {address}", None, "expected an address or a name, and maybe a port") for address in BAD),
        ("--hosts.inference 0.0.0.0", None, "cannot reach that"),
        ("--hosts.inference fe80::1", None, "expected an IPv4 address or a name"),
        ("--hosts.trainer 203.0.113.1:5556", None, "expected no port"),
        ("--hosts.orchestrator 203.0.113.1:5555", None, "expected no port"),
        ("--hosts.inference 127.0.0.1 127.0.0.1:8000", "inference", "names 127.0.0.1:8000 2 times"),
        (SPREAD, None, "127.0.0.1 in hosts.trainer"),
        (f"{ALL} --weight-broadcast.type ipc", None, "ipc works between processes of one machine"),
        (f"{RANKS} --trainer.num-ranks 5", "trainer", "equally many ranks on each. Set `trainer.num_ranks` to 4 or 6"),
    ],
)
def test_hosts_that_cannot_be_meant_are_refused(flags, section, words):
    config = resolved(f"--device cpu {flags}", section)
    assert words in "\n".join(problems(config, CPU, section=section))


@pytest.mark.parametrize(
    ("flags", "section", "words"),
    [
        *((ALL, section, "there is no token") for section in (None, *PROCESSES)),
        ("--inference.server.host 0.0.0.0", None, "inference.server.host = 0.0.0.0 can be reached"),
    ],
)
def test_process_reachable_from_outside_needs_a_strong_token(flags, section, words, monkeypatch):
    assert words in not_ready(flags, section)
    for bad in ("short", "with spaces in the middle of it", "ünsafe-in-a-header-000000"):
        monkeypatch.setenv(TOKEN, bad)
        message = not_ready(flags, section)
        assert f"the token in {TOKEN} has {len(bad)} characters" in message
        assert bad not in message
    monkeypatch.setenv(TOKEN, SECRET)
    assert "token" not in not_ready(flags, section)


def test_a_token_may_lie_in_a_file_and_the_environment_comes_first(tmp_path, monkeypatch):
    file = tmp_path / "token"
    flags = f"{ALL} --hosts.token-file {file}"
    assert "cannot be read" in not_ready(flags)
    file.write_text("\n")
    assert "is empty" in not_ready(flags)
    file.write_text(f"{SECRET}\n")
    assert "token" not in not_ready(flags, "trainer")
    for given in ("another-token-of-the-environment", None):
        monkeypatch.setenv(TOKEN, given) if given else monkeypatch.delenv(TOKEN)
        join_network(resolved(flags), "trainer", 0)
        assert os.environ[TOKEN] == (given or SECRET)
    assert SECRET not in resolved(flags).model_dump_json()
    monkeypatch.delenv(TOKEN)


def test_rl_names_the_command_of_each_machine():
    message = not_ready(ALL)
    for command, hosts in (("inference", OTHERS[:2]), ("orchestrator", OTHERS[2:]), ("trainer", OTHERS[2:])):
        assert f"uv run {command} @ FILE   # on {', '.join(hosts)}" in message
    assert "rl` starts" not in not_ready(ALL, "orchestrator")


@pytest.mark.parametrize(
    ("addresses", "flag", "variable", "found"),
    [
        (("203.0.113.1", "127.0.0.1:8001", "203.0.113.3"), None, "", 1),
        (("203.0.113.1",), None, "", 0),  # there is no other that it could be
        (OTHERS, 2, "", 2),
        (OTHERS, None, "1", 1),
        (OTHERS, 0, "1", 0),
        (OTHERS, None, "first", "this is node first, and"),
        (OTHERS, None, "", "none of them is this machine"),
        (("127.0.0.1:1", "127.0.0.1:2"), None, "", "2 of them are this machine"),
        (OTHERS, 3, "", "a number from 0 to 2"),
        (OTHERS, -1, "", "a number from 0 to 2"),
    ],
)
def test_a_machine_finds_itself_by_flag_environment_or_addresses(addresses, flag, variable, found, monkeypatch):
    monkeypatch.setenv(NODE, variable)
    if isinstance(found, int):
        assert find_node("hosts.trainer", addresses, flag) == found
    else:
        with pytest.raises(ConfigError, match=found):
            find_node("hosts.trainer", addresses, flag)


def test_a_plan_that_is_only_shown_needs_no_machine():
    assert node_of(*loaded(f"{ALL} --dry-run", "inference")) == 0
    with pytest.raises(ConfigError, match="--node N"):
        node_of(*loaded(ALL, "inference"))


def test_ranks_are_shared_by_machines_and_meet_at_the_first(monkeypatch):
    config = resolved(f"{RANKS} --trainer.num-ranks 6", "trainer")
    assert problems(config, CPU, section="trainer") == []
    monkeypatch.setenv(NODE, "1")
    ids = set()
    for token in (SECRET, "another-token-for-tests-01234"):
        monkeypatch.setenv(TOKEN, token)
        words = torchrun_arguments(config)
        ids.add(words[words.index("--rdzv-id") + 1])
    assert len(ids) == 2, "where ranks meet is known only with the token"
    expected = {"--nnodes": "2", "--node-rank": "1", "--master-addr": "127.0.0.1", "--master-port": "5557"}
    expected |= {"--local-addr": "127.0.0.2", "--nproc-per-node": "3"}
    assert dict(zip(words[::2], words[1::2], strict=True)).items() >= expected.items()
    each = resolved(f"--device cpu --hosts.trainer {' '.join(OTHERS)}", "trainer")
    assert each.trainer.num_ranks == 3, "one on each machine, by default"
    assert torchrun_arguments(resolved(section="trainer")) == []
