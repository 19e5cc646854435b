"""The GPU benchmark says which section failed or was skipped; the one with TRL measures what it says."""

import os
import time

import pytest
from benchmarks.gpu.driver import Sections, exit_code, table
from benchmarks.gpu.section import Section, Skipped, part
from benchmarks.trl.summary import rate, reached


def works(device: str) -> None:
    with part("speed") as found:
        found["tokens_per_s"] = 12.5
    with part("other"):
        raise Skipped("needs another card")


def fails_inside(device: str) -> None:
    with part("bad"):
        raise RuntimeError("no kernel")
    with part("good"):
        pass


def lacks_all(device: str) -> None:
    with part("all"):
        raise Skipped("needs another card")


def dies(device: str) -> None:
    with part("good"):
        pass
    os._exit(3)


def hangs(device: str) -> None:
    with part("good"):
        pass
    time.sleep(600)


def stays(device: str) -> None:
    with part("start"):
        pass
    time.sleep(600)


ENGINE = Section(stays, cuda_s=1, cpu_s=1, stays=True)
CASES = [
    (Section(works, cuda_s=1, cpu_s=1), 60, "ok", ""),
    (Section(fails_inside, cuda_s=1, cpu_s=1), 60, "failed", "bad"),
    (Section(lacks_all, cuda_s=1, cpu_s=1), 60, "skipped", "needs another card"),
    (Section(dies, cuda_s=1, cpu_s=1), 60, "failed", "ended with exit code 3"),
    (Section(hangs, cuda_s=1, cpu_s=1, deadline_s=1), 60, "failed", "its deadline"),
    (Section(hangs, cuda_s=1, cpu_s=1), 2, "skipped", "when the time was spent"),
    (Section(works, cuda_s=1, cpu_s=90), 60, "skipped", "needs about 90 s"),
    (Section(works, cuda_s=1, cpu_s=None), 60, "skipped", "needs a GPU"),
    (Section(works, cuda_s=1, cpu_s=1, engine=True), 60, "skipped", "needs the section `engine`"),
]


@pytest.mark.parametrize(("section", "budget_s", "verdict", "reason"), CASES)
def test_verdict_of_a_section(section, budget_s, verdict, reason, tmp_path):
    sections = Sections("cpu", tmp_path, budget_s)
    result = sections.run(section)
    assert result.verdict == verdict
    assert reason in result.reason
    assert exit_code(sections.results) == (verdict == "failed")
    assert f"| {section.name} | {verdict} |" in table("cpu", sections.results)


def test_one_engine_serves_sections_until_another_needs_its_memory(tmp_path):
    sections = Sections("cpu", tmp_path, 60)
    user = Section(works, cuda_s=1, cpu_s=1, engine=True)
    verdicts = [sections.run(each).verdict for each in (ENGINE, user, user, Section(works, 1, 1), user)]
    assert verdicts == ["ok", "ok", "ok", "ok", "skipped"]


def test_usual_times_of_all_sections_fit_the_budget():
    from benchmarks.gpu.run import BUDGET_S, SECTIONS  # imports torch

    assert sum(section.usual_s("cpu") for section in SECTIONS) <= BUDGET_S
    assert sum(section.usual_s("cuda") for section in SECTIONS if section.gpus == 1) <= BUDGET_S


def test_benchmark_reaches_a_reward_at_a_mean_over_five_steps():
    rewards = [0.9, 0.2, 0.6, 0.7, 0.6, 0.7, 0.9, 0.9]
    steps = [
        {"step": step, "ended_s": 1000.0 + 2 * step, "reward": reward, "tokens": 100, "cpu_s": 3.0 * step}
        for step, reward in enumerate(rewards, 1)
    ]
    times = {"began_s": 990.0, "first_s": 997.0, "first_cpu_s": 5.0, "ended_s": 2000.0}
    result = times | {"steps": steps, "prompts": [[1]]}
    assert reached(result, 0.7)["step"] == 7  # (0.6 + 0.7 + 0.6 + 0.7 + 0.9) / 5
    assert reached(result, 0.8) is None
    assert rate(result) == pytest.approx(8 * 100 / 19)
