"""Rows of prime-rl: its keys since v0.2, and what becomes of each. They hold for files and flags alike."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.config.files import PROCESSES
from trireme.config.rows import losses, rules, sources
from trireme.config.rows.rules import ALWAYS, HARDWARE, on_gpus, only, switch, to
from trireme.config.translation import Row, refused

AUTUMN = "2026-09"
NO_MATTER = "nothing that is trained depends on it"
SUBMIT = "`trireme submit FILE --on slurm` submits a run; this command starts it on this machine"
TEMPLATE = "the model's own chat template renders conversations"
ENGINES = (
    "`rl` starts its engines itself. Engines on other machines are named by `hosts.inference`, and "
    "`inference.server.port` is where they listen."
)
ZERO_ADVANTAGE = {True: "mask", False: "count"}
ROUNDS = "Retries are counted as attempts here: `orchestrator.max_rollout_attempts`, which is one more."
BITS = (
    "the trainer computes in bfloat16 or float32. Engines alone hold fewer bits, by "
    '`inference.args = { quantization = "fp8_per_block" }`. Remove it.'
)
UNDER_WAY = "`orchestrator.max_concurrent` bounds the requests under way"

TRAINER = (
    Row("trainer.model.seq_len", rules.set_row_length),
    Row("trainer.model.attn", rules.set_attention),
    Row("trainer.model.compile", rules.set_compile),
    Row("trainer.model.ac", rules.set_recomputation),
    Row("trainer.model.ac_offloading", switch("trainer.model.activation_offload", True)),
    Row("trainer.model.optim_cpu_offload", "trainer.optim.cpu_offload"),
    Row("trainer.model.full_offload", switch("trainer.model.fsdp_cpu_offload", True), "parameters and optimizer state"),
    Row("trainer.model.ep", rules.set_experts),
    Row("trainer.model.fused_lm_head_token_chunk_size", rules.set_head_chunk),
    Row("trainer.model.impl", None, "every model is computed by its class in transformers"),
    Row("trainer.model.cp_style", None, "ranks that share a row gather each other's keys and values"),
    Row("trainer.model.load_using_meta", None, ALWAYS),
    Row("trainer.model.conversion_dir", None, "weights are not converted"),
    Row("trainer.model.ep_comm_backend", None, "experts are sharded by FSDP, so nothing is dispatched between ranks"),
    Row("trainer.model.deepep_num_sms", None, HARDWARE),
    Row("trainer.model.deepep_token_chunk_size", None, HARDWARE),
    Row("trainer.model.moe_fused_kernel", None, HARDWARE),
    Row("trainer.model.moe.compute", None, HARDWARE, since=AUTUMN),
    Row("trainer.model.moe.dispatch", None, HARDWARE, since=AUTUMN),
    Row("trainer.model.moe_use_grouped_mm", rules.set_grouped),
    Row("trainer.model.moe_router_dtype", to("trainer.model.moe.router_dtype", {"bfloat16": "model"})),
    Row("trainer.model.freeze_moe_router", to("trainer.model.moe.router", {True: "frozen", False: "trained"})),
    Row("trainer.model.tp", only(1, "parameters are sharded by FSDP2 over all ranks. `cp` splits long rows.")),
    Row("trainer.model.quantization", only(None, BITS)),
    Row("trainer.model.fp8", only(False, BITS)),
    Row("trainer.max_concurrent_runs", only(1, "a trainer trains one run. Start one for each.")),
    Row("trainer.model.index_cache", only(None, "indices of sparse attention are computed in each layer. Remove it.")),
    Row("trainer.model.debug.random_init", "trainer.model.from_scratch"),
    Row("trainer.model.debug.num_layers", only(None, "a model is trained with all its layers. Remove it.")),
    Row("trainer.model.debug.force_balanced_routing", only(False, "routers choose the experts. Remove it.")),
    Row("trainer.model.experimental.lora", "trainer.model.lora"),
    Row("trainer.model.lora.r", "trainer.model.lora.rank"),
    Row("trainer.model.lora.name", None, "engines get the adapters under a name of ours"),
    refused("trainer.tokenizer.chat_template", "Write it as `chat_template.jinja` into the model's folder."),
    Row("trainer.tokenizer.trust_remote_code", "trainer.model.trust_remote_code"),
    Row("trainer.optim.betas1", rules.set_betas),
    Row("trainer.optim.betas2", rules.set_betas),
    Row("trainer.optim.beta1", rules.set_betas),
    Row("trainer.optim.beta2", rules.set_betas),
    Row("trainer.optim.momentum", rules.set_momentum),
    Row("trainer.optim.mu", only(0.95, "the momentum of `muon` is 0.95. Remove it.", "0.95 here too")),
    Row("trainer.optim.nesterov", only(False, "the momentum is the plain one. Write false.", "the plain momentum")),
    Row("trainer.optim.epsilon", "trainer.optim.eps"),
    Row("trainer.optim.max_norm", rules.set_max_norm),
    Row("trainer.scheduler.type", rules.set_schedule),
    Row("trainer.loss.type", losses.set_loss),
    Row("trainer.loss.ratio_low", losses.set_bound("low")),
    Row("trainer.loss.ratio_high", losses.set_bound("high")),
    Row("trainer.loss.dppo_mask_low", "trainer.loss.mask_low"),
    Row("trainer.loss.dppo_mask_high", "trainer.loss.mask_high"),
    Row("trainer.loss.ipo_threshold", "trainer.loss.eps"),
    Row("trainer.loss.import_path", "trainer.loss.path"),
    Row("trainer.loss.kwargs", "trainer.loss.args"),
    Row("trainer.loss.teacher_tau", "orchestrator.teacher.weight"),
    Row("trainer.loss.mask_ratio_low", "trainer.loss.ratio_low"),
    Row("trainer.loss.mask_ratio_high", "trainer.loss.ratio_high"),
    refused("trainer.data", "batches come from the orchestrator. Remove it."),
    Row("trainer.enable_router_replay", "trainer.model.moe.router_replay"),
    Row("trainer.dist_timeout_seconds", "trainer.batch_timeout_s"),
    Row("trainer.matmul_precision", None, "products of float32 are computed whole"),
    Row("trainer.gc", None, NO_MATTER),
    Row("trainer.heartbeat", None, "`trireme status RUN` says how a run does"),
    Row("trainer.metrics_server", None, "the orchestrator has `/metrics`"),
    Row("trainer.enable_token_export", None, "the journal holds the tokens of every batch"),
    Row("trainer.ckpt.keep", "trainer.ckpt.keep_last"),
    Row("trainer.ckpt.weights", None, "the weights of each checkpoint are written as Hugging Face files"),
    Row("trainer.ckpt.weights_only", only(False, "a checkpoint always holds what a resumed run needs. Remove it.")),
    Row("trainer.ckpt.skip_gather_master_weights", None, NO_MATTER),
    Row("trainer.ckpt.wait_for_weights_timeout", None, "weights are handed over, not waited for on a disk"),
    refused("trainer.ckpt.output_dir", "checkpoints are in the run's own folder, `output_dir`. Remove it."),
    *(Row(f"trainer.ckpt.skip_{name}", rules.skip) for name in rules.SKIPPED),
    Row("trainer.ckpt.skip_buffer", only(False, "a resumed run continues with its buffer. Remove it.")),
)  # fmt: skip
"""Keys of the trainer, which `sft` has at its top."""


def of_sources(ours: str, *, trains: bool) -> Iterator[Row]:
    """Yield rows of a source of tasks, written as our table of environments.

    Args:
        ours: `orchestrator.env`, or where evaluation has its own.
    """
    env = f"{ours}[]"
    yield Row(f"{env}.extra_env_kwargs", f"{env}.args")
    yield Row(f"{env}.select", f"{env}.args.select", since=AUTUMN)
    yield Row(f"{env}.shuffle", f"{env}.args.select.shuffle")
    yield refused(f"{env}.max_retries", ROUNDS)
    yield refused(f"{env}.retries", ROUNDS, since=AUTUMN)
    yield Row(f"{env}.serve", None, "each environment runs in worker processes of the run (`num_workers`)")
    yield Row(f"{env}.num_workers", sources.set_workers(env))
    yield Row(f"{env}.timeout_seconds", f"{env}.rollout_timeout_s")
    yield Row(f"{env}.timeout", f"{env}.rollout_timeout_s")
    yield Row(f"{env}.timeout.rollout", f"{env}.rollout_timeout_s")
    yield Row(f"{env}.timeout.scoring", f"{env}.args.timeout.scoring")
    yield Row(f"{env}.state_columns", None, "the journal has whole rollouts")
    yield Row(f"{env}.max_total_completion_tokens", only(-1, "`seq_len` bounds the prompt with all completions."))
    yield Row(f"{env}.legacy", env)
    for address in ("serve.address", "address"):
        yield refused(f"{env}.{address}", "the orchestrator starts an environment's workers itself. Remove it.")

    # What runs: a task set, and programs that play it. `args` has both, as verifiers reads them.
    yield Row(f"{env}.env", f"{env}.args")
    yield Row(f"{env}.env.taskset", f"{env}.args")
    yield Row(f"{env}.env.taskset.id", f"{env}.id")
    yield Row(f"{env}.env.agent.max_turns", f"{env}.max_turns")
    yield Row(f"{env}.env.*.harness.id", sources.set_harness(env))
    yield Row(f"{env}.env.*.runtime.type", sources.set_runtime(env))
    yield Row(f"{env}.env.*.timeout.rollout", f"{env}.rollout_timeout_s")

    # The same in v0.7, and in v0.8 without `env`.
    yield Row(f"{env}.taskset", f"{env}.args")
    yield Row(f"{env}.taskset.id", f"{env}.id")
    for harness, runtime in (("harness", "harness.runtime"), ("agent.harness", "agent.runtime")):
        yield Row(f"{env}.{harness}", f"{env}.args.agent.harness")
        yield Row(f"{env}.{harness}.id", sources.set_harness(env, "agent"))
        yield Row(f"{env}.{runtime}.type", sources.set_runtime(env, "agent"))
    yield Row(f"{env}.harness.runtime", f"{env}.args.agent.runtime")

    if trains:
        yield Row(f"{env}.ratio", f"{env}.weight")
        yield Row(f"{env}.group_size", f"{env}.rollouts_per_example")
        yield Row(f"{env}.algo", sources.set_algorithm(env))
        yield Row(f"{env}.curriculum", sources.set_curriculum(env))
        yield refused(f"{env}.num_examples", "it is an argument of the environment. Move it into `args`.")
    else:
        yield Row(f"{env}.ratio", None, "each environment of an evaluation is evaluated whole")
        for name in ("group_size", "rollouts_per_example"):
            yield Row(f"{env}.{name}", sources.set_eval_rollouts(env))
        of_all = f"{ours.removesuffix('.env')}.num_examples"
        yield Row(f"{env}.num_examples", sources.set_count(f"{env}.num_examples", of_all))
        yield Row(f"{env}.select.limit", f"{env}.num_examples", since=AUTUMN)
        yield Row(f"{env}.skip_first_step", to(f"{env}.eval_base", {True: False, False: True}))
    yield from of_sampling(f"{env}.sampling")


def of_sampling(ours: str) -> Iterator[Row]:
    """Yield rows of a table of sampling parameters."""
    yield Row(f"{ours}.max_completion_tokens", f"{ours}.max_tokens")
    yield Row(f"{ours}.reasoning_effort", f"{ours}.extra_body.reasoning_effort")
    yield Row(f"{ours}.extra_body.return_token_ids", None, ALWAYS)


def of_evaluation(ours: str) -> Iterator[Row]:
    """Yield rows of `[orchestrator.eval]`, or of `[eval]` of `sft`."""
    yield Row(f"{ours}.source", f"{ours}.env")
    for name in ("group_size", "rollouts_per_example"):
        yield Row(f"{ours}.{name}", sources.set_eval_rollouts(ours))
    yield Row(f"{ours}.num_examples", sources.set_count(f"{ours}.num_examples"))
    yield Row(f"{ours}.max_completion_tokens", f"{ours}.sampling.max_tokens")
    yield Row(f"{ours}.eval_base_model", f"{ours}.eval_base")
    yield Row(f"{ours}.skip_first_step", to(f"{ours}.eval_base", {True: False, False: True}))
    yield Row(f"{ours}.retrigger_on_resume", None, "evaluations that a stop cut short are continued")
    yield refused(f"{ours}.max_retries", ROUNDS)
    yield Row(f"{ours}.save", None, "the answers of each evaluation are in the run's folder `evals`")
    yield Row(f"{ours}.num_workers", None, "`num_workers` is a key of each environment")
    yield Row(f"{ours}.concurrency.max_inflight", f"{ours}.max_concurrent")
    yield Row(f"{ours}.concurrency", None, f"`{ours}.max_concurrent` bounds the rollouts under way")
    yield Row(f"{ours}.infra_errors", None, "an evaluation counts rollouts that failed", since=AUTUMN)
    yield from of_sampling(f"{ours}.sampling")
    yield from of_sources(f"{ours}.env", trains=False)


def of_renderer(theirs: str, variables: str) -> Iterator[Row]:
    """Yield rows of the table that says how conversations become tokens.

    Args:
        variables: our table of variables of the chat template.
    """
    yield refused(theirs, f"{TEMPLATE}. Its variables go into `[{variables}]`.")
    yield Row(f"{theirs}.name", None, TEMPLATE)
    yield Row(f"{theirs}.thinking_retention", rules.retain_thinking(variables))
    yield Row(f"{theirs}.preserve_all_thinking", rules.retain_thinking(variables))
    for name in ("clear_thinking", "truncate_history_thinking", "enable_thinking", "preserve_thinking"):
        yield Row(f"{theirs}.{name}", f"{variables}.{name}")


ORCHESTRATOR = (
    Row("orchestrator.environment", "orchestrator.env"),
    Row("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    Row("orchestrator.train.group_size", "orchestrator.rollouts_per_example", since=AUTUMN),
    Row("orchestrator.train.source", "orchestrator.env"),
    Row("orchestrator.train.env", "orchestrator.env"),
    Row("orchestrator.train.sampling", "orchestrator.sampling"),
    Row("orchestrator.train.algo", "orchestrator.algo", since=AUTUMN),
    Row("orchestrator.train.num_workers", None, "`num_workers` is a key of each environment"),
    refused("orchestrator.train.max_retries", ROUNDS),
    Row("orchestrator.train.filter_zero_advantages", to("orchestrator.filters.zero_advantage", ZERO_ADVANTAGE)),
    Row("orchestrator.algo", sources.set_algorithm("orchestrator")),
    Row("orchestrator.seq_len", "seq_len"),
    Row("orchestrator.max_steps", "max_steps"),
    Row("orchestrator.seed", "seed"),
    Row("orchestrator.num_train_workers", None, "the orchestrator learns the trainer's ranks from `trainer_gpus`"),
    Row("orchestrator.pad_to_multiple_of", None, ALWAYS),
    Row("orchestrator.concurrency.max_inflight", "orchestrator.max_concurrent"),
    Row("orchestrator.concurrency", None, UNDER_WAY),
    Row("orchestrator.max_inflight_rollouts", "orchestrator.max_concurrent"),
    Row("orchestrator.tasks_per_minute", None, UNDER_WAY),
    Row("orchestrator.dispatch_per_minute", None, UNDER_WAY, since=AUTUMN),
    Row("orchestrator.constant_trainer_batch_size", None, "a batch always has `batch_size` rollouts", since=AUTUMN),
    Row("orchestrator.model.name", rules.set_name_of_policy),
    Row("orchestrator.model.lora.name", None, "engines get the adapters under a name of ours"),
    Row("orchestrator.model.lora", "trainer.model.lora"),
    Row("orchestrator.model.trust_remote_code", "trainer.model.trust_remote_code"),
    Row("orchestrator.student.model", "orchestrator.model"),
    Row("orchestrator.student.client", "orchestrator.model.client"),
    Row("orchestrator.client", "orchestrator.model.client"),
    Row("orchestrator.model.client", None, "`rl` starts its engines itself, and knows where they are"),
    Row("orchestrator.model.client.base_url", sources.refuse_engines),
    refused("orchestrator.model.client.elastic", ENGINES),
    Row("orchestrator.tokenizer", "trainer.tokenizer"),
    Row("orchestrator.optim", "trainer.optim"),
    Row("orchestrator.ckpt", "trainer.ckpt"),
    Row("orchestrator.training_mode", sources.set_mode),
    Row("orchestrator.teacher_model", "orchestrator.teacher"),
    Row("orchestrator.teacher.client.base_url", sources.set_teacher_address),
    Row("orchestrator.teacher.client", None, "a teacher is asked without a key"),
    Row("orchestrator.teacher.model.name", "orchestrator.teacher.model"),
    refused("orchestrator.teacher_rollout_model", sources.NOT_HERE["sft"]),
    Row("orchestrator.filters", sources.set_filters(before_batch=False)),
    Row("orchestrator.pre_batch_filters", sources.set_filters(before_batch=True)),
    Row("orchestrator.post_batch_filters", sources.set_filters(before_batch=False)),
    Row("orchestrator.buffer.env_ratios", sources.set_shares),
    Row("orchestrator.pool_size", None, HARDWARE),
    Row("orchestrator.max_inflight_episodes", "orchestrator.max_concurrent"),
    Row("orchestrator.env_install_prerelease", None, "environments are installed as their packages ask"),
    Row("orchestrator.prime_monitor", "prime_monitor"),
    Row("orchestrator.file_monitor", None, "metrics are always in `metrics.jsonl` of the run's folder"),
    Row("orchestrator.advantage.type", to("orchestrator.advantage.type", {"default": "group_mean"})),
    Row("orchestrator.advantage.length_penalty", only(None, "`[orchestrator.length_penalty]` has other formulas.")),
    Row("orchestrator.advantage.length_weighted_baseline", only(False, "it is the mean over rollouts. Remove it.")),
    refused("orchestrator.env_mix.probabilities", "Write each environment's share as `orchestrator.env.weight`."),
    Row("orchestrator.buffer.type", rules.set_buffer),
    Row("orchestrator.buffer.seed", "seed"),
    *(Row(f"orchestrator.buffer.{pool}_threshold", sources.set_pool(pool)) for pool in ("easy", "hard")),
    *(Row(f"orchestrator.buffer.{pool}_fraction", sources.set_fraction(pool)) for pool in ("easy", "hard")),
    Row("orchestrator.advantage.import_path", "orchestrator.advantage.path"),
    Row("orchestrator.advantage.kwargs", "orchestrator.advantage.args"),
    Row("orchestrator.advantage.length_shaping", only(False, "`[orchestrator.length_penalty]` prefers short answers.")),
    Row("orchestrator.strict_async_level", None, "`max_async_level` is a bound, which a run may stay below"),
    Row("orchestrator.lora_name", None, "engines get the adapters under a name of ours"),
    Row("orchestrator.use_token_client", None, ALWAYS),
    Row("orchestrator.heartbeat", None, "`trireme status RUN` says how a run does"),
    Row("orchestrator.collect_inference_metrics", None, NO_MATTER),
    Row("orchestrator.inference_metrics_roles", None, NO_MATTER),
    Row("orchestrator.env_server_base_port", None, "workers of environments need no ports"),
    Row("orchestrator.val", sources.set_validation),
    *of_sampling("orchestrator.sampling"),
    *of_sources("orchestrator.env", trains=True),
    *of_evaluation("orchestrator.eval"),
    *of_renderer("orchestrator.renderer", "orchestrator.sampling.chat_template_kwargs"),
    Row("orchestrator.renderer.reasoning_parser", to("inference.model.reasoning_parser", {"think": "deepseek_r1"})),
    Row("orchestrator.renderer.tool_parser", "inference.model.tool_call_parser"),
)  # fmt: skip

_OF_MODEL = ("dtype", "max_model_len", "enforce_eager", "trust_remote_code", "enable_auto_tool_choice")
VLLM = {
    **{"model": "model.name", "host": "inference.server.host", "port": "inference.server.port"},
    **{name: f"inference.model.{name}" for name in (*_OF_MODEL, "tool_call_parser", "reasoning_parser")},
    **{"tensor_parallel_size": "inference.parallel.tp", "data_parallel_size": "inference.parallel.dp"},
    **{name: f"inference.{name}" for name in ("gpu_memory_utilization", "max_num_seqs")},
}
"""Flags of vLLM that have a key here. The others are arguments in `[inference.args]`."""


def of_vllm(table: str) -> Iterator[Row]:
    """Yield rows of a table of vLLM's own flags."""
    yield from (Row(f"{table}.{name}", ours) for name, ours in VLLM.items())
    for name in ("disable_log_requests", "enable_log_requests"):
        yield Row(f"{table}.{name}", None, "requests are not logged; the journal has every rollout")


INFERENCE = (
    Row("inference.vllm", "inference.args"),
    Row("inference.vllm_extra", "inference.args"),
    Row("inference.vllm.model", "inference.model.name"),
    *(
        Row(f"inference.{table}.{name}", rules.set_parser(name))
        for table in ("vllm", "model")
        for name in ("tool_call_parser", "reasoning_parser")
    ),
    *of_vllm("inference.vllm"),
    Row("inference.vllm.quantization", to("inference.args.quantization", {"fp8": "fp8_per_tensor"})),
    *(
        Row(f"inference.{table}{name}", None, "engines hold adapters as `[trainer.model.lora]` says")
        for table in ("", "vllm.")
        for name in ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
    ),
    *(
        Row(f"inference.{name}", f"inference.args.{name}")
        for name in (
            *("enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_prefix_caching", "all2all_backend"),
            *("enable_ep_weight_filter", "safetensors_load_strategy", "quantization", "seed"),
        )
    ),
    Row("inference.enable_return_routed_experts", None, "follows from `trainer.model.moe.router_replay`"),
    *(
        Row(f"inference.{table}{name}", None, HARDWARE)
        for table in ("", "vllm.")
        for name in ("data_parallel_size_local", "data_parallel_rpc_port", "api_server_count")
    ),
    Row("inference.vllm.enable_return_routed_experts", None, "follows from `trainer.model.moe.router_replay`"),
    Row("inference.vllm.rope_scaling", only(None, "Write it into the model's `config.json`.")),
    Row("inference.use_deep_gemm", rules.use_deep_gemm),
    Row("inference.enable_fp32_lm_head", None, "the engine computes its head as vLLM does"),
    Row("inference.enable_fp32_router_logits", None, "the engine computes routers as vLLM does"),
    Row("inference.server.liveness_timeout_seconds", None, "`supervisor.unhealthy_after_s` is for this"),
    Row("inference.backend_port", None, "the orchestrator asks the engines without a router"),
    Row("inference.router", None, "the orchestrator routes requests itself"),
    Row("inference.kv_cache_offload", None, HARDWARE),
    Row("inference.use_pd_kv_transfer", None, HARDWARE),
    Row("inference.deployment", None, "each engine prefills and decodes"),
    Row("inference.slurm", None, SUBMIT),
    Row("inference.output_dir", "output_dir"),
)  # fmt: skip

RUN = (
    Row("restart", "supervisor.restart"),
    Row("seq_len", rules.set_seq_len),
    Row("ckpt", "trainer.ckpt"),
    Row("resume", rules.resume),
    *(Row(f"{name}.resume", "resume") for name in PROCESSES[:2]),
    Row("trainer.max_steps", "max_steps"),
    Row("model.impl", "trainer.model.impl"),
    Row("max_concurrent", "orchestrator.max_concurrent"),
    Row("tokenizer", "trainer.tokenizer"),
    Row("run.name", rules.name_run),
    Row("run.dir", "name"),
    Row("clean", None, "files of an earlier run are moved aside"),
    Row("clean_output_dir", None, "files of an earlier run are moved aside"),
    Row("dry_run", only(False, "type `--dry-run`: a file cannot ask for it.")),
    *(Row(f"{name}.output_dir", "output_dir") for name in PROCESSES[:2]),
    *(Row(f"{name}.{key}", key) for name in PROCESSES for key in ("log", "weight_broadcast")),
    *(Row(f"{name}.{key}", key) for name in PROCESSES[:2] for key in ("wandb", "monitors", "rollout_transport")),
    Row("rollout_transport", None, "batches go over one connection, from the journal"),
    # logs and monitors
    Row("log.level", rules.set_level),
    Row("log", None, NO_MATTER),
    Row("monitors.wandb", "wandb"),
    Row("monitors.file", None, "metrics are always in `metrics.jsonl` of the run's folder"),
    Row("monitors.prime", None, "metrics go to the run's folder and to W&B"),
    Row("prime_monitor", None, "metrics go to the run's folder and to W&B"),
    Row("wandb.offline", rules.set_mode),
    Row("wandb.log_extras", None, NO_MATTER),
    Row("wandb.shared", None, NO_MATTER),
    # machines
    Row("deployment.type", rules.set_deployment),
    Row("deployment.num_train_gpus", on_gpus("trainer_gpus")),
    Row("deployment.num_infer_gpus", on_gpus("inference_gpus")),
    Row("deployment", None, "`trireme submit --nodes` asks for machines, `[hosts]` names them"),
    Row("slurm", None, SUBMIT),
    Row("weight_broadcast.type", rules.set_transport),
    Row("weight_broadcast.timeout", "weight_broadcast.timeout_s"),
    Row("weight_broadcast.port", "ports.weights"),
    Row("weight_broadcast.host", None, "`hosts.trainer` has the addresses of the trainer's machines"),
    Row("weight_broadcast.session_id", None, HARDWARE),
    Row("weight_broadcast.inference_world_size", None, "engines are counted when they join"),
    Row("weight_broadcast.quantize_in_weight_transfer", None, "weights travel in the precision that engines serve"),
    Row("weight_broadcast.adapter_only", switch("trainer.model.lora.sync", "adapter")),
    Row("bench", only(False, "`scripts/bench` and `trireme plan` measure. Remove it.")),
)  # fmt: skip

PRIME_RL = (*RUN, *TRAINER, *ORCHESTRATOR, *INFERENCE)
