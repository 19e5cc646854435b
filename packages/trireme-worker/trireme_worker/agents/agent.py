"""A plain environment whose rollouts are played by an agent program, which calls the policy through the gateway.

The program runs in a private folder, with the policy's address and a key in its environment variables. When it has
ended, `reward` is called with what it has parameters for: in addition to those of any plain environment, `read_file`
(which returns the text of a file that the program has written, or None), `folder` (where the program ran), `exit_code`
(None if it took too long) and `output` (the end of what it printed).

Example:
    def dataset():
        return [{"prompt": "Write the sum of 2 and 3 into sum.txt.", "answer": "5"}]

    def reward(read_file, answer):
        return float((read_file("sum.txt") or "").strip() == answer)
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import stat
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trireme_worker.agents.programs import Programs
from trireme_worker.agents.runtime import LAUNCHER, Ended, Program, make_runtime, remove_folder
from trireme_worker.plain import PlainAdapter, Played
from trireme_worker.rollout import Ask

LARGEST_FILE = 1 << 20  # bytes of a file that `read_file` returns, if its caller names no other limit
KEPT_FILES = 50  # files that the program wrote whose names and sizes are kept
MOST_FILES = 10_000  # files of its folder that are looked at

TRANSCRIPT_TIMEOUT_S = 60.0
UNSTARTED = Ended(0, "agent_ended", "")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
UNSAFE = re.compile(r"[^\w.-]")


@dataclass
class AgentPlayed(Played):
    """A rollout whose program has ended."""

    rollout: str = ""  # its name
    key: str = ""  # key of its session at the gateway
    folder: Path = Path()
    began_ns: int = 0  # when its program began, by the clock of the file system
    ended: Ended = UNSTARTED
    files: dict[str, int] = field(default_factory=dict)  # sizes of the files that it wrote, by path
    solve: str = ""  # "oracle" or "nothing": in place of the program


class AgentAdapter(PlainAdapter):
    """Runs an agent program for each rollout."""

    offered = frozenset({"read_file", "folder", "exit_code", "output"})
    player = "the agent program"
    brings_images = False

    def __init__(self, source: object, *, args: dict, versions: dict[str, str], agent: dict) -> None:
        super().__init__(source, args=args, versions=versions)
        self._agent = agent
        self._readable = [fill_in(path, {"here": os.getcwd()}) for path in agent["readable"]]
        self._runtime = make_runtime(agent, self._readable)
        self._programs = Programs(agent, self._readable)
        if agent["runtime"] in ("docker", "podman") and not (agent["image"] or self.brings_images):
            raise ValueError(
                f"`agent.runtime = {agent['runtime']!r}` without `agent.image` - expected the image that holds the "
                "agent's program - add its name."
            )

        workdir = fill_in(agent["workdir"] or "", {"here": os.getcwd()})
        if workdir and not PLACEHOLDER.search(workdir) and not os.path.isdir(workdir):
            raise FileNotFoundError(
                f"`agent.workdir` is {workdir!r} - expected a folder, which is copied for each rollout - correct it."
            )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self._runtime.check()
        async with super().serving():
            yield

    async def play(self, request: dict, ask: Ask) -> AgentPlayed:
        """Run the program. Its requests go to the gateway, not through `ask`."""
        example, index, prompt = self.begin(request)
        if any(isinstance(message["content"], list) for message in prompt):
            raise ValueError(
                "The prompt of this example shows pictures - expected text, which is what an agent program is started "
                "with - put the pictures into `agent.workdir` for the program to send."
            )
        # the same name when it is played again after a crash, as programs put it into their prompts
        rollout = request["task"].rpartition(".")[0]
        parent = Path(self._agent["folders"], UNSAFE.sub("_", rollout))
        played = AgentPlayed(example, index, list(prompt), len(prompt), rollout=rollout, folder=parent / "work")
        played.key, played.solve = request["api_key"], request.get("solve", "")

        # placeholders of the command: fields of the example, which cannot replace the names below
        gateway = self._runtime.gateway(request["gateway"])
        values = {
            name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in example.items()
        }
        values |= {
            "prompt": "\n\n".join(message["content"] for message in prompt),
            "listens": request["gateway"],
            "gateway": gateway,
            "base_url": f"{gateway}/v1",
            "api_key": request["api_key"],
            "folder": str(played.folder),
            "here": os.getcwd(),
        }

        try:
            # a program that was started by a worker that has died is awaited, not started again
            began_ns = await self._programs.find(rollout)
            if began_ns is None:
                await asyncio.to_thread(self._place, played, values)
                await self._runtime.open(parent, *await self._container(played))
                began_ns = parent.stat().st_ctime_ns
            played.began_ns = began_ns
            await self._run(played, values)
            played.stop = played.ended.stop
            played.files = await asyncio.to_thread(written_since, began_ns, played.folder)
            # asked for now, as the session and its conversations end with the rollout
            said = await asyncio.to_thread(_read_transcript, request["gateway"], request["api_key"])
        except BaseException:
            await self.dispose(played)
            raise

        if said:
            played.num_prompt = next((place for place, each in enumerate(said) if each["role"] == "assistant"), 0)
            played.messages = said
        return played

    def _place(self, played: AgentPlayed, values: dict[str, str]) -> None:
        """Make the files that the program finds."""
        parent, template = played.folder.parent, fill_in(self._agent["workdir"] or "", values)
        remove_folder(parent)  # an interrupted attempt may have left it
        parent.mkdir(parents=True, mode=0o700)
        if template:
            shutil.copytree(template, played.folder, symlinks=True)
        else:
            played.folder.mkdir()
        os.utime(parent)  # its change time is now, by the clock of the file system

    async def _container(self, played: AgentPlayed) -> tuple[str | None, dict[str, float]]:
        """Return the image of a rollout's container, and its `cpus` and `memory_mb` if they are not the usual."""
        return self._agent["image"], {}

    async def _run(self, played: AgentPlayed, values: dict[str, str]) -> None:
        """Run the agent's program to its end."""
        parent, policy = played.folder.parent, self._policy(values)
        # the program's home is its private folder, so that settings of this user neither leak nor change
        program = Program(
            parent,
            [fill_in(word, values) for word in self._agent["command"]],
            self._inherited() | {"HOME": str(parent), "TMPDIR": str(parent)} | policy,
            played.folder,
            hidden=list(policy),
            gateway=values["listens"],
            stdin=fill_in(self._agent["stdin"] or "", values),
            writable=[(str(parent), str(parent))],
        )
        played.ended = await self._run_program(played, program, timeout_s=self._agent["timeout_s"])

    async def _run_program(
        self, played: AgentPlayed, program: Program, *, timeout_s: float, step: str = "program"
    ) -> Ended:
        """Run a program of a rollout to its end, in the process that outlives this one. Raises: OSError."""
        which: dict[str, Any] = {"rollout": played.rollout, "key": played.key, "began_ns": played.began_ns}
        return await self._programs.run(program, **which, timeout_s=timeout_s, step=step)

    def _inherited(self) -> dict[str, str]:
        names = (*self._agent["inherit"], *LAUNCHER) if self._runtime.inherits else ()
        return {name: os.environ[name] for name in names if name in os.environ}

    def _policy(self, values: dict[str, str]) -> dict[str, str]:
        """Return the variables by which the program finds the policy, and those that the user gives."""
        policy = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_BASE": values["base_url"]}
        policy |= {"OPENAI_API_KEY": values["api_key"], "ANTHROPIC_API_KEY": values["api_key"]}
        policy |= {"ANTHROPIC_BASE_URL": values["gateway"]}
        return policy | {name: fill_in(value, values) for name, value in self._agent["env"].items()}

    def offer(self, played: Played) -> dict[str, Any]:
        assert isinstance(played, AgentPlayed), played
        run = {"read_file": partial(read_file, played.folder), "folder": played.folder}
        run |= {"exit_code": played.ended.exit_code, "output": played.ended.output}
        return super().offer(played) | run

    def fields(self, played: Played) -> dict[str, Any]:
        assert isinstance(played, AgentPlayed), played
        ended = played.ended
        run = {"exit_code": ended.exit_code, "output": ended.output[-2000:], "seconds": ended.seconds}
        return super().fields(played) | {"info": run | {"files": played.files}}

    async def dispose(self, played: Played) -> None:
        assert isinstance(played, AgentPlayed), played
        if await self._programs.end(played.rollout):
            return
        # no program was started, so the process that runs programs has removed nothing
        try:
            await self._runtime.close(played.folder.parent)
        finally:
            await asyncio.to_thread(remove_folder, played.folder.parent)


def fill_in(text: str, values: dict[str, str]) -> str:
    """Replace `{name}` by its value. Other braces stay, so that JSON can be written plainly.

    Example:
        fill_in('{"task": "{prompt}"}', {"prompt": "hi"})  # '{"task": "hi"}'
    """
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def read_file(folder: Path, name: str, most: int = LARGEST_FILE) -> str | None:
    """Return the text of a file that a program has written in its folder.

    None if there is no regular file of that name, if it or a folder on the way to it is a link, if the name leads out
    of the folder, or if it is larger than `most` bytes: a file of 100 GiB may take no space on the disk.
    """
    *folders, last = name.split("/")
    if ".." in folders or not name or name.startswith("/"):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait for its writer
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
        below: int | None = None
        # each folder is opened from the one above without following links, so that no path leads out
        for part in (str(folder), *filter(None, folders)):
            below = os.open(part, flags | os.O_DIRECTORY, dir_fd=below)
            opened.callback(os.close, below)
        with os.fdopen(os.open(last, flags, dir_fd=below), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and len(content := file.read(most + 1)) <= most:
                return content.decode(errors="replace")
    return None


def written_since(time_ns: int, folder: Path) -> dict[str, int]:
    """Return the sizes of files that were written since a time, by their paths: the first ones, without Git's own."""
    found: dict[str, int] = {}
    num_seen = 0
    if folder.is_symlink():  # the program has replaced it
        return found
    with contextlib.suppress(RecursionError):  # Python 3.11 raises it in folders a thousand deep
        for root, folders, files in os.walk(folder):
            folders[:] = sorted(set(folders) - {".git", "__pycache__", "node_modules"})
            for name in sorted(files):
                # files that are only looked at are limited too, as a program may write millions
                num_seen += 1
                if len(found) >= KEPT_FILES or num_seen > MOST_FILES:
                    return found
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(root, name))
                    if status.st_ctime_ns > time_ns:
                        path = os.path.relpath(os.path.join(root, name), folder)
                        found[path.encode(errors="replace").decode()] = status.st_size
    return found


def _read_transcript(gateway: str, key: str) -> list[dict]:
    """Return the messages of the rollout's longest conversation, as the gateway knows them."""
    request = urllib.request.Request(f"{gateway}/transcript", headers={"x-api-key": key})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TRANSCRIPT_TIMEOUT_S) as answer:
        return json.load(answer)["messages"]
