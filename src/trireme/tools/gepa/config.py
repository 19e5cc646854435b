"""`trireme gepa`: a system prompt improved by reflection, on one environment. Weights stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from trireme.config.inference import InferenceConfig
from trireme.config.sampling import Sampling
from trireme.config.section import Section, Seed


class GepaConfig(Section):
    """Everything about a search for a prompt. Flags and keys of the file have the same names."""

    env_id: str
    """Name of the environment's package (in `environments/` or installed), or path of a .py file."""
    env_args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""
    model: str
    """The model that makes rollouts: a folder (an engine is started with it), or a model's name at an endpoint."""
    reflection_model: str | None = None
    """The model that rewrites prompts; `model` where not given."""
    base_url: str | None = None
    """Address of the models' endpoint; that of each in the file of endpoints if not set."""
    api_key_var: str | None = None
    """Variable that holds the endpoint's key; OPENAI_API_KEY, for https, if not set."""
    endpoints: Path | None = None
    """File of endpoints; `configs/endpoints.toml` or `.py` where not given."""
    max_calls: PositiveInt = 500
    """Most rollouts, of all kinds together; questions to the reflection model are counted by themselves."""
    num_train: PositiveInt = 100
    """Examples that are reflected on; fewer where the data set has fewer."""
    num_val: PositiveInt = 50
    """Examples that every accepted prompt is scored on, and the best is chosen by; fewer as above."""
    minibatch_size: PositiveInt = 3
    """Examples per reflection."""
    perfect_score: float | None = None
    """Highest reward: minibatches that have it are not reflected on, and the search ends when validation has it."""
    state_columns: tuple[str, ...] = ()
    """Fields of the environment's state that the reflection model is shown too."""
    initial_prompt: Path | None = None
    """File with the prompt to begin with; the environment's own system prompt where not given."""
    sampling: Sampling = Sampling()
    """How `model` answers."""
    reflection_sampling: Sampling = Sampling()
    """How `reflection_model` answers."""
    max_turns: PositiveInt | None = None
    """Model turns per rollout; the environment's own limit where not given."""
    max_concurrent: PositiveInt = 32
    """Rollouts at once."""
    num_workers: PositiveInt = 1
    """Worker processes of the environment."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A rollout that takes longer counts as 0."""
    request_timeout_s: PositiveFloat = 300.0
    """How long one answer of a model may take before the search ends; the same command resumes it."""
    seed: Seed = 0
    """Seed of everything random: which examples, in which order, which prompt is improved next."""
    output: Path | None = None
    """Folder of the results; `outputs/gepa` in the environment's folder, or `outputs/gepa/NAME` if it has none."""
    environments: Path = Path("environments")
    """Where environments are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of an engine that is started; `auto` takes GPUs where there are some."""
    seq_len: PositiveInt | None = None
    """Longest prompt plus completion of an engine that is started; up to 2048 if not set."""
    inference: InferenceConfig = InferenceConfig()
    """More about an engine that is started."""
