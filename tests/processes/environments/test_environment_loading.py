"""What happens while an environment is loaded."""

import resource

import pytest

from limits import limited
from toy_environments import ECHO, run_one, says, with_environment, write
from trireme.base.errors import ConfigError
from trireme.base.processes import OPEN_FILES, most_open_files

REFUSED = {
    "raises": (
        "def load_environment(level): raise KeyError('no such level')",
        r"toy\.py' could not be loaded: KeyError: 'no such level'(.|\n)*\(\*\*{'level': 9}\)(.|\n)*{logs}",
        {"args": {"level": 9}},
    ),
    "exits": (
        "import os, sys\nprint('licence expired', file=sys.stderr, flush=True)\nos._exit(3)",
        r"exited with code 3(.|\n)*licence expired",
        {},
    ),
    "hangs": (
        "import time\nprint('fetching the data', flush=True)\ntime.sleep(60)",
        r"not loaded after 3 s(.|\n)*fetching the data(.|\n)*environment-slow-0",
        {"name": "slow", "load_timeout_s": 3},
    ),
    "differs from worker to worker": (
        "import os\ndef dataset(): return [{'prompt': 'p'}] * os.getpid()\ndef reward(completion): return 0.0",
        "data sets of different sizes",
        {"num_workers": 2},
    ),
    "has a reward that no example can feed": (
        "def dataset(): return [{'prompt': 'p', 'answer': 'a'}]\ndef reward(completion, truth): return 0.0",
        "`reward` asks for truth - expected parameters among answer, completion",
        {},
    ),
    "is too large": (
        "hoard = b'x' * (96 << 20)\ndef dataset(): return [{'prompt': 'p'}]\ndef reward(completion): return 0.0",
        r"GiB of memory, 0\.08 are allowed .* as soon as it is loaded",
        {"max_memory_gib": 0.08},
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_an_environment_that_cannot_be_used_is_a_configuration_error_that_names_it_and_why(tmp_path, way):
    code, words, config = REFUSED[way]
    with pytest.raises(ConfigError, match=words.replace("{logs}", str(tmp_path / "logs"))):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None, **config)


def test_every_command_with_an_environment_and_its_workers_may_hold_as_many_connections_as_the_machine_allows(
    tmp_path, monkeypatch
):
    code = ECHO.replace("float(completion == answer)", "__import__('resource').getrlimit(7)[0]")
    with limited(resource.RLIMIT_NOFILE, 256):
        done = with_environment(tmp_path, write(tmp_path, code), lambda e: run_one(e, says("1"), 1))
        assert 256 < done.reward == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most_open_files()
    for most, expected in ((20_000, 20_000), (1 << 20, OPEN_FILES), (resource.RLIM_INFINITY, OPEN_FILES)):
        monkeypatch.setattr("resource.getrlimit", lambda _, most=most: (256, most))
        assert most_open_files() == expected


def test_what_an_environment_prints_goes_to_its_log_and_not_into_the_wire(tmp_path):
    code = """
    import os
    print('{"type":"done"}', flush=True)
    os.system("echo from a child")
    """
    done = with_environment(tmp_path, write(tmp_path, ECHO + code), lambda e: run_one(e, says("1"), 1), name="toy")
    assert done.reward == 1.0
    assert "from a child" in (tmp_path / "logs/environment-toy-0.stdout").read_text()
