"""Agent programs play rollouts: unmodified, through the API that their SDK knows, and every token is the policy's."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from support.processes.stage import until
from support.runs.agent_play import ENDS, TASKS, ScriptedPolicy, assert_exact, calls, player
from support.runs.real_run import is_alive
from support.runs.toy_environments import never, open_toy, running, with_environment, write
from trireme.base.errors import ConfigError, DeadlineExceeded, PeerDied
from trireme.config.orchestrator import Agent, Environment
from trireme.journal.turns import compare_turns, read_turns, turns_file
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.programs import AgentPrograms
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import RunTask
from trireme.tools.environments.check import check_solutions
from trireme.tools.environments.sessions import Spread
from trireme_worker.agents import harbor, programs, runtime, sandbox
from trireme_worker.agents.agent import AgentAdapter, AgentPlayed, read_file, written_since

LOOP = """
    # As any agent: ask, run what the model calls for, return the result, until it calls for nothing.
    import json, os, subprocess, sys, urllib.request

    def ask(messages, **more):  # without an SDK, which takes a second to import
        body, headers = json.dumps({"messages": messages, **more}), {"x-api-key": os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        answer = urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers))
        return json.load(answer)["choices"][0]["message"]

    def run(arguments):
        command = json.loads(arguments)["cmd"]
        return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "done"

    HI = [{"role": "user", "content": "hi"}]
    SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
"""
CHAT = """
    messages = [{"role": "user", "content": sys.argv[1]}]
    while True:
        message = ask(messages, tools=TOOLS)
        calls, text = message.get("tool_calls") or [], (message["content"] or "").strip()
        for call in calls:  # whose arguments it returns in another form
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
        messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        if not calls:
            break
        results = [(call["id"], run(call["function"]["arguments"])) for call in calls]
        messages += [{"role": "tool", "tool_call_id": id, "content": result} for id, result in results]
    print(text)
"""
SPEC = RolloutSpec("train", 0, 0, name="0-0")
SANDBOX = Agent(command=("true",), runtime="sandbox").model_dump(mode="json") | {"folders": "/none", "programs": ""}
SHIPPED_TASKS = str(Path(__file__).parents[3] / "environments" / "examples" / "harbor_tasks")
WRITES = calls("bash", cmd="echo 5 > sum.txt")


@pytest.fixture
def play(tmp_path):
    return player(tmp_path)


def agent(*parts: str) -> str:
    return "".join(map(textwrap.dedent, (LOOP, *parts)))


def test_env_check_counts_turns_branches_and_drift_of_agent_programs(play):
    watches, title = [], "ask([{'role': 'system', 'content': 'Title?'}, *HI])"
    rollouts, policy = play(agent(title, CHAT), WRITES, ENDS, count=2, watches=watches)
    for rollout in rollouts:  # which see nothing of each other
        assert (rollout.reward, rollout.metrics["exit_code"]) == (1.0, 0.0)
        assert (rollout.stop, rollout.num_turns) == ("agent_ended", 3)
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[0]["tool_calls"][0]["function"]["name"] == "bash"

    def report(**changed):
        outcome = RolloutOutcome(SPEC, 1.0, msgspec.structs.replace(rollouts[0], **changed))
        return watches[0].report([outcome])

    found, talk = report(), rollouts[0].samples[1]
    lengths = sorted(len(prompt) for prompt, _ in policy.given)
    assert (found.turns, found.prompt, found.unit) == (3, Spread(lengths[2], lengths[4]), "tokens")
    assert found.branches == {"first request": 1, "new conversation": 1}
    assert (found.without_tools, found.most_tools, found.system) == (1, 1, Spread(0, len("Title?")))
    assert min(found.model_s.median, found.outside_s.median) > 0
    assert (found.continuing, found.drift) == (1, 0)
    for place in np.flatnonzero(talk.loss_mask):  # each token of each turn counts
        ids = talk.ids.copy()
        ids[place] += 1
        assert report(samples=[msgspec.structs.replace(talk, ids=ids)]).drift == 1


SHOWS = """
    import pathlib
    shown = {"args": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read(), "here": sorted(os.listdir())}
    pathlib.Path(%r).write_text(json.dumps(shown))
    pathlib.Path("made").mkdir()
    pathlib.Path("made/here").write_text("hi")
    ask(HI)
    sys.exit(3)
"""


def test_a_program_gets_its_task_and_no_secret_of_the_run(play, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("TRIREME_TOKEN", "t" * 40)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "readme.txt").write_text("hi")
    (rollout,), _ = play(
        agent(SHOWS % str(tmp_path / "shown")),
        command=(sys.executable, str(tmp_path / "agent.py"), "{file}: {prompt}", '{"a": "{base_url}"}', "{unknown}"),
        env={"MY_URL": "{gateway}/s/{api_key}"}, workdir=str(tmp_path / "start"), stdin="Please: {day}",
        tasks=TASKS.replace('"file":', '"day": __import__("datetime").date(2026, 1, 2), "file":'),
    )  # fmt: skip
    shown = json.loads((tmp_path / "shown").read_text())
    url, key = shown["env"]["OPENAI_BASE_URL"], shown["env"]["OPENAI_API_KEY"]
    assert shown["args"] == ["sum.txt: Write 5 into sum.txt.", f'{{"a": "{url}"}}', "{unknown}"]
    assert (shown["stdin"], shown["here"]) == ('Please: "2026-01-02"', ["readme.txt"])
    assert shown["env"]["MY_URL"] == f"{shown['env']['ANTHROPIC_BASE_URL']}/s/{key}"
    assert "secret" not in str(shown["env"])
    assert "t" * 40 not in str(shown["env"])
    assert rollout.metrics["exit_code"] == 3.0
    assert (rollout.info["exit_code"], rollout.info["files"]) == (3, {"made/here": 2})  # not those that were copied
    assert not Path(shown["env"]["HOME"]).exists()  # its folder is removed
    with pytest.raises(httpx.ConnectError):  # and so is the server, with the environment
        httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"})


LEAVES = """
    ask(HI)
    def leave(*command, is_deaf=False, **how):  # a process that is an orphan in a session of its own
        if os.fork() == 0:
            os.setsid()
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else signal.SIG_DFL)
            print(subprocess.Popen(command, **how).pid, file=open("left", "a"))
            os._exit(0)
        os.wait()
    leave("sleep", "600", is_deaf=True)
    leave("sleep", "600", env={})
    leave("sleep", "600", env={}, is_deaf=True)
    leave("sleep", "0", env={})
    print("x" * 500_000 + "END", flush=True)
"""


def test_what_a_program_has_left_behind_is_ended_with_its_rollout(play):
    more = """
        left = (folder / "left").read_text().split()
        left = [pid for pid in left if file.joinpath("/proc", pid).exists()]
        return {"left": len(left), "ends": output.endswith("END\\n"),"""
    (rollout,), _ = play(agent(LEAVES), tasks=TASKS.replace("        return {", more))
    assert rollout.metrics["left"] == 0  # processes, and those that have ended and were not waited for
    assert (rollout.stop, rollout.metrics["exit_code"], rollout.reward) == ("agent_ended", 0.0, 0.0)
    assert (rollout.metrics["ends"], rollout.metrics["output"] <= 130_000) == (1.0, True)


RUNS_ONE = """
import asyncio, ctypes, pathlib, sys
from trireme_worker.agents.runtime import Program, Subprocess
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
here, variables = pathlib.Path.cwd(), {"PATH": "/bin:/usr/bin", "RUNNER": str(pathlib.os.getpid())}
program = Program(here, ["sh", "-c", sys.argv[1]], variables, here)
asyncio.run(Subprocess({"runtime": "subprocess"}).run(program, timeout_s=60))
"""
LEAVES_ONE = "setsid env -i sleep 600 & echo $! > left; while grep -q . /proc/$!/environ; do :; done; "


@pytest.mark.parametrize("kills", ["kill -9 $PPID", "kill -9 $RUNNER; sleep 600"], ids=["its launcher", "what runs it"])
def test_a_program_that_kills_its_parents_leaves_nothing_behind(tmp_path, kills):
    command = [sys.executable, "-c", RUNS_ONE, LEAVES_ONE + kills]
    assert subprocess.run(command, cwd=tmp_path, stderr=subprocess.DEVNULL).returncode != 0
    until(lambda: not is_alive((tmp_path / "left").read_text()))


LEAVES_A_REQUEST = """
    import socket
    said = ask(HI)
    socket.setdefaulttimeout(0.1)  # its second turn comes later
    ask([*HI, said, *HI])
"""
AWAITS_A_TURN = """
    import asyncio, pathlib
    from trireme.journal.turns import read_turns
    def dataset():
        return [{"prompt": "hi"}]
    async def reward():
        here = pathlib.Path(__file__).parent
        (here / "scoring").touch()
        while sum(len(read_turns(file)) for file in here.glob("journal/turns/*.turns")) < 2:
            await asyncio.sleep(0.01)
        return 1.0
"""


def test_a_turn_that_no_program_has_received_is_not_trained_on(play, tmp_path):
    class Policy(ScriptedPolicy):
        async def generate(self, ids, sampling, **more):
            while self.given and not (tmp_path / "scoring").exists():
                await asyncio.sleep(0.01)
            return await super().generate(ids, sampling, **more)

    policy = Policy(ChatTokenizer(tmp_path / "tokenizer"), [ENDS])
    (rollout,), _ = play(agent(LEAVES_A_REQUEST), policy=policy, tasks=AWAITS_A_TURN, journal=tmp_path / "journal")
    (sample,), (prompt, turn) = rollout.samples, policy.given[0]
    assert (rollout.num_turns, sample.ids.tolist()) == (1, prompt + turn.ids)
    assert [len(prompts) for prompts in rollout.left_out.values()] == [1]


def test_a_folder_that_a_program_has_made_read_only_is_removed(tmp_path, monkeypatch):
    user = os.geteuid()
    monkeypatch.chdir(tmp_path)  # an ordinary user may not come here from above
    (cache := Path("rollout/go/pkg/mod")).mkdir(parents=True)
    (cache / "m.go").touch()
    (cache / "away").symlink_to("/")
    for path in (Path(), *Path().rglob("*")):
        os.chown(path, user or 65534, -1, follow_symlinks=False)
    cache.chmod(0o555)
    os.seteuid(user or 65534)
    try:
        runtime.remove_folder(Path("rollout"))
    finally:
        os.seteuid(user)
    assert not os.listdir()


def test_folders_too_deep_for_python_to_walk_are_looked_at_and_removed(tmp_path):
    (tmp_path / "first.txt").touch()
    below = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=below)
        above, below = below, os.open("d", os.O_RDONLY, dir_fd=below)
        os.close(above)
    os.close(below)
    assert written_since(0, tmp_path) == {"first.txt": 0}
    runtime.remove_folder(tmp_path / "d")
    assert os.listdir(tmp_path) == ["first.txt"]


def test_a_reward_reads_no_file_but_a_regular_small_one_of_its_folder(tmp_path):
    work = tmp_path / "work"
    (work / "below").mkdir(parents=True)
    for file in (tmp_path / "secret", work / "below" / "a.txt"):
        file.write_bytes(b"5\xff")
    for name, target in {"link": "../secret", "away": "..", "here": "below", "self": "below/a.txt"}.items():
        (work / name).symlink_to(target)
    os.truncate(work / "below" / "a.txt", 10)
    (work / "sparse").touch()
    os.truncate(work / "sparse", 100 << 30)
    os.mkfifo(work / "pipe")
    assert read_file(work, "below/a.txt", 10) == "5\ufffd" + 8 * "\0"
    names = ("link", "away/secret", "here/a.txt", "self", "../secret", str(tmp_path / "secret"), "sparse", "pipe")
    refused = dict.fromkeys((*names, "below", "below/", "none", "", "\0", "x" * 300, "below/a.txt/"))
    assert {name: read_file(work, name) for name in refused} == refused
    assert read_file(work, "below/a.txt", 9) is None
    work.rename(tmp_path / "moved")
    work.symlink_to("moved")
    assert (read_file(work, "below/a.txt"), written_since(0, work)) == (None, {})


BRANCHES = """
    def say(*texts, **more):
        roles = ["user", "assistant", "user", "assistant", "user"]
        ask([{"role": role, "content": text} for role, text in zip(roles, texts)], **more)
    say("a", tools=TOOLS)
    say("a", "Yes.", "b", tools=TOOLS)
    say("a", "Yes.", "b", "Yes.", "c", tools=TOOLS)
    say("summary", tools=TOOLS)  # as after a compaction
    say("A title?")
    say("A title?", "Yes.", "Short!")
"""


@pytest.mark.parametrize(("choice", "turns"), [("main", 3), ("last", 1)])
def test_the_user_chooses_which_branch_trains(play, choice, turns):
    (rollout,), policy = play(agent(BRANCHES), "Yes.<|im_end|>", train=choice, only_with_tools=True)
    (sample,) = rollout.samples
    assert (rollout.num_turns, int(sample.loss_mask.sum())) == (6, turns * len(policy.given[0][1].ids))


ASKS_ON = """
    for number in range(3):
        try:
            ask([{"role": "user", "content": str(number)}])
        except urllib.error.HTTPError as error:
            sys.exit(7 if error.code == 403 else 1)
"""


def test_agent_program_gets_no_turn_beyond_max_turns(play):
    (rollout,), policy = play(agent(ASKS_ON), max_turns=2)
    assert (rollout.metrics["exit_code"], len(policy.given)) == (7.0, 2)
    with pytest.raises(RolloutFailed, match="Nothing was sampled"):
        play("print('I know everything.')")


@pytest.mark.parametrize(
    ("tasks", "changed", "words"),
    [
        (TASKS + "\n    def respond(completion):\n        return None\n", {}, "`respond`"),
        (TASKS.replace("exit_code, output", "exit_code, result"), {}, "asks for result"),
        (TASKS, {"workdir": "/no/such/folder"}, r"`agent\.workdir` is '/no/such/folder'"),
        (TASKS, {"runtime": "docker"}, r"without `agent\.image`"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rollout(tasks, changed, words):
    exec(textwrap.dedent(tasks), source := {})
    with pytest.raises(Exception, match=words):
        AgentAdapter(source, args={}, versions={}, agent=SANDBOX | changed)


def test_a_folder_that_shows_the_tests_of_a_task_is_refused():
    agent = SANDBOX | {"readable": [SHIPPED_TASKS]}
    with pytest.raises(PermissionError, match=r"`agent\.readable` names .*/count-errors/tests"):
        harbor.HarborAdapter(SHIPPED_TASKS, versions={}, agent=agent)


def test_a_program_that_is_not_there_is_a_configuration_error(play):
    with pytest.raises(ConfigError, match="was not found"):
        play("", command=("no-such-program",))


def test_turns_that_were_sampled_before_a_crash_are_not_sampled_again(play, tmp_path):
    journal, texts = tmp_path / "journal", (calls("bash", cmd="echo 4 > sum.txt"), WRITES, ENDS)
    broken = ScriptedPolicy(ChatTokenizer(tmp_path / "tokenizer"), list(texts), fails_after=2)
    with pytest.raises(DeadlineExceeded):
        play(agent(CHAT), policy=broken, journal=journal)
    (rollout,), resumed = play(agent(CHAT), *texts, journal=journal)
    assert (rollout.reward, len(resumed.given)) == (1.0, 1)  # the last turn alone
    resumed.given[:0] = broken.given
    assert_exact(rollout, resumed, num_turns=3)
    (sample,) = rollout.samples
    logprobs = [logprob for _, turn in resumed.given for logprob in turn.logprobs]
    assert sample.logprobs[sample.loss_mask == 1].tolist() == np.float32(logprobs).tolist()
    (other,), _ = play(agent(CHAT).replace("sys.argv[1]", "'else'"), *texts, journal=journal)  # it does something else
    compared, unused = compare_turns(other.samples, read_turns(turns_file(journal, "0-0", 0)))
    assert [turn.difference for turn in compared] == [""] * 3
    assert other.left_out == {"not used when played again": sorted(turn.prompt for turn in unused)}
    assert len(unused) == 3


DIES_ONCE = """
    import pathlib, signal, time
    first = pathlib.Path(%r)
    ask(HI)
    if not first.exists():
        first.write_text(str(os.getpid()))
        runs_programs = open(f"/proc/{os.getppid()}/stat").read().split()[3]
        os.kill(int(runs_programs), signal.SIGKILL)
        time.sleep(600)
"""


def test_a_worker_that_dies_costs_no_turn(play, tmp_path):
    (rollout,), policy = play(agent(DIES_ONCE % str(tmp_path / "first")), journal=tmp_path / "journal")
    assert (rollout.metrics["exit_code"], rollout.num_turns, len(policy.given)) == (0.0, 1, 1)
    assert not is_alive((tmp_path / "first").read_text())  # it would work in its successor's folder


def test_cancelled_rollout_ends_its_program_if_its_worker_is_dead(tmp_path):
    async def cancel(environment):
        running = asyncio.create_task(environment.run(Session(RunTask(task="0-0.0", index=0), never)))
        while not started.exists():
            await asyncio.sleep(0.01)
        (worker,) = environment._workers
        os.kill(worker.pid, signal.SIGKILL)
        while worker.is_ready:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        os.kill(environment._programs._process.pid, signal.SIGSTOP)  # ending programs may take long
        try:
            running.cancel()
            for _ in range(20):  # meanwhile others get a thread, such as the journal
                await asyncio.to_thread(os.getpid)
        finally:
            os.kill(environment._programs._process.pid, signal.SIGCONT)
        await asyncio.wait({running})
        assert not is_alive(started.read_text())
        assert not (folders / "0-0.0").exists()

    started, folders = tmp_path / "started", tmp_path / "logs" / "agents" / "toy"
    (folders / ".0-9.0.1.gone").mkdir(parents=True)  # that a process which was killed had yet to delete
    command = ("sh", "-c", f"echo $$ > {started}.part; mv {started}.part {started}; exec sleep 600")
    with_environment(tmp_path, write(tmp_path, TASKS), cancel, agent={"command": command}, num_workers=1)
    assert os.listdir(folders) == []


def test_rollout_under_removal_runs_no_further_step(tmp_path, monkeypatch):
    parent, path, deletes = tmp_path / "0-0.0", str(tmp_path / "socket"), threading.Event()
    monkeypatch.setattr(programs, "remove_folder", lambda _: deletes.wait(90))
    monkeypatch.setattr(programs.guard, "end_now", lambda: None)  # which would end this process

    async def remove() -> None:
        closing, closed = asyncio.Event(), asyncio.Event()

        async def close(*_: object) -> None:
            closing.set()
            await closed.wait()

        monkeypatch.setattr(runtime.Subprocess, "close", close)
        parent.mkdir()
        server = programs._Server(None, str(tmp_path), 0.0)
        asking = programs.Programs({"programs": path, "runtime": "subprocess"}, ())
        program = runtime.Program(parent, ["true"], {}, parent)
        run = partial(asking.run, program, rollout=parent.name, key="", began_ns=0, timeout_s=60.0)
        async with await asyncio.start_unix_server(server._answer, path):
            await run(step="program")
            ending = asyncio.create_task(asking.end(parent.name))
            await closing.wait()
            finding = asyncio.create_task(asking.find(parent.name))  # a worker that plays it again
            with pytest.raises(OSError, match="it was ended"):
                await run(step="tests")
            assert await server._running() == {"running": {}}
            assert not finding.done()
            monkeypatch.setattr(programs, "ANSWER_S", 0.01)
            with pytest.raises(OSError, match=r"'end'.* within 0\.01 s"):
                await asking.end(parent.name)
            closed.set()
            assert (await ending, await finding, parent.exists()) == (True, None, False)
            deletes.set()

    asyncio.run(asyncio.wait_for(remove(), 60))


def test_workers_start_a_single_process_for_agent_programs(tmp_path):
    python, lack = tmp_path / "python", tmp_path / "no-memory"
    python.write_text(f'#!/bin/sh\ntest -e {lack} && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    programs = AgentPrograms(python, folders=tmp_path, log_file=tmp_path / "log", address=("127.0.0.1", 0))

    def running_now() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in children if str(tmp_path) in child.cmdline()]

    programs.open()
    lack.touch()
    (first,) = running_now()
    first.kill()
    first.wait()
    with pytest.raises(PeerDied):
        programs.start()
    lack.unlink()
    with ThreadPoolExecutor() as keepers:
        list(keepers.map(lambda _: programs.start(), range(4)))
    (second,) = running_now()

    async def ask_at_once() -> list[dict]:
        second.suspend()
        asking = [asyncio.create_task(programs._ask({"do": "running"})) for _ in range(200)]
        await asyncio.sleep(0)
        second.resume()
        return await asyncio.gather(*asking)

    assert asyncio.run(ask_at_once()) == [{"running": {}}] * 200
    programs.close()


def test_training_and_evaluation_environments_of_one_name_log_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/{'x' * 90}")  # too long for a socket
    config, logs = Environment(id=write(tmp_path, TASKS), agent={"command": ["true"]}), tmp_path / "logs"

    async def open_both() -> None:
        async with open_environment(config, logs=logs), open_environment(config, logs=logs, is_evaluation=True):
            assert len(list(logs.glob("environment-*-programs.stdout"))) == 2
            assert len(list(logs.glob("environment-*-0.stdout"))) == 2

    asyncio.run(open_both())


LOOKS_AROUND = """
    for path in {home} {secret} /etc/shadow /sys; do [ -e $path ] && echo sees $path; done
    for path in /usr/x /x /dev/x /proc/sys/kernel/domainname {python}/x; do (: >> $path) && echo writes $path; done
    for host in 127.0.0.1/{port} 192.0.2.1/80; do timeout 2 bash -c "exec 3<>/dev/tcp/$host" && echo reaches it; done
    unshare -Ur true && echo privileges; chmod 0666 /dev/null && echo owns a device
    [ $(ls -d /proc/[0-9]* | wc -l) -lt 10 ] || echo sees processes; echo 5 > sum.txt
    for input in /proc/self/fd/0 /dev/stdin; do echo x > $input && echo writes $input; done; echo x >&0 && echo writes
    [ $(ulimit -Hn) -le 1024 ] || echo opens many files; truncate -s 100G large && echo makes it large
"""


@pytest.fixture
def sandboxed(play, tmp_path, monkeypatch):
    """Return what plays a rollout with a program in the sandbox, and shows it that program."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return partial(play, runtime="sandbox", readable=(str(tmp_path / "agent.py"),))


def test_sandboxed_program_reaches_only_the_policy_and_its_folder(sandboxed, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "secret").write_text("42")
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = {"home": tmp_path / "home", "secret": tmp_path / "secret", "python": sys.prefix}
        looks = LOOKS_AROUND.format(**places, port=other.getsockname()[1])
        (rollout,), policy = sandboxed(agent(CHAT), calls("bash", cmd=looks), ENDS)
    assert (rollout.stop, rollout.metrics["exit_code"], rollout.reward) == ("agent_ended", 0.0, 1.0)
    assert rollout.completion[1]["content"] == "done"  # it has printed nothing
    assert_exact(rollout, policy, num_turns=2)


@pytest.mark.parametrize(
    ("grows", "stop", "limits"),
    [
        ("kept = b'1' * (60 << 20); touch(60 << 20)", "agent_memory", {"memory_gib": 0.1}),
        ("os.fork(), os.fork(), touch(60 << 20)", "agent_timeout", {"memory_gib": 0.2, "timeout_s": 5.0}),
        ("for _ in range(40): os.fork() or time.sleep(60)", "agent_processes", {"num_processes": 32}),
        ("kept = [fill(*socket.socketpair()) for _ in range(500)]", "agent_memory", {"memory_gib": 0.1}),
        ("kept = [fill(*socket.socketpair())[1] for _ in range(900)]", "agent_memory", {"memory_gib": 0.1}),
    ],
    ids=["all kinds of memory", "shared memory counts once", "processes", "buffers of sockets", "of closed ones"],
)
def test_a_program_that_takes_too_much_is_ended_and_scored(sandboxed, grows, stop, limits):
    program = f"""
import contextlib, mmap, socket, time
shared = mmap.mmap(-1, 60 << 20)
def touch(size):
    shared[:size:4096]
def fill(a, b):
    a.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while a.send(bytes(1 << 16)):
            pass
    return a, b
ask(HI)
{grows}
time.sleep(60)
"""
    (rollout,), _ = sandboxed(agent(program), **limits)
    assert (rollout.stop, rollout.metrics["exit_code"], rollout.reward) == (stop, -1.0, 0.0)


def test_a_program_that_cannot_be_started_in_the_sandbox_fails_its_rollout(tmp_path):
    program = runtime.Program(tmp_path, ["/bin/echo", "\0"], {}, Path("/"))
    with pytest.raises(OSError, match="could not run the program: ValueError: embedded null byte"):
        asyncio.run(runtime.make_runtime(SANDBOX, []).run(program, timeout_s=60))


@pytest.mark.parametrize(
    ("mode", "writable", "words"),
    [(0o755, "", "private folder"), (0o700, "/..", "may not be written"), (0o700, "/link", "may not be written")],
)
def test_the_sandbox_writes_to_no_folder_but_a_private_one(tmp_path, mode, writable, words):
    folder = tmp_path / "private"
    folder.mkdir(mode=mode)
    (folder / "link").symlink_to(tmp_path)
    order = {"folder": str(folder), "inode": [folder.stat().st_dev, folder.stat().st_ino], "network": False}
    order |= {"readable": [], "writable": [[f"{folder}{writable}", "/app"]]}
    with pytest.raises(PermissionError, match=words):
        list(sandbox.plan(order))


@pytest.fixture
def task(tmp_path):
    """Return what writes a copy of a shipped task, with some of its files changed, and returns its data set."""

    def write_task(name: str = "count-errors", **files: str) -> str:
        folder = tmp_path / "tasks" / name
        shutil.copytree(f"{SHIPPED_TASKS}/count-errors", folder)
        for name, text in files.items():
            (folder / name.replace("__", "/").replace("_", ".")).write_text(text)
        return str(folder.parent)

    return write_task


def test_a_program_solves_a_task_folder_and_its_own_tests_give_the_reward(sandboxed):
    looks = "ls /tests /solution /logs/verifier; ls; echo 1 > /logs/verifier/reward.txt; ls /logs/agent"
    shows = calls("bash", cmd=f"({looks}) 2>/dev/null; pwd"), calls("bash", cmd="echo 3 > answer.txt"), ENDS
    (rollout,), policy = sandboxed(agent(CHAT), *shows, id=SHIPPED_TASKS)
    assert (rollout.reward, rollout.example_id) == (1.0, "count-errors")
    assert rollout.metrics == {"untouched": 1.0, "tests_ended": 1.0}
    assert rollout.completion[1]["content"] == "logs\n/app\n"
    assert_exact(rollout, policy, num_turns=3)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"environment__Dockerfile": "FROM debian\nRUN apt-get install -y gcc\n"}, "has 'RUN apt-get"),
        ({"environment__Dockerfile": "FROM debian\nWORKDIR /app\nCOPY a.log /etc/\n"}, "copies to /etc/"),
        ({"environment__Dockerfile": "FROM debian\nWORKDIR /tests\n"}, "working folder is /tests"),
        ({"task_toml": "[[steps]]\nname = 'one'\n"}, "several steps"),
        ({"task_toml": "[environment]\ngpus = 1\n"}, "gpus"),
        ({"task_toml": "[environment]\nenv = { KEY = '${KEY}' }\n"}, "the variable KEY"),
        ({"task_toml": "[environment]\nenv = { PORT = 8080 }\n"}, "cannot be read.*PORT is 8080"),
        ({"task_toml": "[environment]\ndocker_image = '--volume=/:/host'\n"}, "docker_image is '--volume"),
        ({"task_toml": "[verifier.environment]\ncpus = 1\n"}, "an environment of their own"),
        ({"task_toml": "[agent]\nuser = 'ann'\n"}, "as the user ann"),
        ({"task_toml": "[agent]\ntimeout_sec = 'long'\n"}, "cannot be read"),
        ({"task_toml": "[agent]\ntimeout_sec = nan\n"}, "timeout_sec is nan, expected a number above 0"),
        ({"task_toml": "[verifier]\ntimeout_sec = inf\n"}, "timeout_sec is inf"),
        ({"task_toml": "[environment]\nmemory_mb = -1\n"}, "memory_mb is -1"),
        ({"task_toml": "[environment]\ncpus = 0\n"}, "cpus is 0"),
        ({"task_toml": f"[environment]\ncpus = 1{'0' * 400}\n"}, "cannot be read: OverflowError"),
        ({"task_toml": "[environment]\nos = 3\n"}, "cannot be read: AttributeError"),
        ({"name": "count-errors\udce9"}, "cannot be read: UnicodeEncodeError"),
    ],
)
def test_a_task_that_cannot_be_run_is_named_with_the_reason(task, files, words):
    with pytest.raises(ValueError, match=f"count-errors.*{words}"):
        harbor.HarborAdapter(task(**files), versions={}, agent=SANDBOX)


@pytest.mark.parametrize("copied", ["keys /app/out/x", "b .", "x x"])
def test_harbor_task_never_writes_outside_its_folder_through_a_link(tmp_path, task, copied):
    (outside := tmp_path / "outside").mkdir()
    (outside / "x").write_text("ours")
    folder = task(environment__Dockerfile=f"FROM x\nWORKDIR /app\nCOPY a .\nCOPY {copied}")
    environment = Path(folder, "count-errors", "environment")
    for place in ("a", "b/out"):
        (environment / place).mkdir(parents=True)
    for file in ("keys", "b/out/x", "x"):
        (environment / file).write_text("theirs")
    (environment / "a" / "out").symlink_to(outside)
    (environment / "a" / "x").symlink_to(outside / "x")
    adapter = harbor.HarborAdapter(folder, versions={}, agent=SANDBOX)
    played = AgentPlayed(adapter.train[0], 0, [], 0, folder=tmp_path / "rollout" / "work")
    with pytest.raises(ValueError, match="follows a link"):
        adapter._place(played, {})
    assert [(file.name, file.read_text()) for file in outside.iterdir()] == [("x", "ours")]


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "environment/Dockerfile", "environment", "tests"])
def test_a_task_whose_files_lie_outside_of_its_folder_is_refused(task, tmp_path, name):
    linked, outside = Path(task(), "count-errors", name), tmp_path / "outside"
    linked.rename(outside)
    linked.symlink_to(outside)
    with pytest.raises(ValueError, match=f"count-errors.*cannot be read.*{name} leads to .*outside"):
        harbor.HarborAdapter(str(tmp_path / "tasks"), versions={}, agent=SANDBOX)


def test_env_check_names_tasks_whose_tests_cannot_judge_a_solution(tmp_path, task):
    async def check(environment):
        return await check_solutions(environment, Extent("train", range(5), 1))

    changed = {
        "a-good": {},
        "b-unsolved": {"solution__solve_sh": "true"},
        "c-given": {"tests__test_sh": "echo 1 > /logs/verifier/reward.txt"},
        "d-silent": {"tests__test_sh": "true"},
        "e-hangs": {"tests__test_sh": "sleep 60", "task_toml": "verifier = { timeout_sec = 1 }"},
    }
    for name, files in changed.items():
        folder = task(name, **files)
    with running(open_toy(tmp_path, folder, agent={"command": ("true",), "runtime": "sandbox"})) as on:
        earned, troubles = on(check)
    assert sorted(earned) == ["nothing", "oracle"]
    assert [f"{trouble.stage}: {trouble.error.partition(' - ')[0]}" for trouble in troubles] == [
        "oracle: task b-unsolved: its own solution earned 0",
        "oracle: example 3 (score: RewardError: tests/test.sh ended with code 0 and wrote no "
        "/logs/verifier/reward.txt or reward.json",
        "oracle: task e-hangs: its own solution earned 0",
        "nothing: task c-given: no solution at all earned 1",
    ]


ENGINE = """
    # A container engine whose containers are folders: their absolute paths are below ROOT, their processes run here.
    import json, os, pathlib, re, shutil, subprocess, sys
    ROOT = pathlib.Path(os.environ["FAKE_ENGINE"])
    words = sys.argv[1:]
    assert "ANSWER" not in os.environ  # a task's variables are not for the engine's own program
    with open(ROOT / "calls", "a") as file:
        file.write(json.dumps(words) + "\\n")
    def inside(path):
        return str(ROOT / path.lstrip("/")) if re.match("/(app|tests|logs|solution)|/.*/agents/", path) else path
    if words[0] == "cp":
        source, target = (inside(word.partition(":")[2]) if word.startswith("trireme-") else word for word in words[1:])
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif words[0] == "exec":
        place = next(i for i, word in enumerate(words) if word.startswith("trireme-"))
        given = [value.partition("=") for option, value in zip(words[:place], words[1:]) if option == "--env"]
        env = {name: value if sign else os.environ[name] for name, sign, value in given}
        cwd = inside(dict(zip(words[:place], words[1:])).get("--workdir") or (ROOT / "workdir").read_text())
        os.makedirs(cwd, exist_ok=True)
        command = [inside(word) for word in words[place + 1 :]]
        sys.exit(subprocess.run(command, cwd=cwd, env={"PATH": os.environ["PATH"]} | env).returncode)
    elif words[0] == "build":
        (ROOT / "workdir").write_text(re.search("WORKDIR (.+)", pathlib.Path(words[-1], "Dockerfile").read_text())[1])
    elif words[:2] == ["container", "inspect"]:
        print((ROOT / "workdir").read_text())
    elif words[0] == "ps":
        print("leftover")
    sys.exit(words[:2] == ["image", "inspect"])
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Put a fake `docker` into PATH. Return what reads how it was called."""
    (root := tmp_path / "engine").mkdir()
    (root / "docker").write_text(f"#!{sys.executable} -IS\n{textwrap.dedent(ENGINE)}")  # it starts sooner
    (root / "docker").chmod(0o755)
    (root / "workdir").write_text("/")
    monkeypatch.setenv("FAKE_ENGINE", str(root))
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    monkeypatch.setenv("OPENAI_API_KEY", "a secret of the run")
    return lambda: [json.loads(line) for line in (root / "calls").read_text().splitlines()]


def test_a_program_runs_in_a_container_that_is_removed_with_its_rollout(play, engine):
    more = {"runtime": "docker", "image": "agents:1", "network": True, "container_args": ("--cpus=2",)}
    (rollout,), policy = play(agent(CHAT), WRITES, ENDS, **more)
    assert (rollout.stop, rollout.metrics["exit_code"], rollout.reward) == ("agent_ended", 0.0, 1.0)
    assert_exact(rollout, policy, num_turns=2)
    (started,) = (call for call in engine() if "--detach" in call)
    assert started[-6:] == ["--network=host", "--cpus=2", "--entrypoint", "sleep", "agents:1", "infinity"]
    name = started[started.index("--name") + 1]
    order = [call[0] for call in engine() if name in call and call[0] != "exec"]
    assert order == ["rm", "run", "start", "stop", "rm"]
    assert [call[0] for call in engine()[:2]] == ["ps", "rm"]
    assert "leftover" in engine()[1]
    assert "secret" not in str(engine())
    assert "API_KEY=" not in str(engine())


def test_tasks_that_need_an_image_run_in_containers(play, engine, task, caplog, tmp_path):
    files = {
        "environment__Dockerfile": "FROM debian\nRUN apt-get install -y gcc\nWORKDIR /app/repo\n",
        "tests__test_sh": 'cd "$(dirname "$0")" && cat ../app/repo/answer.txt > ../logs/verifier/reward.txt',
        "task_toml": "[agent]\nuser = 'ann'\n[environment]\ncpus = 2\nmemory_mb = 512\nenv = { ANSWER = '3' }\n"
        "allow_internet = false\n",
    }
    shows = calls("bash", cmd="test $FOLDER = /app/repo && echo $ANSWER > answer.txt"), ENDS
    more = {"runtime": "docker", "env": {"FOLDER": "{folder}"}}
    (rollout,), policy = play(agent(CHAT), *shows, id=task(**files), network=True, **more)
    assert rollout.reward == 3.0
    assert_exact(rollout, policy, num_turns=2)
    (built,) = (call for call in engine() if call[0] == "build")
    started = next(call for call in engine() if "--detach" in call)
    assert {built[2], "--memory=512m", "--cpus=2"} <= set(started)
    users = [call[call.index("--user") + 1] for call in engine() if "--interactive" in call and "--user" in call]
    assert users == ["ann"]
    assert "1 tasks of" in caplog.text
    assert "`--network=...` in `agent.container_args`" in caplog.text
    named = SANDBOX | {"runtime": "docker", "container_args": ["--network=inner"], "label": ""}
    assert harbor.HarborAdapter(str(tmp_path / "tasks"), versions={}, agent=named).warning == ""
    asyncio.run(runtime.make_runtime(named, []).open(tmp_path, "image", {}))
    assert engine()[-1][-5:] == ["--network=inner", "--entrypoint", "sleep", "image", "infinity"]
    assert "--network=host" not in engine()[-1]
