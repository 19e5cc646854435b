"""Advantages: how much better a rollout was than its group, a running mean, or the whole batch.

The estimators see a whole batch at once: the groups of the batch in, one advantage per rollout out. The rewards that
they see are those of the environment, cut to `reward_clip` and with the length penalty (`algo/length_penalty.py`).
What is given per token (rewards of single steps, a teacher's opinion) is added afterwards. All in float64.

B groups of a batch, G rollouts of a group, T tokens of a rollout; r are rewards, A advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

EPS = 1e-6  # added to a standard deviation before anything is divided by it

SAME = 1e-9
"""Rewards of a group that differ by less are the same, and so are advantages: equal rewards minus their mean are often
some 1e-17, by the rounding of the mean."""

MOST_NATS = 20.0
"""Difference of a teacher's logprob and the policy's beyond which it makes no difference: a factor of 5e8."""

Baselines = dict[str, float]
"""Per environment, or `environment/agent` where agents have rewards of their own: its running mean reward."""


@dataclass(frozen=True)
class GroupScores:
    """A group as estimators see it: rollouts of an example, or runs of one agent in them if agents have rewards of
    their own. A `custom` function is called with a list of these.

    Example:
        GroupScores(env="reverse-text", example=417, rewards=np.array([0.0, 1.0]), lengths=np.array([31, 28]))
    """

    env: str
    example: int
    rewards: np.ndarray  # [G] float64
    lengths: np.ndarray  # [G] int64: sampled tokens
    agent: str = ""
    episodes: np.ndarray | None = None  # [G] int64: the rollout that each run was in; None: each in its own


Estimator = Callable[[list[GroupScores]], Sequence[np.ndarray]]
"""B groups in; for each of them [G] out."""


def are_same(values: np.ndarray) -> bool:
    """Return whether all values are the same; True for no values."""
    return not len(values) or bool(np.ptp(values) < SAME)


# Advantages within one group.


def group_mean(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r); exactly 0 if all are the same.

    The group-relative advantage of GRPO (Shao et al. 2024, arXiv 2402.03300) without the division by the standard
    deviation, which favours examples that are nearly solved or nearly hopeless (Liu et al. 2025, "Dr. GRPO",
    arXiv 2503.20783, section 3.1).
    """
    return np.zeros_like(rewards_G) if are_same(rewards_G) else rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), the original of GRPO (arXiv 2402.03300, section 4.1.2)."""
    return group_mean(rewards_G) / (rewards_G.std() + EPS)


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other r_j = G / (G - 1) * (r_i - mean(r)).

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline does not depend on the rollout itself, so the gradient
    is unbiased. A group of one has nothing to be compared with: A = r.
    """
    others = len(rewards_G) - 1
    if not others:
        return rewards_G.copy()
    return np.zeros_like(rewards_G) if are_same(rewards_G) else rewards_G - (rewards_G.sum() - rewards_G) / others


def max_rl(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / mean(r); 0 if the mean is not above `EPS`.

    Maximum Likelihood Reinforcement Learning (Tajwar et al. 2026, arXiv 2602.02710, Algorithm 1): the gradient of the
    likelihood of a right answer, log p rather than p, to the order that G rollouts can tell.

    Deviation: the paper has rewards of 0 and 1. Rewards below 0 could make the mean 0 or negative and reverse
    the gradient. If the mean is not above `EPS`, the group teaches nothing.
    """
    mean = rewards_G.mean()
    return group_mean(rewards_G) / mean if mean > EPS else np.zeros_like(rewards_G)


OF_GROUP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "none": np.copy,  # A_i = r_i: REINFORCE without a baseline (Williams 1992)
}


# Advantages over a whole batch.


def batch(groups_BG: list[np.ndarray]) -> list[np.ndarray]:
    """A = (r - mean of the batch) / (std of the batch + eps).

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): one mean and one deviation for all examples. Deviation: the paper
    puts a KL penalty into the reward first; here that is a term of the loss.
    """
    ends = np.cumsum([len(group) for group in groups_BG])
    return np.split(group_mean_std(np.concatenate(groups_BG)), ends[:-1])


def group_batch(groups_BG: list[np.ndarray]) -> list[np.ndarray]:
    """A = (r - mean of its group) / (std of these differences over the batch + eps).

    REINFORCE++ with baseline (arXiv 2501.03262). The differences have mean 0 over the batch, so none is subtracted.
    """
    centred = [group_mean(group) for group in groups_BG]
    deviation = np.concatenate(centred).std()
    return [group / (deviation + EPS) for group in centred]


def ema(
    groups_BG: list[np.ndarray], envs_B: list[str], baselines: Baselines, *, decay: float
) -> tuple[list[np.ndarray], Baselines]:
    """A = r - b of its environment; after the batch b <- decay * b + (1 - decay) * its mean reward in the batch.

    REINFORCE with a running mean as its baseline (Williams 1992, "reinforcement comparison"): b is from before the
    batch, so it does not depend on the rewards that it is subtracted from. An environment that is new begins with b at
    its mean in this batch.

    Returns:
        The advantages, and the baselines after the batch.
    """
    means = {
        env: float(np.concatenate([group for group, own in zip(groups_BG, envs_B, strict=True) if own == env]).mean())
        for env in envs_B
    }

    # The baseline from before the batch; a new environment has only the batch's own mean.
    before = means | baselines
    advantages = [group - before[env] for group, env in zip(groups_BG, envs_B, strict=True)]
    after = {env: decay * before[env] + (1 - decay) * mean for env, mean in means.items()}
    return advantages, baselines | after


def rae(
    groups_BG: list[np.ndarray], roles_B: list[str], baselines: Baselines, *, decay: float
) -> tuple[list[np.ndarray], Baselines]:
    """A = r - b of its role; after each run b <- decay * b + (1 - decay) * r, from b = 0 on.

    Role-conditioned advantage estimation (Liu et al. 2025, "SPIRAL", arXiv 2506.24119): in a game against itself the
    mean of a group is near 0 whatever the policy does, and a side that has the first move would seem to play better.
    Runs are taken in the order of groups, and of rollouts in them; b is from before the run's own reward.

    Deviation: prime-rl also moves b by groups that are then dropped. Here b is that of the journal, so a restart
    continues with it and an audit can recompute it.
    """
    after, advantages = dict(baselines), []
    for rewards_G, role in zip(groups_BG, roles_B, strict=True):
        advantages.append(found := np.zeros_like(rewards_G))
        for place, reward in enumerate(rewards_G):
            before = after.get(role, 0.0)
            found[place] = reward - before
            after[role] = decay * before + (1 - decay) * float(reward)
    return advantages, after


def hierarchical_grpo(group: GroupScores, episode_agents: Sequence[str]) -> np.ndarray:
    """A = r - the mean over the agent's runs in the same rollout, or for other agents over those in the whole group.

    prime-rl's baseline for a proposer and its solvers: attempts at one proposed problem are compared with each other,
    and proposals with the others of their group. A run without any other to compare it with has A = 0.
    """
    if group.agent not in episode_agents or group.episodes is None:
        return group_mean(group.rewards)
    advantages = np.zeros_like(group.rewards)
    for episode in np.unique(group.episodes):
        runs = group.episodes == episode
        advantages[runs] = group_mean(group.rewards[runs])
    return advantages


def estimate(
    kind: str,
    groups: list[GroupScores],
    baselines: Baselines,
    *,
    decay: float,
    custom: Estimator | None = None,
    episode_agents: Sequence[str] = (),
) -> tuple[list[np.ndarray], Baselines]:
    """Return [G] advantages of each group, and the baselines after the batch.

    Args:
        custom: the user's function if the kind is `custom`, wrapped so that its result has passed `check_custom`.
        episode_agents: agents that `hierarchical_grpo` compares within one rollout.
    """
    rewards = [group.rewards for group in groups]
    match kind:
        case "ema" | "rae":
            roles = [f"{group.env}/{group.agent}" if group.agent else group.env for group in groups]
            return (ema if kind == "ema" else rae)(rewards, roles, baselines, decay=decay)
        case "hierarchical_grpo":
            return [hierarchical_grpo(group, episode_agents) for group in groups], baselines
        case "batch":
            return batch(rewards), baselines
        case "group_batch":
            return group_batch(rewards), baselines
        case "custom":
            assert custom is not None, "no function given"
            return list(custom(groups)), baselines
    return [OF_GROUP[kind](group) for group in rewards], baselines


def check_custom(found: Sequence[np.ndarray], groups: list[GroupScores]) -> list[np.ndarray]:
    """Return the result of a user's function. Raises: ValueError unless it is one finite number per rollout."""
    try:
        advantages = [np.asarray(values, dtype=np.float64) for values in found]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"gave {type(found).__name__} ({error}) - a list of arrays, one per group, expected"
        ) from error
    sizes, due = [values.shape for values in advantages], [group.rewards.shape for group in groups]
    if sizes != due:
        raise ValueError(f"gave arrays of the shapes {sizes[:6]} - {due[:6]} were expected, one number per rollout")
    if not all(np.isfinite(values).all() for values in advantages):
        raise ValueError("gave a number that is not finite - finite ones were expected")
    return advantages


# Terms per token, which are added to these.


def process_advantages(rewards_of_rollouts: list[np.ndarray]) -> list[np.ndarray]:
    """Return [T] for each rollout of one group: the worth of its steps from each token on.

    Process supervision of GRPO (arXiv 2402.03300, section 4.1.3): with R all step rewards of the group,
    A_t = sum over the steps at or after token t of (r - mean(R)) / (std(R) + eps). It is added to the advantage of the
    rollout's own reward, which the paper has only one of.

    Args:
        rewards_of_rollouts: per rollout [T], NaN at tokens that end no step.
    """
    steps = np.concatenate([rewards[~np.isnan(rewards)] for rewards in rewards_of_rollouts]).astype(np.float64)
    if are_same(steps):
        return [np.zeros(len(rewards)) for rewards in rewards_of_rollouts]
    mean, deviation = steps.mean(), steps.std()

    # Tokens that end no step are NaN, and add nothing to the sum.
    worths = [np.nan_to_num((rewards - mean) / (deviation + EPS)) for rewards in rewards_of_rollouts]
    # A token is worth the steps at and after it: a cumulative sum from the end.
    return [np.cumsum(worth[::-1])[::-1] for worth in worths]


def distillation_term(teacher_T: np.ndarray, logprobs_T: np.ndarray, weight: float) -> np.ndarray:
    """Return weight * (log q - log mu), the difference at most `MOST_NATS`; 0 for tokens without a teacher's logprob.

    On-policy distillation (Agarwal et al. 2024, "GKD", arXiv 2306.13649; with the policy's own samples and the reverse
    KL it is a policy gradient): q is the teacher's probability of the sampled token, mu that of the policy that sampled
    it, so that the mean of the term is -KL(mu || q).

    Deviation: the bound. A token that the teacher rules out has a logprob of -inf, or of -9999 from vLLM, and would
    outweigh all others of its batch.
    """
    # Both may rule the token out: -inf minus -inf is NaN, which counts as no difference.
    with np.errstate(invalid="ignore"):
        difference = teacher_T.astype(np.float64) - logprobs_T
    return weight * np.nan_to_num(difference.clip(-MOST_NATS, MOST_NATS))
