"""Rows of prime-rl: its keys since v0.2, and what becomes of each. They hold for files and flags alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trireme.config.files import PROCESSES
from trireme.config.rows import losses, rules, sources
from trireme.config.rows.rules import ALWAYS, HARDWARE, on_gpus, only, switch, to
from trireme.config.translation import Row, refused, spread

AUTUMN = "2026-09"
NO_MATTER = "nothing that is trained depends on it"
SUBMIT = "`trireme submit FILE --on slurm` submits a run; this command starts it on this machine"
ONE = "one machine, as without `[hosts]`"
SEVERAL = (
    "this command starts everything on one machine; `trireme submit FILE --on slurm --nodes N` asks for several, and "
    "`[hosts]` names them"
)
TEMPLATE = "the model's own chat template renders conversations"
SHARDED = "experts are sharded by FSDP over all ranks"
ADAPTERS = "engines get the adapters under a name of ours"
IN_RUN = "metrics go to the run's folder, as `metrics.jsonl`, and to W&B"
STATUS = "`trireme status RUN` says how a run does"
ROUNDS = "Retries are counted as attempts here: `orchestrator.max_rollout_attempts`, which is one more."
BITS = (
    "the trainer computes in bfloat16 or float32. Engines alone hold fewer bits, by "
    '`inference.args = { quantization = "fp8_per_block" }`. Remove it.'
)
FAKE_BATCHES = (
    "batches come from the orchestrator. `sft --data fake` trains the same model on made-up data, to try speed and "
    "memory; `trainer.try_step = true` tries the largest step before the first batch. Remove it."
)
OF_MODEL = ("dtype", "max_model_len", "enforce_eager", "trust_remote_code", "enable_auto_tool_choice")
OF_LORA = "{enable_lora max_loras max_cpu_loras max_lora_rank lora_target_modules}"
OF_PORTS = "{data_parallel_size_local data_parallel_rpc_port api_server_count}"


def under(table: str, *rows: Row) -> tuple[Row, ...]:
    """Return the rows of a table, whose keys are written without its name."""
    return tuple(replace(row, theirs=f"{table}.{row.theirs}") for row in spread(*rows))


TRAINER = spread(
    Row("model.seq_len", rules.set_row_length),
    Row("model.attn", rules.set_attention),
    Row("model.compile", rules.set_compile),
    Row("model.ac", rules.set_recomputation),
    Row("model.ac_offloading", switch("trainer.model.activation_offload", True)),
    Row("model.optim_cpu_offload", "trainer.optim.cpu_offload"),
    Row("model.full_offload", switch("trainer.model.fsdp_cpu_offload", True), "parameters and optimizer state"),
    Row("model.ep", lambda ep, table: {"trainer.model.ep": 1} if ep == 1 else SHARDED),
    Row("model.fused_lm_head_token_chunk_size", rules.set_head_chunk),
    Row("model.impl", None, "every model is computed by its class in transformers"),
    Row("model.cp_style", None, "ranks that share a row gather each other's keys and values"),
    Row("model.load_using_meta", None, ALWAYS),
    Row("model.conversion_dir", None, "weights are not converted"),
    Row("model.ep_comm_backend", None, "experts are sharded by FSDP, so nothing is dispatched between ranks"),
    Row("model.{deepep_num_sms deepep_token_chunk_size moe_fused_kernel}", None, HARDWARE),
    Row("model.moe.{compute dispatch}", None, HARDWARE, since=AUTUMN),
    Row("model.moe_use_grouped_mm", to("trainer.model.moe.implementation", {True: "grouped_mm", False: "eager"})),
    Row("model.moe_router_dtype", to("trainer.model.moe.router_dtype", {"bfloat16": "model"})),
    Row("model.freeze_moe_router", to("trainer.model.moe.router", {True: "frozen", False: "trained"})),
    Row("model.tp", only(1, instead="parameters are sharded by FSDP2 over all ranks. `cp` splits long rows.")),
    Row("model.{quantization fp8}", only(None, instead=BITS)),
    Row("max_concurrent_runs", only(1, instead="a trainer trains one run. Start one for each.")),
    Row("model.index_cache", only(None, instead="indices of sparse attention are computed in each layer. Remove it.")),
    Row("model.debug.random_init", "trainer.model.from_scratch"),
    Row("model.debug.num_layers", only(None, instead="a model is trained with all its layers. Remove it.")),
    Row("model.debug.force_balanced_routing", only(False, instead="routers choose the experts. Remove it.")),
    Row("model.experimental.lora", "trainer.model.lora"),
    Row("model.lora.r", "trainer.model.lora.rank"),
    Row("model.lora.name", None, ADAPTERS),
    refused("tokenizer.chat_template", "Write it as `chat_template.jinja` into the model's folder."),
    Row("tokenizer.trust_remote_code", "trainer.model.trust_remote_code"),
    Row("optim.{betas1 betas2 beta1 beta2}", rules.set_betas),
    Row("optim.momentum", lambda value, table: {"trainer.optim.betas": [value, 0.999]}),
    Row("optim.mu", only(0.95, instead="the momentum of `muon` is 0.95. Remove it.", note="0.95 here too")),
    Row("optim.nesterov", only(False, instead="the momentum is the plain one. Write false.")),
    Row("optim.epsilon", "trainer.optim.eps"),
    Row("optim.max_norm", lambda norm, table: {"trainer.optim.max_norm": "inf" if rules.is_off(norm) else norm}),
    Row("scheduler.type", rules.set_schedule),
    Row("scheduler.decay_steps", rules.set_decay),
    Row("loss.type", losses.set_loss),
    Row("loss.ratio_low", losses.set_bound("low")),
    Row("loss.ratio_high", losses.set_bound("high")),
    Row("loss.dppo_{mask_low mask_high} loss.mask_{ratio_low ratio_high}", "trainer.loss.{}"),
    Row("loss.ipo_threshold", "trainer.loss.eps"),
    Row("loss.import_path", "trainer.loss.path"),
    Row("loss.kwargs", "trainer.loss.args"),
    Row("loss.teacher_tau", "orchestrator.teacher.weight"),
    refused("data", "batches come from the orchestrator. Remove it."),
    refused("data.fake", FAKE_BATCHES),
    Row("enable_router_replay", "trainer.model.moe.router_replay"),
    Row("dist_timeout_seconds", "trainer.batch_timeout_s"),
    Row("matmul_precision", None, "products of float32 are computed whole"),
    Row("gc ckpt.skip_gather_master_weights", None, NO_MATTER),
    Row("heartbeat", None, STATUS),
    Row("metrics_server", None, "the orchestrator has `/metrics`"),
    Row("enable_token_export", None, "the journal holds the tokens of every batch"),
    Row("ckpt.keep", "trainer.ckpt.keep_last"),
    Row("ckpt.weights", None, "the weights of each checkpoint are written as Hugging Face files"),
    Row("ckpt.weights_only", only(False, instead="a checkpoint always holds what a resumed run needs. Remove it.")),
    Row("ckpt.wait_for_weights_timeout", None, "weights are handed over, not waited for on a disk"),
    refused("ckpt.output_dir", "checkpoints are in the run's own folder, `output_dir`. Remove it."),
    Row("ckpt.skip_{optimizer scheduler dataloader progress}", rules.skip),
    Row("ckpt.skip_buffer", only(False, instead="a resumed run continues with its buffer. Remove it.")),
)  # fmt: skip
"""Keys of the trainer, which are in `[trainer]`, and of `sft` at its top."""


def of_sources(ours: str, *, trains: bool) -> Iterator[Row]:
    """Yield rows of a source of tasks, written as our table of environments.

    Args:
        ours: `orchestrator.env`, or where evaluation has its own.
    """
    env = f"{ours}[]"
    yield from under(
        env,
        Row("select", f"{env}.args.select", since=AUTUMN),
        Row("shuffle", f"{env}.args.select.shuffle"),
        refused("max_retries retries", ROUNDS),
        Row("serve", None, "each environment runs in worker processes of the run (`num_workers`)"),
        Row("num_workers", lambda n, table: "1 unless given" if n == "auto" else {f"{env}.num_workers": n}),
        Row("timeout_seconds timeout timeout.rollout env.*.timeout.rollout", f"{env}.rollout_timeout_s"),
        Row("timeout.scoring", f"{env}.args.timeout.scoring"),
        Row("state_columns", None, "the journal has whole rollouts"),
        Row("max_total_completion_tokens", only(-1, instead="`seq_len` bounds the prompt with all completions.")),
        Row("legacy", env),
        refused("serve.address address", "the orchestrator starts an environment's workers itself. Remove it."),
        # What runs: a task set, and programs that play it. `args` has both, as verifiers reads them.
        Row("env env.taskset taskset extra_env_kwargs", f"{env}.args"),
        Row("env.taskset.id taskset.id", f"{env}.id"),
        Row("env.agent.max_turns", f"{env}.max_turns"),
        Row("env.*.harness.id", sources.set_harness(env)),
        Row("env.*.runtime.type", sources.set_runtime(env)),
        # The same in v0.7, and in v0.8 without `env`.
        Row("harness agent.harness", f"{env}.args.agent.harness"),
        Row("harness.id agent.harness.id", sources.set_harness(env, "agent")),
        Row("harness.runtime.type agent.runtime.type", sources.set_runtime(env, "agent")),
        Row("harness.runtime", f"{env}.args.agent.runtime"),
    )
    if trains:
        yield Row(f"{env}.ratio", f"{env}.weight")
        yield Row(f"{env}.group_size", f"{env}.rollouts_per_example")
        yield Row(f"{env}.algo", sources.set_algorithm(env))
        yield Row(f"{env}.curriculum", sources.set_curriculum(env))
        yield refused(f"{env}.num_examples", "it is an argument of the environment. Move it into `args`.")
    else:
        yield Row(f"{env}.ratio", None, "each environment of an evaluation is evaluated whole")
        yield Row(f"{env}.{{group_size rollouts_per_example}}", sources.set_eval_rollouts(env))
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
    yield from under(
        ours,
        Row("source", f"{ours}.env"),
        Row("group_size rollouts_per_example", sources.set_eval_rollouts(ours)),
        Row("num_examples", sources.set_count(f"{ours}.num_examples")),
        Row("max_completion_tokens", f"{ours}.sampling.max_tokens"),
        Row("eval_base_model", f"{ours}.eval_base"),
        Row("skip_first_step", to(f"{ours}.eval_base", {True: False, False: True})),
        Row("retrigger_on_resume", None, "evaluations that a stop cut short are continued"),
        refused("max_retries", ROUNDS),
        Row("save", None, "the answers of each evaluation are in the run's folder `evals`"),
        Row("num_workers", None, "`num_workers` is a key of each environment"),
        Row("concurrency.max_inflight", f"{ours}.max_concurrent"),
        Row("concurrency", None, f"`{ours}.max_concurrent` bounds the rollouts under way"),
        Row("infra_errors", None, "an evaluation counts rollouts that failed", since=AUTUMN),
    )
    yield from of_sampling(f"{ours}.sampling")
    yield from of_sources(f"{ours}.env", trains=False)


def of_renderer(theirs: str, variables: str) -> Iterator[Row]:
    """Yield rows of the table that says how conversations become tokens.

    Args:
        variables: our table of variables of the chat template.
    """
    yield refused(theirs, f"{TEMPLATE}. Its variables go into `[{variables}]`.")
    yield Row(f"{theirs}.name", None, TEMPLATE)
    yield Row(f"{theirs}.{{thinking_retention preserve_all_thinking}}", rules.retain_thinking(variables))
    names = "clear_thinking truncate_history_thinking enable_thinking preserve_thinking"
    yield Row(f"{theirs}.{{{names}}}", f"{variables}.{{}}")


ORCHESTRATOR = under(
    "orchestrator",
    Row("environment train.source train.env", "orchestrator.env"),
    Row("group_size train.group_size", "orchestrator.rollouts_per_example"),
    Row("train.sampling", "orchestrator.sampling"),
    Row("train.algo", "orchestrator.algo", since=AUTUMN),
    Row("train.num_workers", None, "`num_workers` is a key of each environment"),
    refused("train.max_retries", ROUNDS),
    Row("train.filter_zero_advantages", to("orchestrator.filters.zero_advantage", {True: "mask", False: "count"})),
    Row("algo", sources.set_algorithm("orchestrator")),
    *(Row(key, key) for key in ("seq_len", "max_steps", "seed", "prime_monitor")),
    Row("num_train_workers", None, "the orchestrator learns the trainer's ranks from `trainer_gpus`"),
    Row("pad_to_multiple_of use_token_client", None, ALWAYS),
    Row("concurrency.max_inflight max_inflight_rollouts max_inflight_episodes", "orchestrator.max_concurrent"),
    Row("concurrency tasks_per_minute dispatch_per_minute", None,
        "`orchestrator.max_concurrent` bounds the requests under way"),
    Row("constant_trainer_batch_size", None, "a batch always has `batch_size` rollouts", since=AUTUMN),
    Row("model.name", rules.set_name_of_policy),
    Row("model.lora.name lora_name", None, ADAPTERS),
    Row("model.lora", "trainer.model.lora"),
    Row("model.trust_remote_code", "trainer.model.trust_remote_code"),
    Row("student.model", "orchestrator.model"),
    Row("student.client client", "orchestrator.model.client"),
    Row("model.client", None, "`rl` starts its engines itself, and knows where they are"),
    Row("model.client.base_url", sources.refuse_engines),
    refused("model.client.elastic", sources.ENGINES),
    *(Row(key, f"trainer.{key}") for key in ("tokenizer", "optim", "ckpt")),
    Row("training_mode", sources.set_mode),
    Row("teacher_model", "orchestrator.teacher"),
    Row("teacher.client.base_url", sources.set_teacher_address),
    Row("teacher.client", None, "a teacher is asked without a key"),
    Row("teacher.model.name", "orchestrator.teacher.model"),
    refused("teacher_rollout_model", "write `[orchestrator.teacher] samples = true` and its `base_url`."),
    Row("filters post_batch_filters", sources.set_filters(before_batch=False)),
    Row("pre_batch_filters", sources.set_filters(before_batch=True)),
    Row("buffer.env_ratios", lambda shares, table: {f"orchestrator.env.{n}.weight": s for n, s in enumerate(shares)}),
    Row("pool_size", None, HARDWARE),
    Row("env_install_prerelease", None, "environments are installed as their packages ask"),
    Row("file_monitor", None, IN_RUN),
    Row("advantage.type", to("orchestrator.advantage.type", {"default": "group_mean"})),
    Row("advantage.length_penalty", only(None, instead="`[orchestrator.length_penalty]` has other formulas.")),
    Row("advantage.length_weighted_baseline", only(False, instead="it is the mean over rollouts. Remove it.")),
    Row("advantage.length_shaping", only(False, instead="`[orchestrator.length_penalty]` prefers short answers.")),
    Row("advantage.import_path", "orchestrator.advantage.path"),
    Row("advantage.kwargs", "orchestrator.advantage.args"),
    refused("env_mix.probabilities", "Write each environment's share as `orchestrator.env.weight`."),
    Row("buffer.type", lambda kind, table: rules.BUFFERS.get(kind, "every example comes equally often")),
    Row("buffer.seed", "seed"),
    *(Row(f"buffer.{pool}_threshold", sources.set_pool(pool)) for pool in ("easy", "hard")),
    *(Row(f"buffer.{pool}_fraction", sources.set_fraction(pool)) for pool in ("easy", "hard")),
    Row("strict_async_level", None, "`max_async_level` is a bound, which a run may stay below"),
    Row("heartbeat", None, STATUS),
    Row("collect_inference_metrics inference_metrics_roles", None, NO_MATTER),
    Row("env_server_base_port", None, "workers of environments need no ports"),
    Row("val", sources.set_validation),
    Row("renderer.reasoning_parser", to("inference.model.reasoning_parser", {"think": "deepseek_r1"})),
    Row("renderer.tool_parser", "inference.model.tool_call_parser"),
)  # fmt: skip

VLLM = {
    **{"model": "model.name", "host": "inference.server.host", "port": "inference.server.port"},
    **{name: f"inference.model.{name}" for name in (*OF_MODEL, "tool_call_parser", "reasoning_parser")},
    **{"tensor_parallel_size": "inference.parallel.tp", "data_parallel_size": "inference.parallel.dp"},
    **{name: f"inference.{name}" for name in ("gpu_memory_utilization", "max_num_seqs")},
    **dict.fromkeys(("disable_log_requests", "enable_log_requests"), None),
}
"""Flags of vLLM that have a key here, or need none. The others are arguments in `[inference.args]`."""


def of_vllm(table: str) -> Iterator[Row]:
    """Yield rows of a table of vLLM's own flags."""
    unlogged = "requests are not logged; the journal has every rollout"
    yield from (Row(f"{table}.{name}", ours, "" if ours else unlogged) for name, ours in VLLM.items())


INFERENCE = under(
    "inference",
    Row("vllm vllm_extra", "inference.args"),
    Row("vllm.model", "inference.model.name"),
    *(Row(f"{{vllm model}}.{name}", rules.set_parser(name)) for name in ("tool_call_parser", "reasoning_parser")),
    *of_vllm("vllm"),
    Row("vllm.quantization", to("inference.args.quantization", {"fp8": "fp8_per_tensor"})),
    Row("{enable_expert_parallel enable_eplb enable_dbo enable_prefix_caching all2all_backend}", "inference.args.{}"),
    Row("{enable_ep_weight_filter safetensors_load_strategy quantization seed}", "inference.args.{}"),
    Row(f"{OF_LORA} vllm.{OF_LORA}", None, "engines hold adapters as `[trainer.model.lora]` says"),
    Row("enable_return_routed_experts vllm.enable_return_routed_experts", None,
        "follows from `trainer.model.moe.router_replay`"),
    Row(f"{OF_PORTS} vllm.{OF_PORTS} kv_cache_offload use_pd_kv_transfer", None, HARDWARE),
    Row("vllm.rope_scaling", only(None, instead="Write it into the model's `config.json`.")),
    Row("use_deep_gemm", switch("inference.env_vars.VLLM_USE_DEEP_GEMM", "1")),
    Row("enable_fp32_{lm_head router_logits}", None, "the engine computes its head and routers as vLLM does"),
    Row("server.liveness_timeout_seconds", None, "`supervisor.unhealthy_after_s` is for this"),
    Row("backend_port router", None, "the orchestrator routes requests to the engines itself"),
    Row("deployment", None, "each engine prefills and decodes"),
    Row("slurm", None, SUBMIT),
    Row("output_dir", "output_dir"),
)  # fmt: skip

RUN = spread(
    Row("restart", "supervisor.restart"),
    Row("seq_len", rules.set_seq_len),
    Row("ckpt", "trainer.ckpt"),
    Row("resume", rules.resume),
    Row("trainer.max_steps", "max_steps"),
    Row("model.impl", "trainer.model.impl"),
    Row("max_concurrent", "orchestrator.max_concurrent"),
    Row("tokenizer", "trainer.tokenizer"),
    Row("run.name", lambda name, table: "`run.dir` names the folder" if table["run"].get("dir") else {"name": name}),
    Row("run.dir", "name"),
    Row("clean clean_output_dir", None, "files of an earlier run are moved aside"),
    Row("dry_run", only(False, instead="type `--dry-run`: a file cannot ask for it.")),
    *(Row(f"{name}.{{log weight_broadcast}}", "{}") for name in PROCESSES),
    *(Row(f"{name}.{{resume output_dir wandb monitors rollout_transport}}", "{}") for name in PROCESSES[:2]),
    Row("rollout_transport", None, "batches go over one connection, from the journal"),
    # logs and monitors
    Row("log.level", lambda level, table: {"log_level": rules.LEVELS.get(level.lower(), level.lower())}),
    Row("log wandb.log_extras wandb.shared", None, NO_MATTER),
    Row("monitors.wandb", "wandb"),
    Row("monitors.file monitors.prime prime_monitor", None, IN_RUN),
    Row("wandb.offline", switch("wandb.mode", "offline")),
    # machines
    Row("deployment.type", lambda kind, table: ONE if kind == "single_node" else SEVERAL),
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
    Row("bench", only(False, instead="`scripts/bench` and `trireme plan` measure. Remove it.")),
)  # fmt: skip

PRIME_RL = spread(
    RUN,
    under("trainer", *TRAINER),
    ORCHESTRATOR,
    of_sampling("orchestrator.sampling"),
    of_sources("orchestrator.env", trains=True),
    of_evaluation("orchestrator.eval"),
    of_renderer("orchestrator.renderer", "orchestrator.sampling.chat_template_kwargs"),
    INFERENCE,
)
