"""The experts that an engine sent each token to (router replay): check them, and add them to a sample.

An engine computes every token of a turn but the last one, which nothing follows yet. So the routes of a beginning of a
sample are known; the next turn, if there is one, continues from there.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from trireme.algo.model.architecture import experts_used
from trireme.base.errors import ConfigError
from trireme.config.model.folder import NUM_EXPERTS, num_experts_of
from trireme.config.rules.engine import REPLAY
from trireme.config.run import RunConfig
from trireme.messages import Routed
from trireme.orchestrator.engines.responses import BadAnswer, Choice

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a model with a mixture of experts."""

    layers: int  # all, with those that have no experts
    top_k: int  # experts of a token
    num_experts: int  # experts in a layer

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 256 else np.dtype("uint16")


def experts_to_replay(config: RunConfig, model_config: dict[str, Any]) -> ExpertShape | None:
    """Return a model's sizes, from its `config.json`, for router replay; None if the run does not use it.

    Raises: ConfigError if the model has no experts.
    """
    if not config.replays_routes:
        return None

    # Models that also see have the sizes of their text model in a table of its own.
    text = model_config.get("text_config") or model_config
    num_experts, layers, top_k = num_experts_of(text), text.get("num_hidden_layers"), experts_used(text, 0)
    if not (num_experts and layers and top_k):
        raise ConfigError(
            f"`{REPLAY}` with {config.model.name} - a model with a mixture of experts was "
            f"expected: its config.json names none of {', '.join(NUM_EXPERTS)}. Remove the line."
        )
    return ExpertShape(layers, top_k, num_experts)


def routes_of(choice: Choice, *, num_prompt: int, shape: ExpertShape) -> np.ndarray:
    """Return [N, layers, top_k]: routes of the last `num_prompt` tokens of the prompt, and of the answer but its last.

    Raises: BadAnswer.
    """
    if choice.routed_experts is None:
        raise BadAnswer(
            "The engine did not say which experts it used - expected it with `enable_return_routed_experts`."
        )

    # The trainer indexes its experts with these numbers, so they are checked in full.
    routes = _read_array(choice.routed_experts)
    expected = (num_prompt + len(choice.token_ids) - 1, shape.layers, shape.top_k)
    if routes.shape != expected or routes.dtype.kind != "u":
        raise BadAnswer(
            f"The engine gave experts of (tokens, layers, experts of a token) {routes.shape}, as {routes.dtype} - "
            f"{expected} were expected, as unsigned integers."
        )
    if routes.size and routes.max() >= shape.num_experts:
        raise BadAnswer(f"The engine used expert {routes.max()} - the model has {shape.num_experts}, from 0 on.")
    return routes.astype(shape.dtype)


def _read_array(text: str) -> np.ndarray:
    """Read what `numpy.save` wrote, in base64. Allocates no more than was sent, whatever the header promises."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        values = np.frombuffer(file.read(), dtype=dtype)
        return values.reshape(shape, order="F" if is_fortran else "C")
    except Exception as error:  # any bytes may arrive, and they can make a parser raise anything
        raise BadAnswer(f"The engine gave experts that cannot be read ({type(error).__name__}: {error}).") from error


def to_routed(chunks: list[np.ndarray], length: int) -> Routed | None:
    """Join the routes of the beginning of a sample of `length` tokens; None if there are none."""
    if not chunks:
        return None
    routes = np.concatenate(chunks)
    known = np.zeros(length, dtype=np.uint8)
    known[: len(routes)] = 1
    _, layers, top_k = routes.shape
    return Routed(known, routes.reshape(-1), layers, top_k)
