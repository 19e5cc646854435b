"""Models that pictures are given to (`[model.vlm]`): which can be trained and served, and with which other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trireme.config.model.state_layers import mixers_of, text_of
from trireme.config.run import RunConfig
from trireme.config.trainer import TrainerModel

KINDS = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) whose pictures are read as `algo/pictures.py` says."""

WITHOUT_TEXT_MODEL = ("qwen2_5_vl",)
"""Those of `KINDS` that transformers cannot hold as a text model."""

MOST_PICTURES = 64  # pictures of one conversation

OF_PICTURES = (
    *("language_model_only", "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb", "media_io_kwargs"),
    *("allowed_media_domains", "allowed_local_media_path"),
)
"""Arguments of vLLM that decide how it reads pictures, and whether it does."""


def vision_problems(table: str, model: TrainerModel, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the trainer cannot give pictures to a model with this config.json, or must be able to."""
    kind, named = config.get("model_type"), f'{table}.name = "{model.name}"'
    ropes = [part.get(key) or {} for part in (config, text_of(config)) for key in ("rope_parameters", "rope_scaling")]

    if model.vlm is not None and (kind not in KINDS or "vision_config" not in config):
        yield (
            f"`[model.vlm]` with {named} ({kind}), to which Trireme cannot give pictures - expected a model_type of "
            f"{', '.join(KINDS)}, and a vision_config, in its config.json. Remove the table, or choose another model."
        )
    # Engine and trainer must give image tokens the same positions.
    elif model.vlm is not None and not any("mrope_section" in rope for rope in ropes):
        yield (
            f"{named}: its config.json has no mrope_section in rope_parameters or rope_scaling - expected one, as "
            "without it the engine gives image tokens the positions of text, and the trainer those of pictures. Copy "
            "the config.json of the published model."
        )
    elif model.vlm is None and kind in WITHOUT_TEXT_MODEL:
        yield (
            f"{named}: transformers has no text model of {kind} by itself - expected `[model.vlm]`, with which the "
            "model that also sees is trained. Add the table, which may be empty."
        )
    # With layers that carry a state, `cp` is refused anyway.
    elif model.vlm is not None and model.cp > 1 and not mixers_of(config):
        yield f"{table}.cp = {model.cp} with `[model.vlm]` - expected 1: ranks cannot share its pictures. Set it to 1."


def picture_run_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings of a run that contradict its `[model.vlm]`."""
    if config.trainer.model.vlm is None:
        return
    for name in sorted(name for name in config.inference.args if name.replace("-", "_") in OF_PICTURES):
        yield (
            f"inference.args.{name} with `[model.vlm]` - expected none: the engine must read pictures as the trainer "
            "does, and is given its own. Remove the line; how large pictures are read belongs in a copy of the model's "
            "preprocessor_config.json."
        )
    if (kept := config.inference.keep_prefix_cache) != "never":
        yield (
            f'inference.keep_prefix_cache = "{kept}" with `[model.vlm]` - expected "never", as what vLLM has computed '
            "of a picture would outlive the weights that computed it. Remove it."
        )
    if any(own.echo for own in (config.orchestrator, *config.orchestrator.sources.values())):
        yield "`[orchestrator.echo]` with `[model.vlm]` - expected none, as pictures have no text to weigh. Remove it."
    if any(own.teacher for own in (config.orchestrator, *config.orchestrator.sources.values())):
        yield "`[orchestrator.teacher]` with `[model.vlm]` - expected no teacher, as it sees no pictures. Remove it."
