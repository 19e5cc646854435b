"""What a check found, in words, with advice on what to do about it.

The bounds are the usual ones for reinforcement learning from verifiable rewards: a policy learns where it sometimes
succeeds and sometimes does not. Of an example that always or never succeeds, all advantages are 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from trireme.tools.environments.check_report import CheckReport, Numbers, Rewards, Trouble

TOO_EASY = 0.8
GOOD = (0.1, 0.7)
TOO_HARD = 0.05
MUCH_WITHOUT_SIGNAL = 0.5
LITTLE_SPREAD = 0.05  # of rewards between 0 and 1, within a group
MUCH_TRUNCATED = 0.1
FEW_EXAMPLES = 10
NONSENSE_EARNS = 0.5
SHOWN_EXAMPLES = 12
SHOWN_TRACEBACK = 8


def text_of(report: CheckReport) -> str:
    parts = [_facts(report), _figures(report), _troubles(report), _advice_lines(report)]
    return "\n\n".join(text for part in parts if (text := "\n".join(part)))


def advice_of(report: CheckReport) -> list[str]:
    """What to think of it, and what to try. The first line is on the difficulty where one was measured."""
    rewards = report.rewards
    if rewards is None:
        return []
    found = list(_on_the_script(rewards)) if not report.is_baseline else list(_on_the_baseline(report, rewards))
    if report.is_baseline and report.truncated > MUCH_TRUNCATED:
        found.append(
            f"{report.truncated:.0%} of the rollouts were cut off: raise `orchestrator.sampling.max_tokens` or "
            "`seq_len`, or ask for shorter answers."
        )
    return found


def _on_the_script(rewards: Rewards) -> Iterator[str]:
    if rewards.success is not None and rewards.success > NONSENSE_EARNS:
        yield (
            f"answers that make no sense earned {rewards.success:.2f}: a reward that anything earns teaches nothing. "
            "Look at the reward function."
        )
    yield (
        "no baseline was measured: nobody sensible answered. `--model FOLDER` starts an engine for the check, "
        "`--base-url URL` asks one that is there."
    )


def _on_the_baseline(report: CheckReport, rewards: Rewards) -> Iterator[str]:
    yield difficulty_in_words(rewards)
    if rewards.without_signal is None:
        yield "one rollout per example says nothing about the spread within groups: take `-r 8`."
    elif rewards.without_signal > MUCH_WITHOUT_SIGNAL:
        yield (
            f"{rewards.without_signal:.0%} of the groups have no signal (all their rewards are the same): the rewards "
            "may need tuning, so that better answers earn more; or a higher temperature, or "
            "`orchestrator.buffer.online_difficulty_filtering = true`."
        )
    elif rewards.success is not None and rewards.group_std is not None and rewards.group_std < LITTLE_SPREAD:
        yield (
            f"rewards differ little within groups (standard deviation {rewards.group_std:.3f}): they may need tuning, "
            "so that better answers earn visibly more."
        )
    if report.num_examples < FEW_EXAMPLES:
        yield f"only {_count(report.num_examples, 'example')}: take `-n 20` or more before trusting these figures."


def difficulty_in_words(rewards: Rewards) -> str:
    success = rewards.success
    if success is None:
        return (
            f"difficulty: rewards from {rewards.least:g} to {rewards.most:g} are no shares of success. "
            "`--success-at X` says from which reward on a rollout is one."
        )
    measured = f"{success:.1%} success"
    if success > TOO_EASY:
        return f"too easy: {measured}, above {TOO_EASY:.0%}. There is little left to learn: take harder examples."
    if success < TOO_HARD:
        return (
            f"too hard: {measured}, below {TOO_HARD:.0%}. Take easier examples, a stronger model, a supervised "
            "warm-up (`sft`), or a reward that also pays for a part of the way."
        )
    if GOOD[0] <= success <= GOOD[1]:
        return f"good: {measured} is within {GOOD[0]:.0%} to {GOOD[1]:.0%}, where reinforcement learning works best."
    side = "easy" if success > GOOD[1] else "hard"
    return f"on the {side} side: {measured}; {GOOD[0]:.0%} to {GOOD[1]:.0%} is best."


def _facts(report: CheckReport) -> Iterator[str]:
    loaded = report.loaded
    yield f"{loaded.id}  ({loaded.kind}, {loaded.where})"
    yield _line("versions", ", ".join(f"{name} {version}" for name, version in loaded.versions.items()))
    installed = f"; installed in {loaded.install_s:.1f} s" if loaded.install_s is not None else ""
    yield _line("loaded", f"in {loaded.load_s:.1f} s by {_count(loaded.num_workers, 'worker')}{installed}")
    yield _line("examples", f"{loaded.num_train} to train on, {loaded.num_eval} held out")
    yield _line("policy", report.policy)
    failed = f", {report.num_failed} failed" if report.num_failed else ", none failed"
    yield _line(
        "rollouts",
        f"{report.num_examples} {report.split} examples x {report.rollouts_per_example}: {report.num_done} "
        f"scored{failed}, in {report.seconds:.1f} s (the slowest {report.slowest_s:.1f} s)",
    )


def _figures(report: CheckReport) -> Iterator[str]:
    rewards = report.rewards
    if rewards is None:
        return
    error = f" ± {rewards.error:.3f}" if rewards.error is not None else ""
    yield _line("reward", f"{rewards.mean:.3f}{error}, from {rewards.least:g} to {rewards.most:g}")
    if report.success_at is not None and rewards.success is not None:
        yield _line("success", f"{rewards.success:.1%} of the rollouts earn {report.success_at:g} or more")
    yield _line("spread", _spread(rewards))
    for number, (name, values) in enumerate(report.components.items()):
        yield _line("" if number else "components", f"{name} {_numbers(values)}")
    for number, (name, lengths) in enumerate(_lengths(report)):
        yield _line("" if number else "lengths", f"{name} {_numbers(lengths)}")
    yield _line("truncated", f"{report.truncated:.1%}")
    yield _line("stopped by", ", ".join(f"{stop} ({count})" for stop, count in report.stops.items()))


def _spread(rewards: Rewards) -> str:
    overall = f"standard deviation {rewards.std:.3f}"
    if rewards.group_std is None or rewards.without_signal is None:
        return overall
    return (
        f"{overall}, within groups {rewards.group_std:.3f}; {rewards.without_signal:.0%} of the groups without signal"
    )


def _lengths(report: CheckReport) -> list[tuple[str, Numbers]]:
    named = (("turns", report.turns), ("tokens sampled", report.sampled), ("tokens in all", report.tokens))
    return [(name, numbers) for name, numbers in named if numbers is not None]


def _troubles(report: CheckReport) -> Iterator[str]:
    if report.num_restarts:
        yield f"workers died and were restarted {_count(report.num_restarts, 'time')}: see their logs."
    for trouble in report.troubles:
        yield from _trouble(trouble, report)


def _trouble(trouble: Trouble, report: CheckReport) -> Iterator[str]:
    yield f"{_count(trouble.count, 'rollout')} failed, {trouble.stage}: {trouble.error}"
    shown = ", ".join(map(str, trouble.examples[:SHOWN_EXAMPLES]))
    more = f" and {len(trouble.examples) - SHOWN_EXAMPLES} more" if len(trouble.examples) > SHOWN_EXAMPLES else ""
    yield f"  {report.split} examples {shown}{more}"
    for line in trouble.traceback.strip().splitlines()[-SHOWN_TRACEBACK:]:
        yield f"  | {line}"


def _advice_lines(report: CheckReport) -> Iterator[str]:
    yield from (f"- {line}" for line in advice_of(report))
    if report.holds:
        yield f"{report.loaded.id} works."
    elif report.num_done:
        yield f"{report.loaded.id} has errors: rollouts that fail are tried again, then dropped with their group."
    else:
        yield f"{report.loaded.id} does not work: no rollout was scored."


def _numbers(values: Numbers) -> str:
    if values.least == values.most:
        return f"{values.mean:.4g}"
    return f"{values.mean:.4g} (from {values.least:.4g} to {values.most:.4g})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _line(name: str, text: str) -> str:
    return f"  {name:11}{text}"
