"""Task folders in the format of Harbor as a data set: an agent program solves them, their own tests give the reward.

    TASK/task.toml, instruction.md          timeouts and variables; the prompt
    TASK/environment/Dockerfile, ...        the files that the program finds in its working folder (/app)
    TASK/tests/test.sh                      run as /tests/test.sh; writes /logs/verifier/reward.txt or reward.json
    TASK/solution/solve.sh                  run as /solution/solve.sh by `trireme env check` alone

In the sandbox there is no image: the Dockerfile may name one, set the working folder and copy files, and nothing else.
"""

import asyncio
import fnmatch
import glob
import itertools
import json
import math
import os
import posixpath
import re
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trireme_worker.agents import sandbox
from trireme_worker.agents.agent import AgentAdapter, AgentPlayed, fill_in, read_file
from trireme_worker.agents.runtime import Container, Ended, Program, names_network, remove_folder
from trireme_worker.plain import Played
from trireme_worker.rollout import RewardError, checked_scores

DEFAULT_TIMEOUT_S = 600.0  # limit of the program, and of the tests, if task.toml gives none; Harbor's own default

LARGEST_REWARD_FILE = 1 << 16
PARTS = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "solution")
WORKDIR = "/app"
HOME = "/home/agent"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")


@dataclass
class Task:
    """One task folder."""

    name: str
    folder: Path
    prompt: str
    workdir: str = WORKDIR  # in the sandbox
    container_workdir: str = ""  # folder that task.toml names; empty: that of the image
    agent_timeout_s: float = DEFAULT_TIMEOUT_S
    verifier_timeout_s: float = DEFAULT_TIMEOUT_S
    agent_user: str | None = None  # None: that of the image
    verifier_user: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # variables of all programs
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    image: str | None = None  # image that it names; None: one is built from its Dockerfile
    limits: dict[str, float] = field(default_factory=dict)  # cpus and memory_mb of its container
    has_network: bool = True
    copies: list[tuple[str, str]] = field(default_factory=list)  # path in `environment`, path in the sandbox
    obstacle: str = ""  # why it can be run nowhere
    needs_image: str = ""  # why it cannot be run in the sandbox
    has_no_image: str = ""  # why it cannot be run in a container

    @property
    def example(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "task": self.name, "example_id": self.name}


class HarborAdapter(AgentAdapter):
    """Plays the tasks of a folder with an agent program."""

    brings_images = True

    def __init__(
        self, folder: str, *, versions: dict[str, str], agent: dict, eval: Sequence[str] = (), skip: bool = False
    ) -> None:
        """
        Args:
            eval: patterns of the names of tasks that are held out, such as "eval/*".
            skip: leave out tasks that cannot be run; otherwise they are an error.
        """
        self._has_images = agent["runtime"] in ("docker", "podman")
        self._builds: dict[str, asyncio.Task[str]] = {}

        # each runtime can run other tasks: a sandbox has no images, a container needs one
        found = find_tasks(Path(folder))
        reasons = {
            each.name: each.obstacle or (each.has_no_image if self._has_images else each.needs_image) for each in found
        }
        tasks = [each for each in found if not reasons[each.name]]
        refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
        if refused and not (skip and tasks):
            named = "; ".join([*refused[:8], *(["..."] if refused[8:] else [])])
            raise ValueError(
                f"{len(refused)} of {len(tasks) + len(refused)} tasks of {folder} cannot be run with `agent.runtime = "
                f'"{agent["runtime"]}"`: {named} - expected tasks that this runtime supports - leave them out with '
                "`args = { skip = true }`, or remove them."
            )

        # what the user has to know, shown once by the orchestrator when the environment is loaded
        warnings = [f"{len(refused)} tasks of {folder} are left out: {'; '.join(refused)}"] if refused else []
        apart = [task.name for task in tasks if not task.has_network]
        if self._has_images and apart and not names_network(agent):
            warnings.append(
                f"{len(apart)} tasks of {folder} ask for no network, such as {apart[0]}, and their containers have "
                "that of this machine, by which the program reaches the policy: to keep it from others, name a network "
                "that leads to this machine alone with `--network=...` in `agent.container_args`, and set `agent.host`"
            )
        self.warning = "; ".join(warnings)

        # examples are the tasks' prompts; the reward comes from the tests
        self._tasks = {task.name: task for task in tasks}
        held_out = [task for task in tasks if any(fnmatch.fnmatch(task.name, pattern) for pattern in eval)]
        source = SimpleNamespace(
            __name__=Path(folder).name,
            dataset=[task.example for task in tasks if task not in held_out],
            eval_dataset=[task.example for task in held_out],
            reward=lambda: 0.0,  # never called: `score` runs the tests
        )

        if agent["runtime"] == "subprocess" or agent["workdir"]:
            raise ValueError(
                f"The tasks of {folder} bring their working folder and need /app, /tests and /logs of their own - "
                'expected the runtime "sandbox", "docker" or "podman", and no `agent.workdir` - change '
                "`[orchestrator.env.agent]`."
            )
        super().__init__(source, args={}, versions=versions, agent=agent)

        # a program that can read the tests or the solution would learn to copy them
        hidden = [os.path.realpath(each.folder / name) for each in found for name in ("tests", "solution")]
        for path in () if self._has_images else map(os.path.realpath, self._readable):
            either = ((each, pair) for each in hidden for pair in ((each, path), (path, each)))
            if shown := [each for each, pair in either if sandbox.is_below(*pair)]:
                raise PermissionError(
                    f"`agent.readable` names {path}, which shows {shown[0]} to the program - expected no folder with a "
                    "task's tests or solution - name a folder further below."
                )

    def facts(self) -> dict:
        has_solutions = all((task.folder / "solution" / "solve.sh").is_file() for task in self._tasks.values())
        return super().facts() | {"has_solutions": has_solutions, "warning": self.warning}

    def _place(self, played: AgentPlayed, values: dict[str, str]) -> None:
        """Make the files that the program finds."""
        task, parent = self._task(played), played.folder.parent
        remove_folder(parent)  # an interrupted attempt may have left it
        parent.mkdir(parents=True, mode=0o700)
        for name in ("work", "home", "agent-logs", "verifier"):
            (parent / name).mkdir()
        for source, target in () if self._has_images else task.copies:
            below = posixpath.relpath(target, task.workdir) + "/" * target.endswith("/")
            copy_into(task.folder / "environment", source, played.folder, below)
        os.utime(parent)  # files that change from now on were written by the program

    async def _container(self, played: AgentPlayed) -> tuple[str | None, dict[str, float]]:
        """Build an image once, and continue with that even if the rollout is cancelled."""
        task = self._task(played)
        if task.image or not isinstance(self._runtime, Container):
            return task.image, task.limits
        # a build that failed is tried again by the next rollout of the task
        if task.name not in self._builds or (self._builds[task.name].done() and self._builds[task.name].exception()):
            self._builds[task.name] = asyncio.create_task(self._runtime.build(task.folder / "environment"))
        return await asyncio.shield(self._builds[task.name]), task.limits

    async def _run(self, played: AgentPlayed, values: dict[str, str]) -> None:
        task = self._task(played)
        timeout_s = min(task.agent_timeout_s, self._agent["timeout_s"])
        if played.solve == "nothing":
            return
        if played.solve == "oracle":
            command, variables = ["bash", "/solution/solve.sh"], task.solution_env
            program = self._program(played, command, variables, values, {task.folder / "solution": "/solution"})
            program.user = task.agent_user
        else:
            values["folder"] = self._workdir(task)
            # a task that names no folder runs in the image's
            if isinstance(self._runtime, Container) and not values["folder"]:
                values["folder"] = await self._runtime.workdir(played.folder.parent)
            command = [fill_in(word, values) for word in self._agent["command"]]
            policy = self._policy(values)
            program = self._program(played, command, policy, values)
            program.stdin, program.user = fill_in(self._agent["stdin"] or "", values), task.agent_user
            program.hidden = list(policy)
        played.ended = await self._run_program(played, program, timeout_s=timeout_s)

    async def score(self, played: list[Played]) -> list[dict]:
        (one,) = played
        assert isinstance(one, AgentPlayed), one
        task, verifier = self._task(one), one.folder.parent / "verifier"
        command, tests = ["bash", "/tests/test.sh"], {task.folder / "tests": "/tests"}
        # the tests run as a program of their own: only now can /tests be read and a reward be written
        program = self._program(one, command, task.verifier_env, {}, tests)
        program.writable.append((str(verifier), "/logs/verifier"))
        program.user = task.verifier_user
        try:
            ended = await self._run_program(one, program, timeout_s=task.verifier_timeout_s, step="tests")
            # tests that do not end in their time: what the program left behind may be the reason
            value = {"reward": 0.0} if ended.exit_code is None else _read_reward(verifier, ended)
        except OSError as error:
            raise RewardError from error
        value["tests_ended"] = float(ended.exit_code is not None)
        fields = self.fields(one)
        fields["info"] |= {"tests": ended.output[-2000:]}
        return [checked_scores(value, name=f"tests/test.sh of {task.name}") | fields]

    def _program(
        self,
        played: AgentPlayed,
        command: list[str],
        variables: dict[str, str],
        values: dict[str, str],
        shown: dict[Path, str] | None = None,
    ) -> Program:
        task, parent = self._task(played), played.folder.parent
        folders = {"work": task.workdir, "home": HOME, "agent-logs": "/logs/agent"}
        own = {"HOME": HOME, "TMPDIR": "/tmp"}
        if self._has_images:  # the container keeps its files from the program to the tests
            folders, own = {}, {}
        return Program(
            parent,
            command,
            self._inherited() | own | task.env | variables,
            Path(self._workdir(task)),
            gateway=values.get("listens", Program.gateway),
            readable=[(str(source), target) for source, target in (shown or {}).items()],
            writable=[(str(parent / name), target) for name, target in folders.items()],
        )

    def _workdir(self, task: Task) -> str:
        return task.container_workdir if self._has_images else task.workdir

    def _task(self, played: AgentPlayed) -> Task:
        return self._tasks[played.example["task"]]


def _read_reward(folder: Path, ended: Ended) -> dict[str, Any]:
    """Return the reward that the tests wrote, and their other numbers. Raises: RewardError."""
    for name in ("reward.json", "reward.txt"):
        if (text := read_file(folder, name, LARGEST_REWARD_FILE)) is not None:
            try:
                value = json.loads(text) if name.endswith(".json") else float(text)
            except (ValueError, RecursionError) as error:
                raise RewardError(f"{name} of the tests holds {text[:80]!r} - expected a number") from error
            # one number under any name is the reward
            if isinstance(value, dict) and "reward" not in value and len(value) == 1:
                value = {"reward": next(iter(value.values()))}
            return value if isinstance(value, dict) else {"reward": value}
    raise RewardError(
        f"tests/test.sh ended with code {ended.exit_code} and wrote no /logs/verifier/reward.txt or reward.json - "
        f"expected one of them, a file of at most {LARGEST_REWARD_FILE >> 10} KiB - correct the task. The end of its "
        f"output: {ended.output[-500:]!r}"
    )


# --- reading task folders ---------------------------------------------------------------------------------------------


def find_tasks(folder: Path) -> list[Task]:
    """Read all tasks of a folder, up to three levels down; each is called by its path. Raises: ValueError."""
    found = sorted(path.parent for depth in range(4) for path in folder.glob("*/" * depth + "task.toml"))
    return [read_task(each, name=str(each.relative_to(folder)) if each != folder else folder.name) for each in found]


def read_task(folder: Path, *, name: str) -> Task:
    """Read a task. What prevents that is its obstacle, so that it costs no other."""
    try:
        name.encode()  # a name of other bytes than UTF-8 fits into no message
        # a downloaded task must not show files of this machine by a link
        for part in PARTS:
            if not sandbox.is_below(leads_to := os.path.realpath(folder / part), os.path.realpath(folder)):
                raise ValueError(f"{part} leads to {leads_to}, outside of the folder")

        table = tomllib.loads((folder / "task.toml").read_text())
        task = Task(name, folder, (folder / "instruction.md").read_text().strip())
        environment, verifier = table.get("environment", {}), table.get("verifier", {})

        task.agent_timeout_s = _read_number(table.get("agent", {}), "timeout_sec", DEFAULT_TIMEOUT_S)
        task.verifier_timeout_s = _read_number(verifier, "timeout_sec", DEFAULT_TIMEOUT_S)
        users = [table.get(each, {}).get("user") for each in ("agent", "verifier")]
        task.agent_user, task.verifier_user = (None if user in (None, 0, "0", "root") else str(user) for user in users)

        task.env = _read_variables(environment)
        task.limits = {key: _read_number(environment, key) for key in ("cpus", "memory_mb") if key in environment}
        task.has_network = environment.get("network_mode", "public") == "public" and environment.get(
            "allow_internet", True
        )
        task.verifier_env = _read_variables(verifier)
        task.solution_env = _read_variables(table.get("solution", {}))

        task.image = environment.get("docker_image")
        if task.image and not re.match(r"\w", task.image):  # the engine would take it for an option
            raise ValueError(f"docker_image is {task.image!r}, expected the name of an image")

        # the working folder of task.toml replaces that of the Dockerfile
        _read_dockerfile(task)
        task.container_workdir = environment.get("workdir") or ""
        task.workdir = posixpath.normpath(task.container_workdir or task.workdir)
        task.obstacle = _obstacle(task, table)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"it cannot be read: {type(error).__name__}: {error}"
        # paths may hold bytes that are no UTF-8, which a message to the orchestrator cannot
        name, reason = (text.encode(errors="backslashreplace").decode() for text in (name, reason))
        return Task(name, folder, "", obstacle=reason)

    # the sandbox has the task's own folders alone: nothing can be copied elsewhere, and no other user exists
    if not task.needs_image:
        outside = [target for _, target in task.copies if not sandbox.is_below(target, task.workdir)]
        system = (*sandbox.SYSTEM, "/proc", "/dev", "/etc", "/tests", "/solution", "/logs", "/tmp", HOME)
        if outside:
            task.needs_image = f"its Dockerfile copies to {outside[0]}, outside of {task.workdir}"
        elif user := task.agent_user or task.verifier_user:
            task.needs_image = f"its programs run as the user {user}"
        elif task.workdir == "/" or any(sandbox.is_below(task.workdir, path) for path in system):
            task.needs_image = f"its working folder is {task.workdir}"
    return task


def _read_number(table: dict, key: str, default: float = 0.0) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not 0 < (number := float(value)) < math.inf:
        raise ValueError(f"{key} is {value!r}, expected a number above 0")
    return number


def _read_variables(table: dict) -> dict[str, str]:
    variables = dict(table.get("env", {}))
    if wrong := [name for name, value in variables.items() if not isinstance(value, str)]:
        raise ValueError(f"the variable {wrong[0]} is {variables[wrong[0]]!r}, expected a text in quotes")
    return variables


def _obstacle(task: Task, table: dict) -> str:
    """Return why nothing here can run a task, or an empty text."""
    if not (task.folder / "tests" / "test.sh").is_file():
        return "it has no tests/test.sh"
    if any((task.folder / "environment" / name).exists() for name in COMPOSE):
        return "it needs several containers"
    if table.get("steps"):
        return "it has several steps"

    environment = table.get("environment", {})
    for key in ("mcp_servers", "healthcheck", "gpus", "tpu", "skills_dir"):
        if environment.get(key):
            return f"it has [environment] {key}"
    if environment.get("os", "linux").lower() != "linux":
        return f"it needs {environment['os']}"

    verifier = table.get("verifier", {})
    if verifier.get("environment") or verifier.get("environment_mode", "shared") != "shared":
        return "its tests run in an environment of their own"
    # a task that was downloaded must not get variables of this machine, such as keys
    variables = task.env | task.verifier_env | task.solution_env
    if asked := [name for name, value in variables.items() if "${" in value]:
        return f"it asks for the variable {asked[0]} of this machine"
    return ""


def _read_dockerfile(task: Task) -> None:
    """Find what a Dockerfile copies and to which paths, and whether it does more than that."""
    file = task.folder / "environment" / "Dockerfile"
    if not file.is_file():
        if task.image:
            task.needs_image = f"it needs the image {task.image}"
        else:
            task.has_no_image = "it has no Dockerfile and names no docker_image"
        return

    # nothing is run in the sandbox, so an instruction that is not understood here makes the image necessary
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    here, num_images = "/", 0
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word.upper() == "FROM":
            num_images += 1
        elif word.upper() == "WORKDIR" and "$" not in rest:
            here = task.workdir = posixpath.normpath(posixpath.join(here, rest))
        elif word.upper() == "COPY" and not rest.startswith("--") and "$" not in rest:
            *sources, target = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
            # several files can only go into a folder, whether or not its name ends in a slash
            ends_as_folder = target.endswith(("/", ".")) or len(sources) > 1
            target = posixpath.normpath(posixpath.join(here, target))
            task.copies += [(source, target + "/" if ends_as_folder else target) for source in sources]
        elif word:
            task.needs_image = f"its Dockerfile has {' '.join(line.split())[:60]!r}"
            return

    if num_images > 1:
        task.needs_image = "its Dockerfile has several stages"


def copy_into(context: Path, source: str, folder: Path, target: str) -> None:
    """Copy files as COPY of a Dockerfile does: a folder's content, or a file to a path, or into a folder ("x/").

    Raises: ValueError if a path leaves its folder, also through a link of an earlier COPY, or nothing is there.
    """
    found = [Path(path) for path in glob.glob(str(context / source.lstrip("/")))]
    place = folder / target
    for each in found:
        if not each.resolve().is_relative_to(context.resolve()) or ".." in Path(target).parts:
            raise ValueError(f"COPY {source} leaves {context} or {folder}")
        into = place / each.name if not each.is_dir() and (target.endswith("/") or place.is_dir()) else place
        # with `symlinks=True` an earlier COPY may have made a link, and following it would write outside
        below = [
            Path(root, name).relative_to(each) for root, *names in os.walk(each) for name in itertools.chain(*names)
        ]
        if not into.resolve().is_relative_to(folder.resolve()) or any((into / path).is_symlink() for path in below):
            raise ValueError(f"COPY {source} follows a link that an earlier COPY has made")
        if each.is_dir():
            shutil.copytree(each, into, symlinks=True, dirs_exist_ok=True)
        else:
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(each, into)
    if not found:
        raise ValueError(f"COPY {source}: {context} has no such file")
