"""An installed package, without a checkout, has all that a workspace needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs.toy_environments import ECHO, write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300
UV = os.environ.get("UV") or shutil.which("uv") or "uv"


def run(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=DEADLINE_S, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    run(UV, "build", "--wheel", "--out-dir", folder / "wheel", ROOT)
    (wheel,) = (folder / "wheel").glob("*.whl")
    run(UV, "pip", "install", "--python", sys.executable, "--no-deps", "--target", folder / "modules", wheel)
    return folder / "modules"


def test_installed_wheel_sets_up_a_workspace_that_can_run(installed, tmp_path):
    package = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(installed)}}
    module = (sys.executable, "-m")
    assert run(sys.executable, "-c", "import trireme; print(trireme.__file__)", **package).startswith(str(installed))
    run(*module, "trireme.cli.trireme", "lab", "setup", "--prime-rl", "--size", "cpu", **package)
    said = run(*module, "trireme.cli.rl", "@", "configs/wordle/rl.toml", "--dry-run", "--device", "cpu", **package)
    assert "model    models/wordle-tiny" in said
    assert "not ready" not in said
    assert (tmp_path / "models" / "wordle-tiny").resolve().is_relative_to(installed)
    listed = run(*module, "trireme.cli.trireme", "env", "list", **package)
    assert "wiki-search" in listed
    write(tmp_path, ECHO)
    assert "toy.py works." in run(*module, "trireme.cli.trireme", "env", "check", "toy.py", **package)


def test_a_package_in_a_checkout_has_no_second_copy_of_them(tmp_path):
    run(UV, "pip", "install", "--python", sys.executable, "--no-deps", "--target", tmp_path, "--editable", ROOT)
    assert not (tmp_path / "trireme").exists()
