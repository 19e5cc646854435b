"""The length penalty that is subtracted from a rollout's reward before advantages are computed.

A length counts the sampled tokens of all turns. Letters: G rollouts of a group.
"""

from __future__ import annotations

import numpy as np

from trireme.config.orchestrator import LengthPenalty

RIGHT = 0.5  # the reward from which `relative` takes an answer as right


def with_length_penalty(
    rewards_G: np.ndarray,
    lengths_G: np.ndarray,
    penalty: LengthPenalty | None,
    *,
    inputs_G: np.ndarray | None = None,
    turns_G: np.ndarray | None = None,
) -> np.ndarray:
    """Return r + weight * penalty, or the rewards themselves without a penalty.

    Args:
        inputs_G: tokens of each rollout that were not sampled; `group_linear` needs them, and the turns.
    """
    if penalty is None:
        return rewards_G
    assert penalty.max_length is not None, f"not filled in by `rules_of`: {penalty}"
    assert penalty.buffer is not None, f"not filled in by `rules_of`: {penalty}"
    match penalty.type:
        case "soft_overlong":
            # 0 up to max_length - buffer, falling linearly to -1 at max_length: DAPO's soft overlong punishment (Yu et
            # al. 2025, arXiv 2503.14476, section 3.4), with its L_max and L_cache.
            taken = np.clip((penalty.max_length - penalty.buffer - lengths_G) / penalty.buffer, -1.0, 0.0)
        case "relative":
            taken = relative(lengths_G, rewards_G)
        case "linear":  # every token costs the same
            taken = -np.minimum(1.0, lengths_G / penalty.max_length)
        case "group_linear":
            assert inputs_G is not None, "no input tokens given"
            assert turns_G is not None, "no turns given"
            taken = -rewards_G.mean() * (
                penalty.num_output_tokens_weight * share_of_most(lengths_G)
                + penalty.num_input_tokens_weight * share_of_most(inputs_G)
                + penalty.num_turns_weight * share_of_most(turns_G)
            )
    return rewards_G + penalty.weight * taken


def share_of_most(amounts_G: np.ndarray) -> np.ndarray:
    """Return each amount over the group's largest, at least 1.

    With the mean reward as its factor, this is prime-rl's `linear` penalty (its `algo/grpo.py` of August 2026): a group
    that solves nothing pays nothing, so it is never rewarded for giving up early.
    """
    return amounts_G / max(1, amounts_G.max())


def relative(lengths_G: np.ndarray, rewards_G: np.ndarray) -> np.ndarray:
    """Return l = 0.5 - (length - shortest) / (longest - shortest) for right answers and min(0, l) for wrong ones.

    The length reward of Kimi k1.5 (2025, arXiv 2501.12599, section on the length penalty): shortest and longest are of
    the group, and if they are equal, it is 0. Deviation: the paper has rewards of 0 and 1; here an answer is right
    whose reward is at least 0.5.
    """
    shortest, longest = lengths_G.min(), lengths_G.max()
    if shortest == longest:
        return np.zeros(len(lengths_G))
    shares = 0.5 - (lengths_G - shortest) / (longest - shortest)
    return np.where(rewards_G >= RIGHT, shares, np.minimum(0.0, shares))
