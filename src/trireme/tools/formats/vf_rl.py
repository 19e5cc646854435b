"""The single-file format of `vf-rl`: its keys with their defaults there, and what each becomes here."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.rows.prime_rl import of_vllm
from trireme.config.rows.rules import has_gpus, on_gpus
from trireme.config.translation import Refused, Row, Settings
from trireme.tools.formats.flat import name_of
from trireme.tools.formats.row_rules import Table, guarded, idle, if_true, lora, only, sampling
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
    return {"name": PurePath(folder).name if folder else args["run_name"] or name_of(table["env"])}


def set_resume(place: Any, table: Table) -> Settings:
    place = str(place).lower()
    if place in ("false", "none"):
        return {}

    # Only the folder's name counts: a run resumes from its own checkpoints.
    step = PurePath(place).name.removeprefix("checkpoint-")
    if not (place == "true" or step.isdigit()):
        raise Refused("expected true, or a folder `checkpoint-N` of this run. Write one of them.")
    return {"trainer.ckpt.resume_step": int(step)} if step.isdigit() else {"resume": True}


def limit(ours: str) -> Any:
    """Return the rule of a limit of each rollout. One in the environment's own table takes precedence."""

    def rule(value: Any, table: Table) -> Settings:
        of_run = {"orchestrator.max_concurrent": value} if ours == "max_concurrent" else {}
        return of_run | ({} if ours in table["env"] else {f"orchestrator.env.0.{ours}": value})

    return rule


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


def set_timeouts(seconds: float, table: Table) -> Settings:
    """The orchestrator waits for the server, too, and never less than by default."""
    waits = max(seconds, OrchestratorConfig().engine_timeout_s)
    return {"inference.start_timeout_s": seconds, "orchestrator.engine_timeout_s": waits}


def set_wandb(value: Any, table: Table) -> Settings | str:
    """The table alone asks for it, too."""
    given, to = args_of(table).get("wandb"), args_of(table).get("report_to")
    if to not in (None, "none", "wandb"):
        raise Refused("expected none or wandb. Write one of them.")
    return {"wandb": given or {}} if to == "wandb" or (given and to is None) else 'report_to = "none"'


A = "trainer.args"
RENAMED = {
    **{"seed": "seed", "learning_rate": "trainer.optim.lr", "max_grad_norm": "trainer.optim.max_norm"},
    **{"weight_decay": "trainer.optim.weight_decay", "adam_epsilon": "trainer.optim.eps"},
    **{"warmup_steps": "trainer.scheduler.warmup_steps", "max_steps": "max_steps", "beta": "trainer.loss.beta"},
    **{"num_iterations": "trainer.num_iterations", "batch_size": "orchestrator.batch_size", "max_seq_len": "seq_len"},
    **dict.fromkeys(("rollouts_per_example", "num_generations"), "orchestrator.rollouts_per_example"),
    **{"num_batches_ahead": "max_async_level", "save_total_limit": "trainer.ckpt.keep_last"},
    **{"vllm_server_host": "inference.server.host", "vllm_server_port": "inference.server.port"},
    **{"logging_steps": "console.every", "num_completions_to_print": "console.num_samples"},
}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
BETAS = ("adam_beta1", "adam_beta2")
LORA = ("rank", "alpha", "dropout", "target_modules", "modules_to_save", "use_rslora")

ROWS = guarded(
    (
        Row("model", "model.name"),
        Row("env", "orchestrator.env"),
        Row("inference.gpus", on_gpus("inference_gpus"), "GPUs of vLLM, counted from the first"),
        Row("trainer.gpus", on_gpus("trainer_gpus"), "GPUs of the trainer, after those of vLLM"),
        *of_vllm("inference.args"),
        *(Row(f"{A}.{theirs}", ours) for theirs, ours in RENAMED.items()),
        *(Row(f"{A}.{key}", sampling(key, evaluates)) for key in (*SAMPLING, "frequency_penalty")),
        *(Row(f"{A}.lora_{key}", lora(key, f"{A}.use_lora")) for key in LORA),
        Row(f"{A}.run_name", name_run),
        Row(f"{A}.output_dir", lambda folder, table: {"output_dir": str(PurePath(folder).parent)}),
        Row(f"{A}.resume_from_checkpoint", set_resume),
        Row(
            f"{A}.lr_scheduler_type", lambda kind, table: {"trainer.scheduler.type": kind.removesuffix("_with_warmup")}
        ),
        *(
            Row(f"{A}.{beta}", lambda value, table: {"trainer.optim.betas": [args_of(table)[name] for name in BETAS]})
            for beta in BETAS
        ),
        Row(
            f"{A}.bf16", lambda wanted, table: {"trainer.model.optimization_dtype": "bfloat16" if wanted else "float32"}
        ),
        Row(f"{A}.gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
        Row(f"{A}.sync_ref_model", check_sync),
        Row(f"{A}.ref_model_sync_steps", set_reference),
        Row(f"{A}.mask_truncated_completions", if_true("orchestrator.filters.truncated", "mask")),
        Row(f"{A}.mask_env_responses", only(True, instead="tokens that the model did not write are never trained on.")),
        Row(f"{A}.micro_batch_size", set_row_tokens),
        Row(f"{A}.per_device_train_batch_size", set_row_tokens),
        Row(f"{A}.gradient_accumulation_steps", multiply_batch),
        Row(f"{A}.generation_timeout", limit("rollout_timeout_s")),
        Row(f"{A}.max_concurrent", limit("max_concurrent")),
        Row(f"{A}.vllm_server_timeout", set_timeouts),
        Row(
            f"{A}.eval_strategy", only("no", "steps", instead="there are no epochs here. Write steps, and eval_steps.")
        ),
        Row(
            f"{A}.eval_steps",
            lambda steps, table: {"orchestrator.eval.interval": steps} if evaluates(table) else "see eval_strategy",
        ),
        Row(
            f"{A}.save_strategy", only("no", "steps", instead="there are no epochs here. Write steps, and save_steps.")
        ),
        Row(
            f"{A}.save_steps",
            lambda steps, table: (
                {} if args_of(table).get("save_strategy") == "no" else {"trainer.ckpt.interval": steps}
            ),
        ),
        Row(f"{A}.log_completions", if_true("console.samples_every", SAMPLE_STEPS), "all of them are in the journal"),
        Row(f"{A}.report_to", set_wandb),
        Row(f"{A}.wandb", set_wandb),
        *idle("[trainer.model.lora] says how adapters are trained", f"{A}.use_lora"),
        *idle("prompt and completions share max_seq_len", f"{A}.max_prompt_len"),
        *idle("vLLM takes requests as they come; see max_concurrent", f"{A}.generation_batch_size"),
        *idle("weights are sent tensor by tensor", f"{A}.ds3_gather_for_generation"),
    )
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
    presets={"console.style": "vf-rl", "trainer.model.optimization_dtype": "float32"},
    presets_on_gpus={"trainer.model.optimization_dtype": "bfloat16"},
)
