"""Select the policy that answers an environment's questions: a script, an engine that is started, or a server.

All that can be refused is refused here, before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from trireme.base.errors import ConfigError
from trireme.base.token import token
from trireme.base.waiting import Waits
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.tools.policies.chat_endpoint import ChatEndpoint, look_at, open_chat_endpoint
from trireme.tools.policies.endpoint_file import find_endpoint, find_key, is_local
from trireme.tools.policies.engine import (
    LOADING,
    EnginePolicy,
    build_new_engine_opener,
    build_running_engine_opener,
    vision_of,
)
from trireme.tools.policies.script import ScriptedPolicy

RolloutPolicy: TypeAlias = "ScriptedPolicy | EnginePolicy | ChatEndpoint"
"""A source of answers to an environment's questions. Its `rollout` raises RolloutFailed, or TriremeError where no other
rollout could go better."""

OpenPolicy: TypeAlias = "Callable[[], AbstractAsyncContextManager[RolloutPolicy]]"


@dataclass(frozen=True)
class PolicyWanted:
    """The policy that the user asks for. Without any, the configuration's model is taken, or else the script."""

    model: str | None = None
    base_url: str | None = None
    key: str | None = field(default=None, repr=False)
    scripted: bool = False
    trained: bool = True  # whether rollouts must be such that they could be trained on
    pictures: Path | None = None  # folder for the pictures of conversations; a temporary one if not given


def find_policy(
    model: str | None, url: str | None, key_variable: str | None, *, endpoints: Path | None = None
) -> PolicyWanted:
    """Find a model: a folder, for which an engine is started, or a model at an address or in the file of endpoints.

    Its rollouts are measured and not trained on.

    Raises: ConfigError if neither a model nor a server is named, no place is known, or the named key is not set.
    """
    if model is None and url is None:
        raise ConfigError("no model is named - expected one. Add `-m MODEL`, or `-b URL` of a server with only one.")
    if model is not None and url is None and Path(model).is_dir():
        return PolicyWanted(model, trained=False)

    # a key that was named wins over that of the file, which is for the address in the file alone
    typed, own_key = url, None
    if model is not None:
        endpoint = find_endpoint(model, base_url=url, path=endpoints)
        model, url, own_key = endpoint.model or model, endpoint.url, endpoint.key
    key = find_key("--api-key-var", key_variable, url=typed, otherwise=own_key)
    return PolicyWanted(model, url, key, trained=False)


def build_opener(wanted: PolicyWanted, config: RunConfig, waits: Waits) -> OpenPolicy:
    """Return a function that opens the policy.

    Raises: ConfigError if there is no such model or server, or the two contradict each other.
    """
    # what the user typed decides first, then the configuration, then the script
    if wanted.scripted and (wanted.model or wanted.base_url):
        raise ConfigError(
            "--scripted came with --model or --base-url - expected one policy. Leave out --scripted, or the others."
        )
    if wanted.base_url:
        return _at_server(wanted, wanted.base_url, config, waits)

    named = config.inference.model.name or (config.model.name if "model" in config.model_fields_set else None)
    if wanted.scripted or not (wanted.model or named):
        return lambda: nullcontext(ScriptedPolicy())

    if not (wanted.trained and named):  # rollouts for training follow the run's own `[model.vlm]`
        config = updated(config, vision_of(wanted.model or str(named)))
    return build_new_engine_opener(wanted.model, config, waits, trained=wanted.trained, pictures=wanted.pictures)


def _at_server(wanted: PolicyWanted, url: str, config: RunConfig, waits: Waits) -> OpenPolicy:
    """Ask an engine of ours in tokens, if its model's files are here; any other server through its chat route.

    TRIREME_TOKEN is sent to servers on this machine for which no other key was named.
    """
    # a key that was typed wins; our own token is only for servers on this machine
    key = wanted.key or (token() if is_local(url) else None)
    server = asyncio.run(look_at(url, key=key))
    if (server.weights or "").endswith(LOADING):
        raise ConfigError(
            f"{server.root} has a part of some weights from an evaluation that did not finish ({server.weights}) - "
            "expected an engine with a whole model. Type the evaluation's command again, or restart the engine."
        )

    model = wanted.model or next(iter(server.models), None)
    if not (server.weights is not None and model and Path(model).is_dir()):
        return lambda: open_chat_endpoint(server, wanted.model, key, config.orchestrator, waits)
    return build_running_engine_opener(server, model, config, waits, trained=wanted.trained, pictures=wanted.pictures)
