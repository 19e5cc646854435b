"""What happens while an environment is loaded."""

from __future__ import annotations

import asyncio
import textwrap

import pytest

from toy_environments import ECHO, says, with_environment, write
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask


def test_an_environment_that_raises_on_load_is_a_configuration_error_that_names_it(tmp_path):
    code = "def load_environment(level): raise KeyError('no such level')\n"
    with pytest.raises(ConfigError) as raised:
        with_environment(tmp_path, write(tmp_path, code, "broken.py"), lambda environment: None, args={"level": 9})
    message = str(raised.value)
    assert "broken.py" in message
    assert "KeyError: 'no such level'" in message
    assert "load_environment(**{'level': 9})" in message
    assert str(tmp_path / "logs") in message


def test_an_environment_that_ends_its_process_on_load_is_a_configuration_error(tmp_path):
    code = "import os, sys\nprint('licence expired', file=sys.stderr, flush=True)\nos._exit(3)\n"
    with pytest.raises(ConfigError, match=r"exited with code 3(.|\n)*licence expired"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None)


def test_an_environment_that_hangs_on_load_meets_its_deadline_and_its_log_is_named(tmp_path):
    code = "import time\nprint('fetching the data', flush=True)\ntime.sleep(60)\n"
    with pytest.raises(ConfigError, match=r"not loaded after 4 s(.|\n)*fetching the data(.|\n)*environment-slow-0"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None, name="slow", load_timeout_s=4)


def test_workers_that_load_different_examples_are_refused(tmp_path):
    code = ECHO + "\n    import os\n    def dataset(): return [{'prompt': 'p', 'answer': ''}] * os.getpid()\n"
    with pytest.raises(ConfigError, match="data sets of different sizes"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None, num_workers=2)


def test_examples_drawn_without_a_seed_are_the_same_in_every_worker(tmp_path):
    code = ECHO + "\n    import random\n    def dataset(): return [{'prompt': 'p', 'answer': str(random.random())}]\n"

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            await asyncio.sleep(0.05)  # both at once, so that each worker gets one
            return Reply(content="x", finish_reason="stop")

        return await asyncio.gather(*(environment.run(RunTask(task=f"{i}", index=0), ask) for i in range(2)))

    first, second = with_environment(tmp_path, write(tmp_path, code), use, num_workers=2)
    assert first.answer == second.answer


def test_what_an_environment_prints_goes_to_its_log_and_not_into_the_wire(tmp_path):
    code = "import os\nprint('{\"type\":\"done\"}', flush=True)\nos.system('echo from a child')\n" + textwrap.dedent(
        ECHO
    )

    async def use(environment):
        return await environment.run(RunTask(task="r", index=1), says("1"))

    assert with_environment(tmp_path, write(tmp_path, code), use, name="toy").reward == 1.0
    assert "from a child" in (tmp_path / "logs/environment-toy-0.stdout").read_text()
