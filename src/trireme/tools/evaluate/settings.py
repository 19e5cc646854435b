"""What an evaluation's configuration says of whom it asks, and of what its answers depend on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trireme.base.errors import ConfigError
from trireme.base.network import is_loopback
from trireme.base.token import TOKEN
from trireme.orchestrator.environments.pool import Environment
from trireme.tools.evaluate.endpoints import key_for_address
from trireme.tools.evaluate.eval_config import EvalConfig


def key_of(config: EvalConfig) -> str | None:
    """Raises: ConfigError where a variable is named, and is not set."""
    name = config.client.api_key_var
    if name and not os.environ.get(name):
        raise ConfigError(
            f"client.api_key_var = {name!r}: this variable is not set - expected the server's key in it. Type `export "
            f"{name}=…`, or leave it out."
        )
    is_near = is_loopback(urlsplit(config.client.base_url).hostname or "")
    if name:
        return os.environ[name]
    ours = os.environ.get(TOKEN) if is_near or config.weights_dir else None
    return ours or key_for_address(config.client.base_url)


def settings_of(environment: Environment, config: EvalConfig, split: str) -> dict[str, Any]:
    """What answers depend on."""
    return {
        "env_id": Path(environment.config.id).name,
        "env_args": environment.config.args,
        "sampling_args": config.evaluation.sampling.model_dump(exclude_defaults=True, mode="json"),
        "split": split,
        "max_turns": environment.config.max_turns,
    }
