"""Explanation of the first difference of two runs: its possible causes, and what to look at."""

from __future__ import annotations

from trireme.tools.diff.compare import Comparison
from trireme.tools.diff.configuration import Table, bears_on
from trireme.tools.diff.differences import Difference

MOST_KEYS = 4


def meaning_of(comparison: Comparison) -> list[str]:
    """Return sentences, the most important one first."""
    first = comparison.found.first
    if first is None:
        return [_of_keys_alone(comparison)] if comparison.telling_keys else []
    causes = bears_on(comparison.keys, first.aspect, first.step)
    if causes:
        names = [f"`{key.key}`" for key in causes[:MOST_KEYS]]
        more = f" and {len(causes) - MOST_KEYS} more keys" if len(causes) > MOST_KEYS else ""
        why = _BEARING.get(first.aspect)
        said = [f"It may follow from {', '.join(names)}{more}" + (f": {why}." if why else ".")]
    else:
        said = [_unexplained(first, comparison)]
        if comparison.telling_keys:
            said.append("No key that differs bears on it.")
    return said + _surroundings(comparison) + _what_was_the_same(first)


_BEARING = {
    "examples": "that decides which examples come, and in which order",
    "tokens": "that decides what is asked, and how answers are drawn",
    "logprobs": "that decides how the engine computes",
    "scored": "that decides how the trainer computes",
    "loss": "that decides what is computed from a batch, and in which order it is summed up",
    "grad_norm": "that decides what is computed from a batch, and in which order it is summed up",
    "weights": "that decides where weights begin, and how an optimizer step changes them",
    "advantages": "that decides what a reward is compared with",
    "rewards": "that decides what a rollout is worth",
}


def _of_keys_alone(comparison: Comparison) -> str:
    if not any(comparison.found.compared.values()):
        return "There is nothing else that both runs have, so what follows from it is not known."
    return "In all that happened so far it made no difference."


def _unexplained(first: Difference, comparison: Comparison) -> str:
    if first.aspect == "weights":
        return _UNEXPLAINED["weights at the beginning" if first.step == 0 else "weights"]
    if first.aspect == "tokens":
        return _UNEXPLAINED[_how_drawn(comparison) if first.same_before else "tokens"]
    if first.aspect in ("groups", "versions", "attempts", "dropped") and _is_synchronous(comparison):
        return _UNEXPLAINED["timing of a synchronous run"]
    return _UNEXPLAINED[first.aspect]


def _how_drawn(comparison: Comparison) -> str:
    """Describe whether turns were seeded in both runs."""
    seeds = (_sampling(side.configuration).get("seed") is not None for side in (comparison.a, comparison.b))
    return "drawn with seeds" if _is_synchronous(comparison) or all(seeds) else "drawn without seeds"


def _sampling(configuration: Table) -> Table:
    """Return the sampling settings; empty for supervised training."""
    orchestrator = configuration.get("orchestrator")
    return (orchestrator or {}).get("sampling") or {}


def _is_synchronous(comparison: Comparison) -> bool:
    return all(side.configuration.get("max_async_level") == 0 for side in (comparison.a, comparison.b))


_ARITHMETIC = (
    "other numbers from the same batch and the same weights: the arithmetic is not the same. On a CPU that depends on "
    "threads, ranks, the processor and the version of torch; on GPUs also on kernels that sum up in no fixed order. "
    "`trireme replay RUN` tells which of the two comes out again"
)
_TIMING = (
    "Timing: {what}. Runs that generate ahead of training (`max_async_level` above 0) differ so from one time to the "
    "next; `--max-async-level 0` is the way that repeats to the bit on a CPU"
)

_UNEXPLAINED = {
    "weights at the beginning": "They began from other weights: the model's files are not the same, or were drawn "
    "anew.",
    "weights": f"An optimizer step made {_ARITHMETIC}.",
    "scored": f"The trainer computed other probabilities for the same tokens: {_ARITHMETIC}.",
    "loss": f"The trainer got {_ARITHMETIC}.",
    "grad_norm": f"The loss is the same and its gradient is not: {_ARITHMETIC}.",
    "lr": "Another learning rate from the same configuration: one of the runs was gone on with under another one. "
    "Look at configs/run.earlier-*.json.",
    "training": f"The loss and its gradient are the same, and something beside them is not: {_ARITHMETIC}.",
    "evaluation": "The same weights were measured otherwise: answers were drawn anew (`orchestrator.eval.sampling`), "
    "engines put other requests together, or the environment is another one.",
    "rules": "The batches were filled by other rules: one of the runs was gone on with under another configuration. "
    "Look at configs/run.earlier-*.json.",
    "examples": "Other data in the same places: the environment's data set is another one, or its order was moved by "
    "what happened before (difficulty pools, a curriculum).",
    "groups": _TIMING.format(what="the same groups were begun, and others of them were finished first") + ".",
    "attempts": _TIMING.format(what="a rollout failed in one of the runs and was tried again") + ".",
    "versions": _TIMING.format(what="new weights reached the engine at another token") + ".",
    "dropped": _TIMING.format(what="what was trained on is the same, and other rollouts were given up") + ".",
    "timing of a synchronous run": "A synchronous run should do the same each time: a rollout failed, or timed out. "
    "The reasons of dropped rollouts and logs/orchestrator.stdout tell which.",
    "prompts": "The model was given something else: another data set, system prompt, chat template or tokenizer.",
    "drawn without seeds": "Up to there all is the same to the bit, the probabilities too, and then another token was "
    "drawn. That is as it should be: in runs that generate ahead of training (`max_async_level` above 0) turns have no "
    "seeds of their own, and the engine draws for requests as they come. `--max-async-level 0` gives each its seed.",
    "drawn with seeds": "Up to there all is the same to the bit, the probabilities too, and then another token was "
    "drawn, although each turn has its seed: another version of the engine, or changed by hand.",
    "tokens": "The engine had other probabilities before it drew another token; see the logprobs.",
    "logprobs": "The engine computed another probability for the same token after the same tokens: its arithmetic "
    "depends on how requests are put together in one forward pass, on threads, kernels and the version of vLLM. "
    "Nothing else has to be wrong, and everything after it may differ.",
    "kept": "The sampler was cut otherwise, or tokens went to other experts, with the same probabilities.",
    "texts": "The tokens are the same and what was made of them is not: another tokenizer, parser or environment.",
    "components": "The same answers were scored otherwise: the environment's code changed, or it is not a function of "
    "the answer alone (a judge, a clock, random numbers).",
    "rewards": "The same answers got other rewards from the same components: weights of the rubric, or a reward that "
    "is not a function of the answer alone.",
    "masks": "The same rollouts were found to have other flaws: the filters are others.",
    "teacher": "The teacher says something else about the same tokens: it is another model, or computes otherwise.",
    "advantages": "Other advantages from the same rewards: another estimator, or what is compared with differs (the "
    "other rewards of a group, or the running mean of `ema`).",
}


def _surroundings(comparison: Comparison) -> list[str]:
    keys = [key for key in comparison.surroundings if not key.key.startswith("command")]
    if keys:
        shown = "; ".join(map(str, keys[:MOST_KEYS]))
        more = f"; and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
        return [f"Beside the configuration, these differ: {shown}{more}."]
    if not (comparison.a.surroundings and comparison.b.surroundings):
        return ["Versions and machines were not written down in both, so they may differ too."]
    return ["Versions and machines are the same."]


def _what_was_the_same(first: Difference) -> list[str]:
    if first.step == 0:
        return []
    what = f"version {first.step}" if first.aspect == "weights" else f"batch {first.step}"
    return [f"Before {what} everything that both runs wrote down is the same."]
