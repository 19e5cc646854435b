"""The memory of a worker process."""

import os
import signal
import subprocess
import sys

from support.runs.toy_environments import write
from trireme.orchestrator.environments.worker_process import resident_gib


def test_resident_memory_counts_pages_shared_with_children_once(tmp_path):
    code = """
        import os, time
        hoard = b"x" * (64 << 20)
        for _ in range(3):
            if os.fork() == 0:
                break
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)
    """
    command = [sys.executable, write(tmp_path, code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        for _ in range(4):
            process.stdout.readline()
        held = resident_gib(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert 64 / 1024 < held < 2 * 64 / 1024
    assert resident_gib(2**30) == 0.0
