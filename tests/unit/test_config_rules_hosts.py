"""A run on several machines: what is refused before anything starts, and who finds out where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN
from trireme.cli.machines import join_network, node_of, nodes_of
from trireme.config.load import load_run_config
from trireme.config.places import NODE, Place, find_node, place_of
from trireme.config.resolve import resolve
from trireme.config.rules import check, launch_problems
from trireme.config.run import RunConfig
from trireme.config.written import Room
from trireme.launch.plan import describe, plan

CPU = Devices(cores=4)
SECRET = "a-token-for-tests-0123456789"
ENV = ("--orchestrator.env", '[{"id": "x"}]', "--model.name", "a/b")
OWN, OTHERS = "127.0.0.1", ("203.0.113.1", "203.0.113.2", "203.0.113.3")  # the others are nobody's: for documentation
SPREAD = ("--device", "cpu", "--hosts.inference", *OTHERS[:2], "--hosts.orchestrator", OTHERS[2])
ALL = (*SPREAD, "--hosts.trainer", OTHERS[2])


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (TOKEN, NODE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)


def resolved(*argv: str, section: Room | None = None, node: int = 0) -> RunConfig:
    config, _ = load_run_config([*ENV, *argv], program="rl", section=section)
    return resolve(config, CPU, section=section, node=node)


def refusal(*argv: str, section: Room | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        check(resolved(*argv, section=section), CPU, section=section)
    return str(error.value)


def not_ready(*argv: str, section: Room | None = None) -> str:
    return "\n".join(launch_problems(resolved(*argv, section=section), CPU, section=section))


# one machine


def test_without_hosts_everything_is_on_loopback_and_nobody_needs_a_token() -> None:
    config = resolved()
    assert config.hosts.are_loopback
    assert config.engine_urls == [f"http://127.0.0.1:{config.inference.server.port}"]
    assert (config.inference.server.host, config.orchestrator.server.host) == (OWN, OWN)
    assert config.run_id == str(config.paths.root.resolve())
    assert TOKEN not in not_ready()
    assert config.ports.ranks is None


def test_the_older_names_of_addresses_still_hold() -> None:
    config = resolved("--ports.host", "203.0.113.1", "--inference.server.host", "203.0.113.2", "--device", "cpu")
    assert config.hosts.orchestrator == "203.0.113.1"
    assert config.hosts.inference == ("203.0.113.2",)
    assert config.inference.server.host == "203.0.113.2"
    assert "two names of one key" in refusal("--ports.host", "127.0.0.2", "--hosts.orchestrator", OWN)


def test_two_servers_on_one_machine_have_ports_of_their_own() -> None:
    two = ("--hosts.inference", "127.0.0.1:8000", "127.0.0.1:8010")
    config = resolved(*two, section="inference", node=1)
    assert config.inference.server.port == 8010
    assert config.engine_urls == ["http://127.0.0.1:8000", "http://127.0.0.1:8010"]
    assert "names 127.0.0.1:8000 2 times" in refusal("--hosts.inference", OWN, "127.0.0.1:8000", section="inference")


# several machines


def test_each_process_listens_at_its_own_address_and_knows_those_of_the_others() -> None:
    config = resolved(*ALL, section="orchestrator")
    assert config.engine_urls == ["http://203.0.113.1:8000", "http://203.0.113.2:8000"]
    check(config, CPU, section="orchestrator")
    here = resolved("--device", "cpu", "--hosts.inference", "127.0.0.2", section="inference")
    assert here.inference.server.host == "127.0.0.2"


def test_where_an_address_is_not_this_machines_own_it_listens_everywhere() -> None:
    """That of a service, or of a router: who comes through it must be heard."""
    assert resolved(*ALL, section="inference").inference.server.host == "0.0.0.0"
    assert resolved(*ALL, section="orchestrator").orchestrator.server.host == "0.0.0.0"
    told = ("--inference.server.host", "127.0.0.3")
    assert resolved(*ALL, *told, section="inference").inference.server.host == "127.0.0.3"


def test_all_machines_call_the_run_the_same_wherever_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = resolved(*ALL).run_id
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolved(*ALL).run_id == first


@pytest.mark.parametrize("section", [None, "inference", "orchestrator", "trainer"])
def test_nothing_is_within_reach_of_strangers_without_a_token(
    section: Room | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = not_ready(*ALL, section=section)
    assert "there is no token" in message
    assert "openssl rand -hex 32" in message
    monkeypatch.setenv(TOKEN, SECRET)
    assert "token" not in not_ready(*ALL, section=section)


def test_a_server_that_is_told_to_listen_everywhere_needs_a_token_on_one_machine_too() -> None:
    message = not_ready("--inference.server.host", "0.0.0.0")
    assert "inference.server.host = 0.0.0.0 can be reached from other machines" in message


@pytest.mark.parametrize("bad", ["short", "with spaces in the middle of it", "ünsafe-in-a-header-000000"])
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused_without_being_shown(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, bad)
    message = not_ready(*ALL)
    assert f"the token in {TOKEN} has {len(bad)} characters" in message
    assert bad not in message


def test_a_token_may_lie_in_a_file_and_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    flags = (*ALL, "--hosts.token-file", str(file))
    assert "cannot be read" in not_ready(*flags)
    file.write_text("\n")
    assert "is empty" in not_ready(*flags)
    file.write_text(f"{SECRET}\n")
    assert "token" not in not_ready(*flags, section="trainer")
    monkeypatch.setenv(TOKEN, "another-token-of-the-environment")
    join_network(resolved(*flags), "trainer", 0)
    assert os.environ[TOKEN] == "another-token-of-the-environment"
    monkeypatch.delenv(TOKEN)
    join_network(resolved(*flags), "trainer", 0)
    assert os.environ[TOKEN] == SECRET
    assert SECRET not in resolved(*flags).model_dump_json()
    monkeypatch.delenv(TOKEN)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hosts.inference", "http://203.0.113.1:8000"), "expected an address or a name"),
        (("--hosts.inference", "203.0.113.1:port"), "expected an address or a name"),
        (("--hosts.inference", "0.0.0.0"), "others cannot reach that"),
        (("--hosts.inference", "fe80::1"), "expected an IPv4 address or a name"),
        (("--hosts.trainer", "203.0.113.1:5556"), "expected no port"),
        (("--hosts.orchestrator", "203.0.113.1:5555"), "expected no port"),
    ],
)
def test_what_is_no_address_is_named_with_what_to_write(flags: tuple[str, ...], words: str) -> None:
    message = refusal("--device", "cpu", *flags)
    assert words in message
    assert 'Write "10.0.0.2"' in message


def test_loopback_beside_other_machines_is_refused() -> None:
    message = refusal(*SPREAD)
    assert "127.0.0.1 in hosts.trainer" in message
    assert "addresses by which all machines reach each other" in message


def test_machines_do_not_each_answer_for_their_own_device() -> None:
    with pytest.raises(ConfigError, match=r"`device` is left open[\s\S]*Write `device = \"cuda\"`"):
        resolved(*ALL[2:])


def test_memory_of_a_gpu_is_not_shared_between_machines() -> None:
    assert "ipc works between processes of one machine" in refusal(*ALL, "--weight-broadcast.type", "ipc")


def test_rl_says_what_to_type_on_which_machine() -> None:
    message = not_ready(*ALL)
    assert "uv run inference @ FILE   # on 203.0.113.1\n" in message
    assert "uv run orchestrator @ FILE   # on 203.0.113.3\n" in message
    assert "uv run trainer @ FILE   # on 203.0.113.3" in message
    assert "--node 1   # on 203.0.113.1:8010" in not_ready(
        "--device", "cpu", "--hosts.inference", "203.0.113.1", "203.0.113.1:8010"
    )
    assert "rl` starts" not in not_ready(*ALL, section="orchestrator")


def test_a_plan_names_the_machines() -> None:
    config = resolved(*ALL, section="trainer")
    shown = describe(plan(config, Path("run.json"), CPU), config, only="trainer")
    assert "inference 203.0.113.1, 203.0.113.2; orchestrator 203.0.113.3; trainer 203.0.113.3" in shown
    here = resolved()
    assert "hosts " not in describe(plan(here, Path("run.json"), CPU), here)


# which one am I


def test_a_machine_finds_itself_by_its_addresses() -> None:
    assert find_node("hosts.inference", ("203.0.113.1", "127.0.0.1:8001", "203.0.113.3"), None) == 1
    assert find_node("hosts.inference", ("203.0.113.1",), None) == 0, "there is no other that it could be"


def test_a_flag_or_the_environment_says_it_where_addresses_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_node("hosts.trainer", OTHERS, 2) == 2
    monkeypatch.setenv(NODE, "1")
    assert find_node("hosts.trainer", OTHERS, None) == 1
    assert find_node("hosts.trainer", OTHERS, 0) == 0
    monkeypatch.setenv(NODE, "first")
    with pytest.raises(ConfigError, match=f"{NODE} = 'first'"):
        find_node("hosts.trainer", OTHERS, None)


@pytest.mark.parametrize(
    ("addresses", "flag", "words"),
    [
        (OTHERS, None, "none of them is this machine"),
        (("127.0.0.1:1", "127.0.0.1:2"), None, "2 of them are this machine"),
        (OTHERS, 3, "a number from 0 to 2"),
    ],
)
def test_where_nothing_tells_it_is_asked_for(addresses: tuple[str, ...], flag: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_node("hosts.trainer", addresses, flag)


def test_a_plan_that_is_only_shown_needs_no_machine() -> None:
    config, invocation = load_run_config([*ENV, *ALL, "--dry-run"], program="inference", section="inference")
    assert node_of(config, "inference", invocation) == 0
    config, invocation = load_run_config([*ENV, *ALL], program="inference", section="inference")
    with pytest.raises(ConfigError, match="--node N"):
        node_of(config, "inference", invocation)


def test_addresses_are_read_with_and_without_a_port() -> None:
    assert place_of("10.0.0.2:8003") == Place("10.0.0.2", 8003)
    assert place_of("node-7.cluster") == Place("node-7.cluster", None)


# ranks


def test_ranks_are_shared_by_machines_and_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--device", "cpu", "--hosts.trainer", "127.0.0.1", "127.0.0.2", "--trainer.num-ranks", "6")
    config = resolved(*flags, section="trainer")
    check(config, CPU, section="trainer")
    monkeypatch.setenv(NODE, "1")
    nodes = nodes_of(config)
    assert nodes is not None
    words = list(nodes.arguments())
    assert dict(zip(words[::2], words[1::2], strict=True)).items() >= {
        ("--nnodes", "2"),
        ("--node-rank", "1"),
        ("--master-addr", "127.0.0.1"),
        ("--master-port", "5557"),
        ("--local-addr", "127.0.0.2"),
    }
    assert nodes_of(resolved(section="trainer")) is None
    assert "equally many ranks on each" in refusal(*flags[:-1], "5", section="trainer")


def test_each_machine_has_a_rank_by_itself_where_nothing_is_said() -> None:
    flags = ("--device", "cpu", "--hosts.trainer", *OTHERS)
    assert resolved(*flags, section="trainer").trainer.num_ranks == 3


def test_where_ranks_meet_is_known_only_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved("--device", "cpu", "--hosts.trainer", "127.0.0.1", "127.0.0.2", section="trainer")
    ids = set()
    for token in (SECRET, "another-token-for-tests-01234"):
        monkeypatch.setenv(TOKEN, token)
        nodes = nodes_of(config)
        assert nodes is not None
        ids.add(nodes.id)
    assert len(ids) == 2
