"""Keys of TRL as keys of ours: its defaults, and its arithmetic of batches and steps by hand."""

import math
import statistics
from typing import Any

import numpy as np
import pytest

from trireme.algo.advantage import group_mean_std
from trireme.config.run import RunConfig
from trireme.config.section import find
from trireme.config.sft import SftConfig
from trireme.config.translation import translate_over
from trireme.tools.formats.trl import TRL_GRPO, TRL_SFT, defaults_of


def grpo(**given: Any) -> dict[str, Any]:
    """Return our settings by dotted key; refusals under `problems`."""
    made = translate_over(defaults_of(given, "grpo"), given, TRL_GRPO, where="the file", system="TRL")
    return {".".join(path): value for path, value in made.settings.items()} | {"problems": made.problems}


def test_defaults_of_trl_are_set():
    expected = {
        **{"trainer.optim.lr": 1e-6, "trainer.scheduler.type": "linear", "orchestrator.rollouts_per_example": 8},
        **{
            "orchestrator.batch_size": 8,
            "orchestrator.sampling.max_tokens": 512,
            "orchestrator.sampling.temperature": 1.0,
        },
        **{"trainer.loss.type": "dapo", "trainer.loss.clip_low": 0.2, "trainer.loss.clip_high": 0.2},
        **{"trainer.loss.beta": 0.0, "trainer.loss.proximal": "recomputed", "trainer.loss.correction": "sequence_mask"},
        **{"trainer.loss.correction_high": 3.0, "trainer.loss.correction_low": 0.0, "trainer.num_iterations": 1},
        **{"orchestrator.advantage.type": "group_mean_std", "seed": 42, "trainer.optim.max_norm": 1.0},
    }
    made = grpo()
    assert {key: made[key] for key in expected} == expected
    assert "orchestrator.filters.truncated" not in made


@pytest.mark.parametrize(
    ("given", "batch", "steps"),
    [
        # 100 examples of 8 completions in batches of 2 x 4 x 4 = 32 are 25 steps an epoch, three times
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_processes": 4}, 32, 75),
        # a group of 8 is spread over four optimizer steps of 2: one here
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4}, 8, 300),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "generation_batch_size": 16}, 16, 150),
        # each batch is used twice, and counts as two steps there
        ({"per_device_train_batch_size": 16, "num_iterations": 2}, 16, 150),
        ({"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 40}, 16, 20),
    ],
)
def test_batch_holds_whole_groups_of_one_optimizer_step(given: dict[str, Any], batch: int, steps: int):
    made = grpo(num_examples=100, **given)
    assert (made["orchestrator.batch_size"], made["max_steps"], made["problems"]) == (batch, steps, [])


@pytest.mark.parametrize("group", [2, 8])
def test_advantages_divide_by_the_deviation_of_a_sample(group: int):
    rewards = [0.25 * (place % 3) for place in range(group)]
    made = grpo(num_generations=group)
    found = made["trainer.loss.adv_tau"] * group_mean_std(np.array(rewards))
    by_hand = [(reward - statistics.mean(rewards)) / statistics.stdev(rewards) for reward in rewards]
    np.testing.assert_allclose(found, by_hand, rtol=1e-4)
    assert "trainer.loss.adv_tau" not in grpo(scale_rewards=False)


def test_completions_that_are_no_whole_groups_are_refused():
    assert any("multiple of num_generations" in each for each in grpo(per_device_train_batch_size=6)["problems"])


def test_steps_of_an_epoch_are_not_guessed():
    assert "max_steps" not in grpo()
    assert "max_steps" not in grpo(num_train_epochs=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "grpo"}, {"type": "grpo"}),
        ({"loss_type": "bnpo", "epsilon_high": 0.28}, {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}),
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, {"type": "dr_grpo", "normalize_length": 99}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"type": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"surrogate": "sequence_clip"}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, {"type": "sapo", "tau_neg": 1.1, "normalize": "sequence"}),
        ({"loss_type": "vespo", "vespo_k_pos": 1.5}, {"type": "vespo", "k_pos": 1.5}),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"type": "luspo", "clip_high": 0.2}),
        ({"delta": 1.5}, {"dual_clip": 1.5}),
        ({"beta": 0.04}, {"beta": 0.04, "kl_estimator": "k2"}),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl_estimator": "k3"}),
        ({"entropy_coef": 0.01}, {"entropy_bonus": 0.01}),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
            {"correction": "token_truncate", "correction_high": 2.0},
        ),
        ({"vllm_importance_sampling_clip_max": None}, {"correction_high": math.inf}),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0}, {"reference_update_every": 512}),
    ],
)
def test_loss_is_the_one_that_trl_would_take(given: dict[str, Any], expected: dict[str, Any]):
    made = grpo(**given)
    assert {key: made[f"trainer.loss.{key}"] for key in expected} == expected
    assert made["problems"] == []


def test_without_correction_ratio_is_still_against_recomputed_logprobs():
    made = grpo(vllm_importance_sampling_correction=False)
    assert made["trainer.loss.proximal"] == "recomputed"
    assert "trainer.loss.correction" not in made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"scale_rewards": False}, {"orchestrator.advantage.type": "group_mean"}),
        ({"scale_rewards": "batch"}, {"orchestrator.advantage.type": "group_batch"}),
        ({"mask_truncated_completions": True}, {"orchestrator.filters.truncated": "mask"}),
        ({"max_prompt_length": 100}, {"seq_len": 612}),
        ({"vllm_max_model_length": 4096}, {"seq_len": 4096}),
        ({"top_k": 50, "min_p": 0.1}, {"orchestrator.sampling.top_k": 50, "orchestrator.sampling.min_p": 0.1}),
        ({"warmup_ratio": 0.1, "max_steps": 200}, {"trainer.scheduler.warmup_steps": 20}),
        ({"warmup_steps": 0.25, "max_steps": 200}, {"trainer.scheduler.warmup_steps": 50}),
        ({"save_steps": 30, "num_iterations": 3}, {"trainer.ckpt.interval": 10}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"trainer.scheduler.type": "constant"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"trainer.scheduler.type": "cosine", "trainer.scheduler.min_lr": 1e-7},
        ),
        ({"optim": "adamw_bnb_8bit"}, {"trainer.optim.type": "adamw_8bit"}),
        ({"max_grad_norm": 0}, {"trainer.optim.max_norm": math.inf}),
        ({"output_dir": "runs/mine"}, {"output_dir": "runs", "name": "mine"}),
        ({"report_to": ["wandb"], "run_name": "r"}, {"wandb.project": "huggingface", "wandb.name": "r"}),
        (
            {"use_peft": True},
            {"trainer.model.lora.rank": 16, "trainer.model.lora.target_modules": ["q_proj", "v_proj"]},
        ),
        (
            {"use_peft": True, "lora_target_modules": "all-linear"},
            {"trainer.model.lora.target_modules": ["all-linear"]},
        ),
        ({"generation_kwargs": {"stop": ["x"], "bad_words": ["y"]}}, {"orchestrator.sampling.stop": ["x"]}),
        ({"chat_template_kwargs": {"a": 1}}, {"orchestrator.sampling.chat_template_kwargs": {"a": 1}}),
        (
            {"eval_strategy": "steps", "eval_steps": 50, "temperature": 0.7},
            {"orchestrator.eval.interval": 50, "orchestrator.eval.rollouts_per_example": 8}
            | {"orchestrator.eval.sampling.temperature": 0.7, "orchestrator.eval.eval_base": False},
        ),
        (
            {"model_init_kwargs": {"dtype": "torch.bfloat16", "attn_implementation": "kernels-community/flash-attn2"}},
            {"trainer.model.optimization_dtype": "bfloat16", "trainer.model.attn": "flash_attention_2"},
        ),
    ],
)
def test_key_sets_ours(given: dict[str, Any], expected: dict[str, Any]):
    made = grpo(**given)
    assert {key: made[key] for key in expected} == expected
    assert made["problems"] == []


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "unheard_of"},
        {"loss_type": "cispo", "epsilon": 0.3},
        {"importance_sampling_level": "word"},
        {"loss_type": "luspo", "importance_sampling_level": "token"},
        {"top_entropy_quantile": 0.2},
        {"use_adaptive_entropy": True},
        {"off_policy_mask_threshold": 0.5},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"beta": 0.1, "sync_ref_model": True},
        {"optim": "lion_32bit"},
        {"lr_scheduler_type": "polynomial"},
        {"fp16": True},
        {"load_in_4bit": True},
        {"model_init_kwargs": {"revision": "v2"}},
        {"reward_model_name_or_path": "owner/reward"},
        {"warmup_ratio": 0.1},
    ],
)
def test_what_would_train_something_else_is_refused(given: dict[str, Any]):
    (problem,) = grpo(**given)["problems"]
    assert any(name in problem for name in given)


def test_supervised_keys_are_those_of_sft():
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 4096, "packing": True}
    made = translate_over(defaults_of(given, "sft"), given, TRL_SFT, where="the file", system="TRL").settings
    expected = {("batch_size",): 8, ("seq_len",): 4096, ("num_epochs",): 3.0, ("trainer", "optim", "lr"): 2e-5}
    assert {path: made[path] for path in expected} == expected
    assert made[("loss_on",)] == ["assistant", "user", "system", "tool"]


@pytest.mark.parametrize(("rows", "root"), [(TRL_GRPO, RunConfig), (TRL_SFT, SftConfig)])
def test_targets_of_all_plain_rows_are_keys_of_ours(rows, root):
    """Those of rules are looked at when a run is validated."""
    paths = [tuple(row.ours.split(".")) for row in rows if isinstance(row.ours, str) and ".args." not in row.ours]
    own = [path[1:] if root is SftConfig and path[0] == "trainer" else path for path in paths]
    assert [path for path in own if find(root, path) is None] == []


def test_no_key_has_two_rows():
    for rows in (TRL_GRPO, TRL_SFT):
        names = [row.theirs for row in rows]
        assert sorted({name for name in names if names.count(name) > 1}) == []
