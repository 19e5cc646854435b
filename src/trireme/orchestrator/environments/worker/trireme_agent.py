"""A plain environment whose rollouts are played by an agent program, which calls the policy through the gateway.

The program runs in a private folder, with the policy's address and a key in its environment variables. When it has
ended, `reward` is called with what it has parameters for: in addition to those of any plain environment, `folder`
(where the program ran), `exit_code` (None where it took too long) and `output` (the end of what it printed).

Example:
    def dataset():
        return [{"prompt": "Write the sum of 2 and 3 into sum.txt.", "answer": "5"}]

    def reward(folder, answer):
        file = folder / "sum.txt"
        return float(file.exists() and file.read_text().strip() == answer)
"""

import asyncio
import contextlib
import copy
import ctypes
import json
import os
import re
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme_plain import PlainAdapter, Played, to_messages
from trireme_rollout import Ask

ROLLOUT = "TRIREME_ROLLOUT"
"""Environment variable by which all processes of a rollout's program are found. Its value is the rollout's folder."""

LAUNCHER = ("TRIREME_PARENT", "TRIREME_PROCESS")
"""Variables by which the launcher finds all processes of a run."""

KEPT_OUTPUT = 64 << 10
"""Bytes of the program's output that are kept."""

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL, and for what is left of the output."""

REAP_S = 30.0
"""For a killed process to end."""

TRANSCRIPT_TIMEOUT_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36
PLACEHOLDER = re.compile(r"\{(\w+)\}")
UNSAFE = re.compile(r"[^\w.-]")


@dataclass
class AgentPlayed(Played):
    """A rollout whose program has ended."""

    folder: Path = Path()
    exit_code: int | None = None
    output: str = ""


class AgentAdapter(PlainAdapter):
    """Runs an agent program for each rollout."""

    offered = frozenset({"folder", "exit_code", "output"})

    def __init__(self, source: object, *, args: dict, versions: dict[str, str], agent: dict) -> None:
        super().__init__(source, args=args, versions=versions)
        if self._respond is not None or self.group_rewards:
            raise TypeError(
                f"{self.name} has `respond`, or a reward that compares rollouts - expected `dataset` and `reward` "
                "alone, as the agent program takes the turns - remove it, or remove `agent`."
            )
        self._agent = agent
        if shutil.which(agent["command"][0]) is None:
            raise FileNotFoundError(
                f"The agent's program {agent['command'][0]!r} was not found in PATH={os.environ.get('PATH', '')} - "
                "install it, or give its whole path in `command`."
            )

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a program stay below this process
        return super().serving()

    async def play(self, request: dict, ask: Ask) -> AgentPlayed:
        """Run the program. Its requests go to the gateway, not through `ask`."""
        index = request["index"]
        examples = self.eval if request["split"] == "eval" and self.eval else self.train
        example = copy.deepcopy(dict(examples[index]))
        prompt = to_messages(example["prompt"])
        # the same name when it is played again after a crash, as programs put it into their prompts
        parent = Path(self._agent["folders"], UNSAFE.sub("_", request["task"].rpartition(".")[0]))
        played = AgentPlayed(example, index, list(prompt), len(prompt), folder=parent / "work")
        values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in example.items()}
        values |= {
            "prompt": "\n\n".join(message["content"] for message in prompt),
            "gateway": request["gateway"],
            "base_url": f"{request['gateway']}/v1",
            "api_key": request["api_key"],
            "folder": str(played.folder),
            "here": os.getcwd(),
        }
        try:
            await end_processes(parent)  # of a worker that was killed: they would work in the same folder
            await asyncio.to_thread(_make_folder, played.folder, fill_in(self._agent["workdir"] or "", values))
            await self._run(played, values)
            said = await asyncio.to_thread(_read_transcript, request["gateway"], request["api_key"])
        except BaseException:
            await self.dispose(played)
            raise
        if said:
            played.num_prompt = next((place for place, each in enumerate(said) if each["role"] == "assistant"), 0)
            played.messages = said
        return played

    async def _run(self, played: AgentPlayed, values: dict[str, str]) -> None:
        """Run the program to its end, or end it when its time is over."""
        async with _reading() as (write_end, output):
            with tempfile.TemporaryFile() as stdin:
                stdin.write(fill_in(self._agent["stdin"] or "", values).encode())
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *(fill_in(word, values) for word in self._agent["command"]),
                    cwd=played.folder,
                    env=self._variables(played.folder.parent, values),
                    stdin=stdin,
                    stdout=write_end,
                    stderr=write_end,
                    start_new_session=True,
                )
            try:
                async with asyncio.timeout(self._agent["timeout_s"]):
                    played.exit_code = await process.wait()
                played.stop = "agent_ended"
            except TimeoutError:
                played.stop = "agent_timeout"
            finally:
                await end_processes(played.folder.parent)
                async with asyncio.timeout(REAP_S):
                    await process.wait()
        played.output = output.decode(errors="replace")

    def _variables(self, parent: Path, values: dict[str, str]) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in (*self._agent["inherit"], *LAUNCHER) if name in os.environ}
        policy = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_BASE": values["base_url"]}
        policy |= {"OPENAI_API_KEY": values["api_key"], "ANTHROPIC_API_KEY": values["api_key"]}
        policy |= {"ANTHROPIC_BASE_URL": values["gateway"], "HOME": str(parent), "TMPDIR": str(parent)}
        own = {name: fill_in(value, values) for name, value in self._agent["env"].items()}
        return inherited | policy | own | {ROLLOUT: str(parent)}

    def offer(self, played: Played) -> dict[str, Any]:
        assert isinstance(played, AgentPlayed), played
        run = {"folder": played.folder, "exit_code": played.exit_code, "output": played.output}
        return super().offer(played) | run

    def fields(self, played: Played) -> dict[str, Any]:
        assert isinstance(played, AgentPlayed), played
        run = {"exit_code": played.exit_code, "output": played.output[-2000:]}
        return super().fields(played) | {"info": run}

    async def dispose(self, played: Played) -> None:
        assert isinstance(played, AgentPlayed), played
        await asyncio.to_thread(shutil.rmtree, played.folder.parent, ignore_errors=True)


def fill_in(text: str, values: dict[str, str]) -> str:
    """Replace `{name}` by its value. Other braces stay, so that JSON can be written plainly.

    Example:
        fill_in('{"task": "{prompt}"}', {"prompt": "hi"})  # '{"task": "hi"}'
    """
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def _make_folder(folder: Path, template: str) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)  # of an attempt that was interrupted
    folder.parent.mkdir(parents=True, mode=0o700)
    if template:
        shutil.copytree(template, folder, symlinks=True)
    else:
        folder.mkdir()


@contextlib.asynccontextmanager
async def _reading() -> AsyncIterator[tuple[int, bytearray]]:
    """Yield a descriptor for the program's output, and where the end of that is kept.

    A pipe of our own: asyncio takes a process whose children hold its output open for one that has not ended.
    """
    output = bytearray()
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))

    async def keep_end() -> None:
        while data := await reader.read(1 << 16):
            output.extend(data)
            if len(output) > 2 * KEPT_OUTPUT:
                del output[:-KEPT_OUTPUT]

    reading = asyncio.create_task(keep_end())
    try:
        yield write_end, output
    finally:
        os.close(write_end)
        await asyncio.wait({reading}, timeout=GRACE_S)  # all that could write is dead
        reading.cancel()
        transport.close()


async def end_processes(parent: Path) -> None:
    """End all processes of a rollout, also those that left the program's group or have lost their parent.

    Args:
        parent: the rollout's folder.
    """
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, REAP_S)):
        give_up = asyncio.get_running_loop().time() + wait_s
        while pids := await asyncio.to_thread(processes_of, parent):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if asyncio.get_running_loop().time() > give_up:
                break
            await asyncio.sleep(0.05)


def processes_of(parent: Path) -> list[int]:
    """Return the processes that run for a rollout, by a variable that they have inherited."""
    marker = f"{ROLLOUT}={parent}\0".encode()
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if marker in file.read() + b"\0":
                found.append(int(name))
    return found


def _read_transcript(gateway: str, key: str) -> list[dict]:
    """Return the messages of the rollout's longest conversation, as the gateway knows them."""
    request = urllib.request.Request(f"{gateway}/transcript", headers={"x-api-key": key})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TRANSCRIPT_TIMEOUT_S) as answer:
        return json.load(answer)["messages"]
