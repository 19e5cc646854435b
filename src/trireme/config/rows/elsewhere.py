"""Names of other systems that are refused in every table, with what to do instead."""

from __future__ import annotations

from trireme.config.rows.rules import only
from trireme.config.translation import Row, refused

_BETAS = "Write both as one key: `trainer.optim.betas = [0.9, 0.999]`, with your two values."
_CLIP = "Write `clip_low`, and `clip_high` too if both sides are clipped alike: each has a default of its own here."
_PROMPT = "Not here for prompts alone: `seq_len` is the longest prompt with its completion."
_ROUNDS = "Retries are counted as attempts here: `orchestrator.max_rollout_attempts`, which is one more."
_WHOLE_BATCH = (
    "`batch_size` counts a whole step, in however many micro-batches: another system that counts for each device "
    "multiplies its size by the accumulation steps and the devices."
)

WORDS = {
    "env_file": "Export its variables in the shell; files of `prime-rl` and `trireme submit` may name it.",
    "ds3_gather_for_generation": "Remove it: weights travel to the engine tensor by tensor, nothing is gathered.",
    "mask_env_responses": "Remove it: only what the model sampled is ever trained on.",
    "deepspeed": "Remove it: parameters are sharded by FSDP2, without a file for it.",
    "mask_truncated_completions": 'Write `orchestrator.filters.truncated = "mask"` for true; leave it out for false.',
    "overlong_filtering": 'Write `orchestrator.filters.truncated = "mask"` for true; leave it out for false.',
    "zero_truncated_completions": (
        "A reward of 0 for truncated rollouts is not here. `orchestrator.filters.truncated` is the nearest: `mask` "
        "keeps the reward and trains on none of the tokens, `drop` drops the group. Or let the environment give 0."
    ),
    "max_retries": _ROUNDS,
    "epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "gradient_accumulation_steps": _WHOLE_BATCH,
    "generation_batch_size": _WHOLE_BATCH,
    "pipeline_parallel_size": "Not here: `inference.parallel.tp` splits a model over GPUs in another way.",
    "warmup_ratio": "`trainer.scheduler.warmup_steps` counts steps: the ratio times `max_steps`.",
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "max_prompt_len": _PROMPT,
    "max_prompt_length": _PROMPT,
}
"""The last part of a key, and what does the same here."""

HERE = {
    "mask_env_responses": (True, "only what the model sampled is ever trained on"),
    "mask_truncated_completions": (False, "truncated rollouts are trained on"),
    "overlong_filtering": (False, "truncated rollouts are trained on"),
    "zero_truncated_completions": (False, "truncated rollouts keep their reward"),
}
"""Values of such keys that ask for what is so here, and why."""

ELSEWHERE = (
    *(Row(f"*.{name}", only(value, instead=WORDS[name], note=why)) for name, (value, why) in HERE.items()),
    *(refused(f"*.{name}", words) for name, words in WORDS.items()),
)
