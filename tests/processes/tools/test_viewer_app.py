"""`trireme eval-view`, driven by its keys: what is on the screen after them."""

import os
import pty
import random
import re
import select
import sys
from contextlib import suppress

import pytest

from support.runs.viewing import NARROW, WIDE, answer, view, write_evaluations, write_results
from support.runs.written_run import rewrite_batch, write_whole_run
from trireme.base.errors import ConfigError
from trireme.journal.journal import Journal
from trireme.tools.viewer.app import Help
from trireme.tools.viewer.app import command as eval_view

DEADLINE_S = 60
COMMAND = [sys.executable, "-m", "trireme.cli.trireme", "eval-view"]


def in_order(text: str, *parts: str) -> bool:
    """Whether all are there, each after the one before; a test that fails shows the screen."""
    print(text)
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


def test_a_run_its_evaluations_and_a_conversation_are_each_an_enter_away(tmp_path):
    write_evaluations(tmp_path / "run", versions=(0, 10, 20))

    async def script(viewer):
        assert in_order(viewer.screen(), "run", "say", "0.125→0.375", "step 0  0.125", "step 20  0.375")
        listing = await viewer.press("down", "down", "down", "enter")
        assert in_order(listing, "run › say › step 0", "4 rollouts · reward 0.125", "example", "reward", "last message")
        assert in_order(listing, "0.200", "version 0 says 2", "0.300", "version 0 says 3")
        conversation = await viewer.press("down", "down", "enter")
        assert in_order(conversation, "example 2, rollout 0", "reward 0.200", "exact 0.200", "answer: right")
        assert in_order(conversation, "prompt", "user", "question 2", "completion", "assistant", "version 0 says 2")
        assert "version 0 says 3" in await viewer.press("n")
        assert "4 rollouts" in await viewer.press("escape", "/")
        assert in_order(await viewer.type("rewrad<1"), "no field", "reward<1?")
        await viewer.press("ctrl+u")
        assert "1 of 4 rollouts" in await viewer.type("reward=0 example=1")
        assert in_order(await viewer.press("enter"), "step 0 › example 1", "version 0 says 1")
        assert in_order(await viewer.press("]"), "step 10 › example 1", "version 10 says 1")
        assert in_order(await viewer.press("]"), "step 20 › example 1", "reward 1.000")
        assert "step 20 is the last of say" in await viewer.press("]")
        assert "version 10 says 1" in await viewer.press("[")

    view(tmp_path, script, size=NARROW)


def test_eval_view_says_why_a_rollout_is_not_trained_on(tmp_path):
    config = write_whole_run(tmp_path / "run")
    batch = Journal(config.paths.journal).read(1)
    first = min(batch.rollouts, key=lambda rollout: (rollout.env, rollout.example, rollout.place))
    number = batch.rollouts.index(first)

    def mask(record):
        record.rollouts[number].masked, record.rollouts[number].flaws = "truncated", ["truncated"]

    rewrite_batch(config, 1, mask)

    async def script(viewer):
        tree = await viewer.press("down", "down", "right", "down", "down")
        assert in_order(tree, "training", f"step 1  {batch.metrics['reward/mean']:.3f}")
        assert f"{len(batch.rollouts) + len(batch.dropped)} rollouts" in await viewer.press("enter")
        assert in_order(await viewer.press("enter"), "say it", "none of its tokens is trained on")
        await viewer.press("escape", "/")
        assert in_order(await viewer.type("stop=dropped"), "rollouts", "dropped")

    view(tmp_path / "run", script, size=(110, 60))


def test_eval_view_shows_changed_files_after_a_refresh(tmp_path):
    file = tmp_path / "evals" / "step_0" / "say.jsonl"

    async def script(viewer):
        assert "nothing to look at below" in viewer.screen()
        write_results(file, [answer(n, 0.5) for n in range(3)])
        with open(file, "a") as growing:
            growing.write('{"example_id": 3, "rew')
        await viewer.press("r", "home", "down", "down")
        assert in_order(await viewer.press("enter", "end"), "example 2, rollout 0", "3 rollouts")
        with open(file, "a") as growing:
            growing.write('ard": 1.0}\n')
        write_evaluations(tmp_path, versions=(7,))
        assert in_order(await viewer.press("r"), "example 2, rollout 0", "4 rollouts")
        write_results(tmp_path / "other", [answer(n, 0.5) for n in range(9)]).replace(file)
        assert "9 rollouts" in await viewer.press("r")
        assert in_order(await viewer.press("escape", "r"), "step 0  0.500", "step 7")
        await viewer.press("enter")
        file.unlink()
        assert "cannot be read: No such file" in await viewer.press("r")

    view(tmp_path, script, size=(110, 24))


def test_nothing_that_a_model_wrote_reaches_the_terminal_as_a_command(tmp_path):
    evil = "\x1b[2J\x1b]0;title\x07 [bold]text[/bold] \u202eright to left\x9b31m\r\tend \ud800 [/nonsense]"
    completion = [{"role": "ass\x1bistant", "content": evil}]
    line = answer(0, 0.5, completion=completion, stop=evil, error=evil, info={evil: evil})
    write_results(tmp_path / "evals" / "step_0" / "evil\x1b.jsonl", [line])

    async def script(viewer):
        screens = [viewer.screen(), *[await viewer.press(key) for key in ("down", "enter", "enter")]]
        assert not any(re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", each) for each in screens)
        assert in_order(screens[-1], "[bold]text[/bold]", "[/nonsense]")

    view(tmp_path, script, size=WIDE)


def test_no_key_in_any_order_breaks_it_whatever_the_size(tmp_path):
    write_whole_run(tmp_path / "run")
    write_evaluations(tmp_path / "run")
    keys = ["up", "down", "left", "right", "enter", "escape", "tab", "/", "end", "pagedown", "home", "."]
    keys += [*"sSnpzrxja0", "[", "]", "?", "<"]

    async def script(viewer):
        for seed, size in enumerate([(20, 5), (160, 40), (40, 160)]):
            await viewer.pilot.resize_terminal(*size)
            chance = random.Random(seed)
            for _ in range(4):
                await viewer.press_at_once(*chance.choices(keys, k=3))
            await viewer.press(*["escape"] * 4)
        await viewer.press("?")
        assert isinstance(viewer.app.screen, Help)

    view(tmp_path, script)


def test_what_cannot_be_shown_is_refused_before_the_screen_is_taken(here):
    with pytest.raises(ConfigError, match=r"gone does not exist. Expected .* Check the path"):
        eval_view([str(here / "gone")])
    with pytest.raises(ConfigError, match="outputs does not exist"):
        eval_view([])
    with pytest.raises(ConfigError, match="needs a terminal"):
        eval_view([str(here)])


def test_eval_view_runs_in_a_real_terminal_until_q_is_pressed(tmp_path):
    write_results(tmp_path / "environments/say/outputs/evals/say--tiny/3f/results.jsonl", [answer(0, 0.75)])
    write_evaluations(tmp_path / "outputs" / "run")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.chdir(tmp_path)
        os.execv(COMMAND[0], COMMAND)
    said = b""
    try:
        while not (b"step 20" in said and b"0.750" in said):
            assert select.select([terminal], [], [], DEADLINE_S)[0], said
            said += os.read(terminal, 1 << 16)
        os.write(terminal, b"q")
        with suppress(OSError):  # the other end is gone
            while os.read(terminal, 1 << 16):
                pass
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.listdir(tmp_path / "outputs" / "run") == ["evals"]
    assert os.waitstatus_to_exitcode(status) == 0
