"""The single-file format of `vf-rl`: its keys with their defaults there, and what each becomes here."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.rows.prime_rl import of_vllm, under
from trireme.config.rows.rules import has_gpus, on_gpus, only
from trireme.config.translation import Refused, Row, Rule, Settings
from trireme.tools.formats.flat import first_of, name_of
from trireme.tools.formats.row_rules import Table, if_true, lora, sampling, set_dtype
from trireme.tools.formats.translation import Format

CPU_ROW_TOKENS = 512
SAMPLE_STEPS = 5  # steps from one look at completions to the next


def args_of(table: Table) -> Table:
    """Return `[trainer.args]`, with the defaults of `vf-rl`."""
    return dict(table["trainer"]["args"])


def name_run(value: Any, table: Table) -> Settings:
    # The run's folder is OUTPUT_DIR/NAME here, so the last part of their folder becomes the name.
    args = args_of(table)
    folder = args.get("output_dir")
    return name_of(PurePath(str(folder)).name if folder else args["run_name"], table["env"])


def set_resume(place: Any, table: Table) -> Settings:
    place = str(place).lower()
    if place in ("false", "none"):
        return {}

    # Only the folder's name counts: a run resumes from its own checkpoints.
    step = PurePath(place).name.removeprefix("checkpoint-")
    if not (place == "true" or step.isdigit()):
        raise Refused("expected true, or a folder `checkpoint-N` of this run. Write one of them.")
    return {"trainer.ckpt.resume_step": int(step)} if step.isdigit() else {"resume": True}


def limit(ours: str) -> Rule:
    """Return the rule of a limit of each rollout. One in the environment's own table takes precedence."""

    def rule(value: Any, table: Table) -> Settings:
        of_run = {"orchestrator.max_concurrent": value} if ours == "max_concurrent" else {}
        return of_run | ({} if ours in first_of(table["env"]) else {f"orchestrator.env.0.{ours}": value})

    return rule


def set_betas(beta: float, table: Table) -> Settings:
    return {"trainer.optim.betas": [args_of(table)["adam_beta1"], args_of(table)["adam_beta2"]]}


def set_reference(steps: int, table: Table) -> Settings:
    if not args_of(table)["beta"]:
        raise Refused("expected `beta` above 0: without it there is no reference model. Set `beta`, or remove the key.")
    return {"trainer.loss.reference_update_every": steps}


def check_sync(wanted: bool, table: Table) -> str:
    if wanted and not args_of(table).get("ref_model_sync_steps"):
        raise Refused("expected `ref_model_sync_steps` with it. Write how many steps lie between two updates.")
    return "see ref_model_sync_steps"


def set_row_tokens(rollouts: int, table: Table) -> Settings:
    """Return room for so many rollouts of full length."""
    # On a CPU the cost of attention grows with the square of the row, so rows stay short.
    longest = args_of(table)["max_seq_len"]
    return {
        "trainer.micro_batch_tokens": min(rollouts * longest, 1 << 40 if has_gpus() else max(longest, CPU_ROW_TOKENS))
    }


def multiply_batch(times: int, table: Table) -> Settings:
    """Return the batch: micro-batches of each GPU, times GPUs, times rollouts in one."""
    args = args_of(table)
    rollouts = args.get("per_device_train_batch_size") or args["micro_batch_size"]
    return {"orchestrator.batch_size": times * rollouts * table["trainer"]["gpus"]}


def evaluates(table: Table) -> bool:
    """Return whether the run evaluates. `eval_steps` alone asks for it, too."""
    args = args_of(table)
    return args.get("eval_strategy") == "steps" or bool(args.get("eval_steps") and "eval_strategy" not in args)


def saves(table: Table) -> bool:
    return args_of(table).get("save_strategy") != "no"


def set_timeouts(seconds: float, table: Table) -> Settings:
    """The orchestrator waits for the server, too, and never less than by default."""
    waits = max(seconds, OrchestratorConfig().engine_timeout_s)
    return {"inference.start_timeout_s": seconds, "orchestrator.engine_timeout_s": waits}


def log_to(value: Any, table: Table) -> Settings | str:
    """The table `[trainer.args.wandb]` alone asks for W&B, too."""
    given, to = args_of(table).get("wandb"), args_of(table).get("report_to")
    if to not in (None, "none", "wandb"):
        raise Refused("expected none or wandb. Write one of them.")
    return {"wandb": given or {}} if to == "wandb" or (given and to is None) else 'report_to = "none"'


EPOCHS = "there are no epochs here. Write steps, and how many."
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
LORA = ("rank", "alpha", "dropout", "target_modules", "modules_to_save", "use_rslora")

ARGS_ROWS = under(
    "trainer.args",
    Row("seed max_steps", "{}"),
    *(Row(key, sampling(key, evaluates)) for key in (*SAMPLING, "frequency_penalty")),
    *(Row(f"lora_{key}", lora(key, "trainer.args.use_lora")) for key in LORA),
    Row("use_lora", None, "[trainer.model.lora] says how adapters are trained"),
    Row("run_name", name_run),
    Row("output_dir", lambda folder, table: {"output_dir": str(PurePath(str(folder)).parent)}),
    Row("resume_from_checkpoint", set_resume),
    Row("learning_rate", "trainer.optim.lr"),
    Row("max_grad_norm", "trainer.optim.max_norm"),
    Row("weight_decay", "trainer.optim.weight_decay"),
    Row("adam_epsilon", "trainer.optim.eps"),
    Row("adam_beta1 adam_beta2", set_betas),
    Row("lr_scheduler_type", lambda kind, table: {"trainer.scheduler.type": kind.removesuffix("_with_warmup")}),
    Row("warmup_steps", "trainer.scheduler.warmup_steps"),
    Row("bf16", set_dtype),
    Row("gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
    Row("num_iterations", "trainer.num_iterations"),
    Row("beta", "trainer.loss.beta"),
    Row("sync_ref_model", check_sync),
    Row("ref_model_sync_steps", set_reference),
    Row("mask_truncated_completions", if_true("orchestrator.filters.truncated", "mask")),
    Row("mask_env_responses", only(True, instead="tokens that the model did not write are never trained on.")),
    Row("batch_size", "orchestrator.batch_size"),
    Row("micro_batch_size per_device_train_batch_size", set_row_tokens),
    Row("gradient_accumulation_steps", multiply_batch),
    Row("rollouts_per_example num_generations", "orchestrator.rollouts_per_example"),
    Row("max_seq_len", "seq_len"),
    Row("num_batches_ahead", "max_async_level"),
    Row("generation_timeout", limit("rollout_timeout_s")),
    Row("max_concurrent", limit("max_concurrent")),
    Row("vllm_server_{host port}", "inference.server.{}"),
    Row("vllm_server_timeout", set_timeouts),
    Row("eval_strategy save_strategy", only("no", "steps", instead=EPOCHS, note="see eval_steps, save_steps")),
    Row("eval_steps", lambda n, table: {"orchestrator.eval.interval": n} if evaluates(table) else "see eval_strategy"),
    Row("save_steps", lambda n, table: {"trainer.ckpt.interval": n} if saves(table) else "see save_strategy"),
    Row("save_total_limit", "trainer.ckpt.keep_last"),
    Row("logging_steps", "console.every"),
    Row("log_completions", if_true("console.samples_every", SAMPLE_STEPS), "all of them are in the journal"),
    Row("num_completions_to_print", "console.num_samples"),
    Row("report_to wandb", log_to),
    Row("max_prompt_len", None, "prompt and completions share max_seq_len"),
    Row("generation_batch_size", None, "vLLM takes requests as they come; see max_concurrent"),
    Row("ds3_gather_for_generation", None, "weights are sent tensor by tensor"),
)  # fmt: skip
ROWS = (
    Row("model", "model.name"),
    Row("env", "orchestrator.env"),
    Row("inference.gpus", on_gpus("inference_gpus"), "GPUs of vLLM, counted from the first"),
    Row("trainer.gpus", on_gpus("trainer_gpus"), "GPUs of the trainer, after those of vLLM"),
    *of_vllm("inference.args"),
    *ARGS_ROWS,
)
SWITCHES = (
    "use_lora",
    "bf16",
    "gradient_checkpointing",
    "sync_ref_model",
    "log_completions",
    "mask_truncated_completions",
)
ARGS: Table = {
    **{"run_name": None, "seed": 42, "max_steps": 500, "batch_size": 512, "rollouts_per_example": 16},
    **{"max_seq_len": 2048, "micro_batch_size": 8, "num_batches_ahead": 1, "num_iterations": 1, "beta": 0.0},
    **{"learning_rate": 1e-5, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1.0},
    **{"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8},
    **{"use_lora": True, "lora_rank": 16, "lora_alpha": 16, "lora_dropout": 0.0, "lora_use_rslora": False},
    "lora_target_modules": ["q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj"],
    **{"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "generation_timeout": 600.0, "max_concurrent": 1024},
    **{"vllm_server_port": 8000, "vllm_server_timeout": 300.0, "save_steps": 50},
    **{"logging_steps": 1, "log_completions": True, "num_completions_to_print": 1},
}
VF_RL = Format(
    "vf-rl",
    ROWS,
    defaults={"trainer": {"args": ARGS}},
    required=("model", "env", "inference.gpus", "trainer.gpus"),
    switches=tuple(f"trainer.args.{name}" for name in SWITCHES),
    presets={"console.style": "vf-rl", "trainer.model.optimization_dtype": "float32"},
    presets_on_gpus={"trainer.model.optimization_dtype": "bfloat16"},
)
