"""The single file of `vf-rl`, translated into our configuration, key by key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from trireme.base.devices import Devices
from trireme.config.arguments import TypedFlag
from trireme.config.load import read_as
from trireme.tools.formats.translation import Reader, Sheet, Translation
from trireme.tools.formats.vf_rl_engine import put_engine
from trireme.tools.formats.vf_rl_file import VfArgs, VfRl, VfWandb

ARGS = "trainer.args."
CPU_ROW_TOKENS = 512
SAMPLE_STEPS = 5  # from one look at completions to the next
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SAID_ELSEWHERE = {
    "temperature": "the reference's default; the tutorial says 1.0",
    "max_tokens": "the reference's default: up to the context; the tutorial says 512",
}


def translate(
    table: dict[str, Any], devices: Devices, *, where: str = "the file", flags: Sequence[TypedFlag] = ()
) -> Translation:
    """
    Args:
        flags: typed on top, in the keys of this format.

    Raises: ConfigError with all keys that are not of this format, cannot have that value, or mean nothing here.
    """
    file, sheet = read_as(VfRl, table, where=where, flags=flags), Sheet()
    args = Reader(sheet, file.trainer.args, ARGS)
    top = Reader(sheet, file)
    top.take("model", "model.name")
    _put_place(args, file)
    _put_environment(sheet, file)
    _put_devices(sheet, file, devices)
    put_engine(sheet, file, args)
    _put_batch(args, file, devices)
    _put_model(args, file.trainer.args, devices)
    _put_recipe(args, file.trainer.args)
    _put_sampling(args)
    _put_evaluation(args, file.trainer.args)
    _put_checkpoints(args, file.trainer.args)
    _put_console(args, file.trainer.args)
    return sheet.finish()


def _put_place(args: Reader, file: VfRl) -> None:
    given = file.trainer.args
    folder = PurePath(given.output_dir) if given.output_dir else None
    name = given.run_name or file.env.id.rstrip("/").rpartition("/")[2].removesuffix(".py")
    why = "" if given.run_name else "the environment's name"
    args.take("run_name", "name", folder.name if folder else name, why="the folder's name" if folder else why)
    if folder:
        args.take("output_dir", "output_dir", str(folder.parent), why=f"the run's folder is {folder}")
    args.take("seed", "seed")
    if given.resume_from_checkpoint:
        _put_resume(args, given.resume_from_checkpoint)


def _put_resume(args: Reader, place: str) -> None:
    step = PurePath(place).name.removeprefix("checkpoint-")
    if place.lower() == "true":
        args.take("resume_from_checkpoint", "resume", True)
    elif step.isdigit():
        args.take("resume_from_checkpoint", "trainer.ckpt.resume_step", int(step), why="of this run's own folder")
    else:
        args.refuse("resume_from_checkpoint", 'expected "true", or a folder `checkpoint-N` of this run. Write one.')


def _put_environment(sheet: Sheet, file: VfRl) -> None:
    args, env = file.trainer.args, Reader(sheet, file.env, "env.")
    entry: dict[str, Any] = {"id": file.env.id}
    sheet.put("orchestrator.env", [entry], theirs="env.id", said=env.said("id"))
    if file.env.args:
        entry["args"] = file.env.args
        sheet.note("env.args -> orchestrator.env[0].args")
    limits = {"max_concurrent": "max_concurrent", "generation_timeout": "rollout_timeout_s"}
    for theirs, ours in limits.items():
        entry[ours] = getattr(args, theirs)
        reader = Reader(sheet, args, ARGS)
        sheet.note(f"{ARGS}{theirs}{reader.said(theirs)} -> orchestrator.env[0].{ours} = {entry[ours]:g}")


def _put_devices(sheet: Sheet, file: VfRl, devices: Devices) -> None:
    """Contiguous, engines first; one GPU is shared; none at all means the CPU."""
    engines, trainer = file.inference.gpus, file.trainer.gpus
    if not devices.gpus:
        sheet.set("device", "cpu")
        sheet.note(f'inference.gpus = {engines}, trainer.gpus = {trainer} -> device = "cpu": this machine shows no GPU')
        return
    sheet.put("inference_gpus", engines, theirs="inference.gpus", said=f" = {engines}")
    sheet.put("trainer_gpus", trainer, theirs="trainer.gpus", said=f" = {trainer}", why="those after the engines'")
    if devices.num_gpus == 1 and engines == trainer == 1:
        sheet.note("this machine has one GPU: engine and trainer share it")


def _put_batch(args: Reader, file: VfRl, devices: Devices) -> None:
    given = file.trainer.args
    group = _one_of(args, "rollouts_per_example", "num_generations")
    rows = _one_of(args, "micro_batch_size", "per_device_train_batch_size")
    args.take(group, "orchestrator.rollouts_per_example")
    _put_batch_size(args, getattr(given, rows) * file.trainer.gpus, rows)
    args.take("max_seq_len", "seq_len")
    tokens = _row_tokens(given.max_seq_len, getattr(given, rows), on_cpu=not devices.gpus)
    why = "rollouts are packed into rows of so many tokens; the gradient does not depend on it"
    args.take(rows, "trainer.micro_batch_tokens", tokens, why=why)
    args.take("max_steps", "max_steps")
    args.take("num_batches_ahead", "max_async_level")
    args.take("max_concurrent", "orchestrator.max_concurrent")
    if given.max_prompt_len:
        args.tell("max_prompt_len", "not needed here: prompt and completions share max_seq_len, nothing is cut off")
    if given.generation_batch_size:
        args.tell("generation_batch_size", "not needed here: vLLM takes requests as they come; see max_concurrent")


def _row_tokens(longest: int, rollouts: int, *, on_cpu: bool) -> int:
    """As many rollouts of full length as are to be held at once. On CPUs attention costs by the square of the row."""
    return min(rollouts * longest, max(longest, CPU_ROW_TOKENS)) if on_cpu else rollouts * longest


def _one_of(args: Reader, ours: str, older: str) -> str:
    """The name under which it was given. Both at once are refused unless they agree."""
    value, before = getattr(args.section, ours), getattr(args.section, older)
    if before is None:
        return ours
    if args.given(ours) and value != before:
        args.refuse(older, f"another name of `{ours}`, which is {value}; expected one of the two. Remove `{older}`.")
    return older


def _put_batch_size(args: Reader, at_once: int, rows: str) -> None:
    """
    Args:
        at_once: rollouts that all GPUs take at once.
    """
    given: Any = args.section
    times = given.gradient_accumulation_steps
    if times is None:
        args.take("batch_size", "orchestrator.batch_size")
        if given.batch_size % at_once:
            args.tell(
                "batch_size", f"no multiple of the {at_once} of {rows} x trainer.gpus; not needed here: rows are packed"
            )
    elif not args.given("batch_size"):
        why = f"times {at_once}, which is {rows} x trainer.gpus"
        args.take("gradient_accumulation_steps", "orchestrator.batch_size", at_once * times, why=why)
    elif given.batch_size == at_once * times:
        args.take("batch_size", "orchestrator.batch_size", why="as gradient_accumulation_steps says, too")
    else:
        args.refuse(
            "gradient_accumulation_steps",
            f"{rows} x trainer.gpus x it is {at_once * times}, and batch_size is {given.batch_size}; expected them to "
            "agree. Remove `gradient_accumulation_steps`: it follows.",
        )


def _put_model(args: Reader, given: VfArgs, devices: Devices) -> None:
    if given.use_lora:
        args.tell("use_lora", "[trainer.model.lora], as the next lines say")
        for key in ("rank", "alpha", "dropout", "target_modules", "modules_to_save", "use_rslora"):
            args.take(f"lora_{key}", f"trainer.model.lora.{key}")
    else:
        args.tell("use_lora", "no [trainer.model.lora]: the whole model is trained")
        for key in sorted(key for key in given.model_fields_set if key.startswith("lora_")):
            args.tell(key, "without effect: use_lora = false")
    if devices.gpus or args.given("bf16"):
        args.take("bf16", "trainer.model.optimization_dtype", "bfloat16" if given.bf16 else "float32")
    else:
        args.take("bf16", "trainer.model.optimization_dtype", "float32", why="on CPUs, unless it is asked for")
    if given.gradient_checkpointing:
        args.take("gradient_checkpointing", "trainer.model.ac.freq", 1)
    if args.given("ds3_gather_for_generation"):
        args.tell(
            "ds3_gather_for_generation", "no meaning here: weights are sent tensor by tensor, never gathered whole"
        )


def _put_recipe(args: Reader, given: VfArgs) -> None:
    args.take("learning_rate", "trainer.optim.lr")
    args.take("weight_decay", "trainer.optim.weight_decay")
    args.take("max_grad_norm", "trainer.optim.max_norm")
    args.take("adam_beta1", "trainer.optim.betas", [given.adam_beta1, given.adam_beta2], why="with adam_beta2")
    args.tell("adam_beta2", "the second of trainer.optim.betas")
    args.take("adam_epsilon", "trainer.optim.eps")
    args.take("lr_scheduler_type", "trainer.scheduler.type", given.lr_scheduler_type.removesuffix("_with_warmup"))
    args.take("warmup_steps", "trainer.scheduler.warmup_steps")
    args.take("num_iterations", "trainer.num_iterations")
    args.take("beta", "trainer.loss.beta")
    _put_reference(args, given)
    if given.mask_truncated_completions:
        args.take("mask_truncated_completions", "orchestrator.filters.truncated", "mask")
    if not given.mask_env_responses:
        args.refuse(
            "mask_env_responses", "tokens that the model did not write are never trained on here. Remove the key."
        )


def _put_reference(args: Reader, given: VfArgs) -> None:
    every = given.ref_model_sync_steps
    if not given.sync_ref_model and every is None:
        return
    if given.beta == 0:
        args.refuse(
            "ref_model_sync_steps" if every else "sync_ref_model",
            "without `beta` there is no reference model. Set `beta` above 0, or remove the key.",
        )
    elif every is None:
        args.refuse("sync_ref_model", "expected `ref_model_sync_steps` beside it. Write how many steps lie between.")
    else:
        args.take("ref_model_sync_steps", "trainer.loss.reference_update_every")


def _put_sampling(args: Reader) -> None:
    for key in SAMPLING:
        why = "" if args.given(key) else SAID_ELSEWHERE.get(key, "")
        args.take(key, f"orchestrator.sampling.{key}", why=why)
        if getattr(args.section, key) is None and why:
            args.tell(key, why)


def _put_evaluation(args: Reader, given: VfArgs) -> None:
    if given.eval_strategy == "epoch":
        args.refuse(
            "eval_strategy", 'expected "steps" or "no": steps are counted here. Write "steps" and `eval_steps`.'
        )
    if given.eval_strategy == "no":
        if given.eval_steps and args.given("eval_strategy"):
            args.tell("eval_steps", 'without effect: eval_strategy = "no"')
        if not given.eval_steps or args.given("eval_strategy"):
            return
    if given.eval_steps:
        args.take("eval_steps", "orchestrator.eval.interval", why="100 held-out examples, sampled as in training")
    else:
        args.tell("eval_strategy", "no eval_steps: evaluated before the first step and after the last")
    for key in SAMPLING:
        if (value := getattr(given, key)) is not None:
            args.sheet.set(f"orchestrator.eval.sampling.{key}", value)


def _put_checkpoints(args: Reader, given: VfArgs) -> None:
    if given.save_strategy == "epoch":
        args.refuse(
            "save_strategy", 'expected "steps" or "no": steps are counted here. Write "steps" and `save_steps`.'
        )
    if given.save_strategy == "no":
        args.tell("save_strategy", "saved after the last step only")
    else:
        args.take("save_steps", "trainer.ckpt.interval", why="folders checkpoint-N")
    args.take("save_total_limit", "trainer.ckpt.keep_last")


def _put_console(args: Reader, given: VfArgs) -> None:
    args.sheet.set("console.style", "vf-rl")
    args.take("logging_steps", "console.every")
    if given.log_completions:
        args.take("log_completions", "console.samples_every", SAMPLE_STEPS)
        args.take("num_completions_to_print", "console.num_samples")
    else:
        args.tell("log_completions", "no completions are shown; all are in the journal")
    _put_wandb(args, given)


def _put_wandb(args: Reader, given: VfArgs) -> None:
    """Its table alone is asking for it, too."""
    if given.report_to == "none" and (args.given("report_to") or given.wandb is None):
        args.tell("report_to", "metrics go to metrics.jsonl only")
        return
    args.tell("report_to", "[wandb]" + ("" if given.report_to == "wandb" else ", because there is such a table"))
    wandb = Reader(args.sheet, given.wandb or VfWandb(), f"{ARGS}wandb.")
    wandb.take("project", "wandb.project")
    wandb.take("name", "wandb.name", why="" if wandb.given("name") else "run_name")
