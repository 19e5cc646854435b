"""A disk that fills up during a run: the run pauses, says so, and goes on to the same weights once there is room."""

import json

import httpx

from support.processes.limits import fill, small_disk
from support.runs.scripted_kills import KilledRun, assert_same_weights, finish_undisturbed, open_run
from trireme.base.token import bearer, read_key

FLAGS = ("--max-steps", "8", "--trainer.ckpt.keep-last", "2")


def test_a_run_waits_for_room_and_loses_nothing(tmp_path, tiny_model):
    flags = ["--model.name", str(tiny_model), *FLAGS]
    undisturbed = finish_undisturbed(KilledRun(tmp_path / "undisturbed", flags, name="undisturbed"))
    disturbed = KilledRun(tmp_path / "disturbed", flags, name="full disk")
    with small_disk(disturbed.run.root, "48m"), open_run(disturbed):
        disturbed.faults.arm("journal.before_append")
        disturbed.start()
        disturbed.until(lambda: disturbed.faults.is_reached("journal.before_append"), "a full batch")
        ballast = fill(disturbed.run.root)
        disturbed.faults.release("journal.before_append")
        disturbed.until(lambda: waits_for_room(disturbed), "a process waits for room")
        version = disturbed.version
        ballast.unlink()
        disturbed.until(lambda: disturbed.version > version, "a new version")
        disturbed.wait()
        assert_same_weights(disturbed, undisturbed, 8)


def waits_for_room(run: KilledRun) -> list[str]:
    port = json.loads(run.run.paths.run_config.read_text())["orchestrator"]["server"]["port"]
    try:
        headers = bearer(read_key(run.run.root))
        waits = httpx.get(f"http://127.0.0.1:{port}/status", headers=headers, trust_env=False).json()["waits"]
    except httpx.HTTPError:
        return []
    return [wait["text"] for wait in waits if "room for" in wait["text"] and "from disk" in wait["text"]]
