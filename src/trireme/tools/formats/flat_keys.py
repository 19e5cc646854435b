"""What the flat files of `prime-rl` and of hosted training have in common, translated."""

from __future__ import annotations

from typing import Any

from trireme.config.files import toml_value
from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.config.section import fields_of
from trireme.config.trainer import Lora
from trireme.tools.formats.flat_file import Common
from trireme.tools.formats.translation import Reader, Sheet

ADAPTER_LR, WHOLE_LR = 1e-5, 1e-6
"""Where the guide to these formats begins, with adapters and without."""
TURNS = 4  # of `max_tokens` that fit into a sample where nobody says how long it may be


def lift(table: dict[str, Any], root: type[Common], sheet: Sheet) -> dict[str, Any]:
    """With keys of the run where they belong: the guide shows some below `[sampling]` and `[wandb]`, whose keys TOML
    takes them for.

    Example:
        lift({"wandb": {"env_file": ["secrets.env"]}}, ...)  # {"wandb": {}, "env_file": ["secrets.env"]}
    """
    lifted = dict(table)
    for name, found in fields_of(root).items():
        below = table.get(name)
        if found.section is None or not isinstance(below, dict):
            continue
        strays = (below.keys() & fields_of(root).keys()) - fields_of(found.section).keys() - table.keys()
        lifted[name] = {key: value for key, value in below.items() if key not in strays}
        for key in sorted(strays):
            lifted[key] = below[key]
            sheet.note(f"{name}.{key}: it stands below [{name}], and is taken as `{key}` of the run")
    return lifted


def put_shared(sheet: Sheet, file: Common) -> None:
    keys = Reader(sheet, file)
    keys.take("name", "name", file.name or _plain(file.env[0].id), why="" if file.name else "the environment's name")
    for key in ("output_dir", "seed", "max_steps", "max_async_level"):
        keys.take(key, key)
    for key in ("batch_size", "rollouts_per_example"):
        keys.take(key, f"orchestrator.{key}")
    _put_environments(sheet, file)
    _put_sampling(sheet, file.sampling)
    _put_length(keys, file)
    _put_recipe(keys, file)
    _put_rest(sheet, file)
    if file.env_file:
        keys.tell("env_file", "given to the processes of the run where `prime-rl` or `trireme submit` starts it")


def put_memory(sheet: Sheet) -> None:
    """On GPUs. These formats have no keys for it: it is what lets long samples fit."""
    sheet.set("trainer.model.optimization_dtype", "bfloat16")
    sheet.set("trainer.model.ac.freq", 1)
    sheet.note('on GPUs: trainer.model.optimization_dtype = "bfloat16", trainer.model.ac.freq = 1')


def _plain(id: str) -> str:
    """The name of an environment without its owner."""
    return id.rstrip("/").rpartition("/")[2].removesuffix(".py")


def _put_environments(sheet: Sheet, file: Common) -> None:
    entries: list[dict[str, Any]] = []
    for index, env in enumerate(file.env):
        entries.append({key: value for key in ("id", "name", "args", "weight") if (value := _given(env, key))})
        sheet.note(f"env[{index}].id = {toml_value(env.id)} -> orchestrator.env[{index}]")
    sheet.set("orchestrator.env", entries)


def _given(section: Any, key: str) -> Any:
    return getattr(section, key) if key in section.model_fields_set else None


def _put_sampling(sheet: Sheet, sampling: Sampling) -> None:
    keys = Reader(sheet, sampling, "sampling.")
    for key in Sampling.model_fields:
        if keys.given(key):
            keys.take(key, f"orchestrator.sampling.{key}")


def _put_length(keys: Reader, file: Common) -> None:
    if file.seq_len:
        keys.take("seq_len", "seq_len")
        return
    usual = RunConfig.model_fields["seq_len"].default
    length = max(usual, TURNS * (file.sampling.max_tokens or 0))
    keys.take("seq_len", "seq_len", length, why=f"room for {TURNS} turns; set it for longer rollouts")


def _put_recipe(keys: Reader, file: Common) -> None:
    why = (
        "" if file.learning_rate else "where the guide begins " + ("with" if file.use_lora else "without") + " adapters"
    )
    keys.take(
        "learning_rate", "trainer.optim.lr", file.learning_rate or (ADAPTER_LR if file.use_lora else WHOLE_LR), why=why
    )
    if file.use_lora:
        keys.take("lora_rank", "trainer.model.lora.rank", file.lora_rank or Lora().rank)
        keys.take("lora_alpha", "trainer.model.lora.alpha", file.lora_alpha or Lora().alpha)
    for key in ("lora_rank", "lora_alpha"):
        if keys.given(key) and not file.use_lora:
            keys.refuse(key, "without `use_lora = true` nothing has a rank. Add that, or remove the key.")
    if file.use_difficulty_filtering:
        keys.take("use_difficulty_filtering", "orchestrator.buffer.use_difficulty_filtering")
        keys.take("difficulty_threshold", "orchestrator.buffer.difficulty_threshold")
    elif keys.given("difficulty_threshold"):
        keys.refuse("difficulty_threshold", "it means nothing without `use_difficulty_filtering = true`. Add that.")


def _put_rest(sheet: Sheet, file: Common) -> None:
    if file.checkpointing:
        saving = Reader(sheet, file.checkpointing, "checkpointing.")
        saving.take("save_every_n_steps", "trainer.ckpt.interval")
        saving.take("keep_n_checkpoints", "trainer.ckpt.keep_last")
    if file.wandb:
        wandb = Reader(sheet, file.wandb, "wandb.")
        for key in ("project", "name", "mode"):
            if key == "project" or wandb.given(key):
                wandb.take(key, f"wandb.{key}")
