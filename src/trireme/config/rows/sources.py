"""Rules of `[[orchestrator.train.source]]`, `[[orchestrator.eval.source]]` and of their algorithms."""

from __future__ import annotations

from typing import Any

from trireme.config.rows.rules import is_off
from trireme.config.translation import Refused, Rule, Settings, value_at

ENGINES = (
    "`rl` starts its engines itself. Engines on other machines are named by `hosts.inference`, and "
    "`inference.server.port` is where they listen."
)
PLAYS = "an environment without a program plays itself"
IN_PROCESS = "programs run as subprocesses unless another runtime is named"


def set_harness(env: str, agent: str = "*") -> Rule:
    """Return a rule for the program that plays one of the agents."""
    return lambda harness, table: PLAYS if is_off(harness) else {f"{env}.args.{agent}.harness.id": harness}


def set_runtime(env: str, agent: str = "*") -> Rule:
    """Return a rule for the place in which such a program runs."""
    return lambda kind, table: IN_PROCESS if kind == "subprocess" else {f"{env}.args.{agent}.runtime.type": kind}


# algorithms


def set_algorithm(above: str) -> Rule:
    """Return a rule for a table of an algorithm.

    Args:
        above: our table that the keys go to: `orchestrator`, or a source's.
    """

    def rule(algo: Any, table: dict[str, Any]) -> Settings:
        if isinstance(algo, str):
            algo = {"type": algo}
        kind, source = algo.get("type", "grpo"), value_at(algo, ("sampling", "source"), "policy")
        settings: Settings = {}

        if kind in ADVANTAGES:
            settings[f"{above}.advantage.type"] = ADVANTAGES[kind]
            for key in ("decay", "episode_agents"):
                if key in algo:
                    settings[f"{above}.advantage.{key}"] = algo[key]
        elif kind == "opd":
            settings |= _distil(f"{above}.teacher", algo.get("teacher"))
        else:
            raise Refused(NOT_HERE.get(kind, f"expected one of {', '.join(ADVANTAGES)}, opd. Take one of these."))

        if source != "policy":
            raise Refused(
                'expected `sampling.source = "policy"` with it: only the policy\'s own tokens are trained on.'
            )
        # An empty table asks for the penalty with its defaults, which are the same here.
        if not is_off(penalty := algo.get("length_penalty")):
            given = {key: value for key, value in penalty.items() if key != "type"}
            settings |= {f"{above}.length_penalty.{key}": value for key, value in given.items()}
            settings[f"{above}.length_penalty.type"] = "group_linear"
        return settings

    return rule


ADVANTAGES = {"grpo": "group_mean", "max_rl": "max_rl", "rae": "rae", "hierarchical_grpo": "hierarchical_grpo"}
"""Algorithms that differ in the advantage alone, and ours."""

NOT_HERE = {
    "opsd": (
        "not here: the policy with a demonstration in its prompt is the teacher there. The nearest is a served one: "
        '`type = "opd"` with `teacher.base_url`, here `[orchestrator.teacher]` with `reward_weight = 0`.'
    ),
    "sft": (
        "not here: no other model's rollouts are trained on during `rl`. The nearest is `[orchestrator.teacher]` with "
        "`reward_weight = 0`, which judges the policy's own tokens. Or write the teacher's rollouts with `trireme eval "
        "run ENV -m MODEL -s`, and train on them with `sft`."
    ),
    "echo": (
        'not here: tokens that the environment wrote are never trained on. The nearest is `type = "grpo"`, which '
        "trains on what the policy sampled alone."
    ),
}


def _distil(table: str, teacher: Any) -> Settings:
    if not isinstance(teacher, dict) or not teacher.get("base_url"):
        raise Refused("expected a table `teacher` with `base_url` and `name`. Add it.")
    # Rewards have no part in it, as there.
    settings = {f"{table}.base_url": _address(teacher["base_url"]), f"{table}.reward_weight": 0.0}
    return settings | ({f"{table}.model": teacher["name"]} if teacher.get("name") else {})


def set_mode(mode: str, table: dict[str, Any]) -> Settings | str:
    """`training_mode` of v0.6, which `algo` has replaced."""
    if mode == "opd":
        return {"orchestrator.teacher.reward_weight": 0.0}
    if mode == "sft":
        raise Refused(NOT_HERE["sft"])
    return "rewards are learned from unless `teacher.reward_weight` is 0"


def set_teacher_address(address: Any, table: dict[str, Any]) -> Settings:
    return {"orchestrator.teacher.base_url": _address(address[0] if isinstance(address, list) and address else address)}


def _address(url: Any) -> str:
    return str(url).removesuffix("/").removesuffix("/v1")


def refuse_engines(address: Any, table: dict[str, Any]) -> str:
    """Engines at a known address are fine if that is where `rl` starts its own."""
    addresses = address if isinstance(address, list) else [address]
    if all("://localhost" in str(each) or "://127.0.0.1" in str(each) for each in addresses):
        return "`rl` starts its engines itself, and knows where they are"
    raise Refused(ENGINES)


# filters and curricula


def set_filters(*, before_batch: bool) -> Rule:
    """Return a rule for the filters of v0.5 to v0.8, each of which is a key here."""

    def rule(filters: Any, table: dict[str, Any]) -> Settings | str:
        if not isinstance(filters, list):  # our own table
            return {"orchestrator.filters": filters}
        settings: Settings = {}
        for each in filters:
            kind = each.get("type")
            acts = each.get("enforce", kind == "zero_advantage")
            if kind == "zero_advantage" and before_batch:
                settings["orchestrator.buffer.online_difficulty_filtering"] = acts
            elif kind in ("zero_advantage", "gibberish", "repetition"):
                action = "drop" if before_batch else "mask"
                settings[f"orchestrator.filters.{kind}"] = action if acts else "count"
            else:
                raise Refused(f"expected filters of type gibberish, repetition or zero_advantage, found {kind!r}.")
        return settings or "rollouts that are flawed are counted"

    return rule


def set_pool(pool: str) -> Rule:
    """Return a rule for a threshold of v0.2 to v0.5, whose easy and hard examples never come again."""
    pools = "orchestrator.buffer.pools"
    return lambda threshold, table: {f"{pools}.{pool}_threshold": threshold, f"{pools}.{pool}_weight": 0}


def set_fraction(pool: str) -> Rule:
    def rule(fraction: float, table: dict[str, Any]) -> Settings:
        if fraction:
            raise Refused(
                f"expected 0: `orchestrator.buffer.pools.{pool}_weight` is how often {pool} examples come, relative to "
                "the others. Write that."
            )
        return {f"orchestrator.buffer.pools.{pool}_weight": 0}

    return rule


def set_curriculum(above: str) -> Rule:
    """Return a rule for `curriculum`: which tasks come, and which groups are admitted."""

    def rule(curriculum: dict[str, Any], table: dict[str, Any]) -> Settings | str:
        settings: Settings = {}
        for gate in curriculum.get("gates", {}).values():
            if gate.get("type", "advantage_range") != "advantage_range" or any(
                gate.get(end, 0.0) != 0 for end in ("reject_min", "reject_max")
            ):
                raise Refused(
                    "expected a gate that rejects groups without any advantage (`reject_min` and `reject_max` 0). The "
                    "nearest is `buffer.use_difficulty_filtering` with a `difficulty_threshold`, a least variance."
                )
            settings[f"{above}.buffer.online_difficulty_filtering"] = True

        sampler = curriculum.get("sampler", {})
        if sampler.get("type", "standard") == "difficulty_pool":
            settings |= _pools(f"{above}.buffer.pools", sampler.get("pools"))
        return settings or "every example comes equally often here too"

    return rule


def _pools(table: str, pools: Any) -> Settings:
    pools = pools or {
        "hard": {"threshold": 0.25, "weight": 0.2},
        "normal": {"threshold": 0.75, "weight": 1.0},
        "easy": {"threshold": 1.0, "weight": 0.2},
    }
    ordered = sorted(pools.values(), key=lambda pool: pool["threshold"])
    if len(ordered) != 3:
        raise Refused(f"expected 3 pools, found {len(ordered)}: hard, normal and easy. `buffer.pools` has these.")
    hard, normal, easy = ordered
    return {
        f"{table}.hard_threshold": hard["threshold"],
        f"{table}.easy_threshold": normal["threshold"],
        f"{table}.hard_weight": hard["weight"],
        f"{table}.normal_weight": normal["weight"],
        f"{table}.easy_weight": easy["weight"],
        f"{table}.memory": 0.0,
    }


# evaluation


def set_validation(table: dict[str, Any], given: dict[str, Any]) -> Settings | str:
    """`[orchestrator.val]` of v0.2 to v0.4: an evaluation on the environments of training."""
    if value_at(given, ("orchestrator", "eval")):
        return "a run has one evaluation, `[orchestrator.eval]`"
    names = {"interval": "interval", "num_examples": "num_examples", "rollouts_per_example": "rollouts_per_example"}
    return {f"orchestrator.eval.{ours}": table[theirs] for theirs, ours in names.items() if theirs in table}


def set_count(ours: str, of_all: str = "") -> Rule:
    """Return a rule for a number of examples, of which -1 is all.

    Args:
        of_all: the key of all sources, for that of one, which would take it if it had none.
    """
    return lambda count, table: {of_all or ours: None} if count == -1 else {ours: count}


def set_eval_rollouts(above: str) -> Rule:
    """Return a rule for the rollouts of an example in evaluation. Several need a temperature, which the engine's
    default gives them there."""

    def rule(count: int, table: dict[str, Any]) -> Settings:
        given = [value_at(table, tuple(key.split("."))) for key in ("orchestrator.eval.sampling", "eval.sampling")]
        is_cold = count > 1 and not any(isinstance(each, dict) and "temperature" in each for each in given)
        temperature = {f"{above}.sampling.temperature": 1.0} if is_cold else {}
        return {f"{above}.rollouts_per_example": count} | temperature

    return rule
