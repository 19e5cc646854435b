"""Rules of `[[orchestrator.train.source]]`, `[[orchestrator.eval.source]]` and of their algorithms."""

from __future__ import annotations

from typing import Any

from trireme.config.nested import value_at
from trireme.config.rows.rules import is_off, value_of
from trireme.config.translation import Refused, Rule, Settings

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

        # Here a source's tables go over the run's key by key; there its algorithm replaces the run's.
        whole = value_of(table, "orchestrator", "algo") or value_of(table, "orchestrator", "train", "algo")
        of_run = whole.get("type")
        if above != "orchestrator" and of_run != kind and of_run in ("echo", "opd", "opsd", "sft"):
            raise Refused(
                f"the run's is {of_run}, of which a source would keep a part. Write one in each source alone."
            )
        if kind == "sft":
            return _distil(f"{above}.teacher", source) | {f"{above}.teacher.samples": True}
        settings: Settings = {}

        if kind == "echo":
            if not is_off(algo.get("filter")):
                raise Refused(
                    "expected no `filter`: nothing narrows the roles here. Remove it, or lower their `alpha`."
                )
            kind, roles = "grpo", algo.get("roles") or {"tool": {}}
            given = {role: each.get("alpha", 0.1) for role, each in roles.items() if not is_off(each)}
            settings |= {f"{above}.echo.{role}": weight for role, weight in given.items()}
        if kind in ADVANTAGES:
            settings[f"{above}.advantage.type"] = ADVANTAGES[kind]
            for key in ("decay", "episode_agents"):
                if key in algo:
                    settings[f"{above}.advantage.{key}"] = algo[key]
        elif kind == "opsd":
            settings |= {f"{above}.teacher.template": algo["template"]} if "template" in algo else {}
            settings[f"{above}.teacher.demonstration"] = algo.get("demo_key", "demonstration")
            settings[f"{above}.teacher.reward_weight"] = 0.0
        elif kind == "opd":
            settings |= _distil(f"{above}.teacher", algo.get("teacher"))
        else:
            raise Refused(f"expected one of {', '.join(ADVANTAGES)}, echo, opd, opsd, sft. Take one of these.")

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


def _distil(table: str, teacher: Any) -> Settings:
    if not isinstance(teacher, dict) or not teacher.get("base_url"):
        raise Refused(
            "expected a table with `base_url` and `name`: `teacher`, or with `sft` `sampling.source`. Add it."
        )
    # Rewards have no part in it, as there.
    settings = {f"{table}.base_url": str(teacher["base_url"]), f"{table}.reward_weight": 0.0}
    return settings | ({f"{table}.model": teacher["name"]} if teacher.get("name") else {})


def set_mode(mode: str, table: dict[str, Any]) -> Settings | str:
    """`training_mode` of v0.6, which `algo` has replaced."""
    if mode == "opd":
        return {"orchestrator.teacher.reward_weight": 0.0}
    if mode == "sft":
        return {"orchestrator.teacher.samples": True}
    return "rewards are learned from unless `teacher.reward_weight` is 0"


def set_teacher_address(address: Any, table: dict[str, Any]) -> Settings:
    first = address[0] if isinstance(address, list) and address else address
    return {"orchestrator.teacher.base_url": str(first)}


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
            rejected = [gate.get("reject_min", 0.0), gate.get("reject_max", 0.0)]
            if gate.get("type", "advantage_range") != "advantage_range" or (
                settings.get(key := f"{above}.buffer.advantage_range", rejected) != rejected and any(rejected)
            ):
                raise Refused(
                    "expected gates of type advantage_range, one with ends other than 0. The nearest is "
                    "`buffer.use_difficulty_filtering` with a `difficulty_threshold`, a least variance."
                )
            settings |= {key: rejected} if any(rejected) else {f"{above}.buffer.online_difficulty_filtering": True}

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
        evals = [value_at(table, path, {}) for path in (("orchestrator", "eval"), ("eval",), ())]
        given = [each.get("sampling") for each in evals if isinstance(each, dict)]
        # Of a source, its own table counts too. A rule does not see which one it is called for, but how many it asks.
        sources = [
            one for each in evals if isinstance(each, dict) for one in each.get("source") or each.get("env") or ()
        ]
        counts = {"group_size", "rollouts_per_example"}
        given += [one.get("sampling") for one in sources if count in [one.get(key) for key in counts]] * ("[]" in above)
        is_cold = count > 1 and not any(isinstance(each, dict) and "temperature" in each for each in given)
        temperature = {f"{above}.sampling.temperature": 1.0} if is_cold else {}
        return {f"{above}.rollouts_per_example": count} | temperature

    return rule
