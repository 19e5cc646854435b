"""Mixtures of experts: how experts are computed, how routers are trained, and router replay.

Router replay (Rollout Routing Replay, arXiv 2510.11370) sends a token to the experts that the engine sent it to, even
if the trainer's router, which rounds differently, would choose others. The experts' weights come from the trainer's
router, normalised over those experts, so that routers are trained. This holds for prompts and answers. A token without
a route from the engine (the last one of a sample, all tokens of supervised training) follows the trainer's router.

This file holds all assumptions about transformers' internals. A block has `experts` and a router, `gate` or `router`.
Families differ in what a router returns, and in which order: (logits, weights, ids), Granite's and Aria's (ids,
weights, logits), Inkling's one more, DBRX's and Jamba's the logits alone. They agree in what experts are given, which
transformers' `use_experts_implementation` prescribes: (tokens, ids of the chosen experts, weights of these). So routes
are read and replaced there. Checked against transformers 5.19.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.trainer import TrainerModel
from trireme.messages import Routed

log = get_logger("trainer")

ROUTERS = ("gate", "router")
ARGUMENT = "routes"

Take = Callable[[np.ndarray], np.ndarray]  # takes this rank's part of a column of a row


class Routes:
    """The experts that tokens are sent to.

    They are an argument of the forward pass, so that activation checkpointing has them in the backward pass too.
    """

    def __init__(self, routed: Routed, device: torch.device, take: Take) -> None:
        places = take(np.cumsum(routed.known, dtype=np.int64) * routed.known)  # rows of the table; 0 if not known

        # Row 0 of the table is for tokens without a route.
        table = routed.experts.reshape(-1, routed.layers, routed.top_k).astype(np.int16)
        table = np.concatenate([np.zeros((1, routed.layers, routed.top_k), np.int16), table])
        self.known = torch.from_numpy(places > 0).to(device)[:, None]  # [N, 1]
        self.experts = torch.from_numpy(table[places]).to(device)  # [N, layers, top_k]


def routes_argument(
    model: PreTrainedModel, routed: Routed | None, device: torch.device, take: Take = lambda column: column
) -> dict[str, Routes]:
    """Return the arguments of the model's forward pass that replay the engine's routes."""
    replays = routed is not None and any(mixture.weighing for mixture in mixtures_of(model))
    return {ARGUMENT: Routes(routed, device, take)} if routed is not None and replays else {}


def prepare_experts(model: PreTrainedModel, config: TrainerModel, layers: list[nn.Module]) -> None:
    """Set up the experts and routers of the decoder layers before they are sharded, if there are any.

    Raises:
        ConfigError: the experts or routers do not support the configuration.
    """
    blocks = [(index, layer, block) for index, layer in enumerate(layers) for block in blocks_of(layer)]

    # Without experts, settings that need them are a mistake of the user.
    if not blocks:
        asked = {"router_replay = true": config.moe.router_replay, 'router = "frozen"': config.moe.router == "frozen"}
        for line in (line for line, is_asked in asked.items() if is_asked):
            raise ConfigError(
                f"`trainer.model.moe.{line}` with {type(model).__name__} - a model with a mixture of experts was "
                "expected, whose routers transformers calls `gate` or `router`. Remove the line."
            )
        return

    for _, _, block in blocks:
        router_of(block).requires_grad_(config.moe.router == "trained")

    try:
        model.set_experts_implementation(config.moe.implementation)
    except ValueError as error:  # Llama 4 and LongCat have code of their own, and routers with other outputs
        if config.moe.router_replay:
            raise ConfigError(
                f"`trainer.model.moe.router_replay = true` with {type(model).__name__}: {error} - expected a model "
                "whose experts and routers are those that transformers' models share. Remove the line."
            ) from error
        log.warning(
            "%s computes its experts in its own way: trainer.model.moe.implementation has no effect, and there are no "
            "metrics of experts",
            type(model).__name__,
        )
        return

    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):  # transformers would compute a load-balancing loss
        text.output_router_logits = False

    # All layers have routers of one kind, so one of them shows how weights are computed.
    weighing = find_weighing(blocks[0][2], text) if config.moe.router_replay else None
    model._mixtures = [Mixture(index, layer, block, weighing) for index, layer, block in blocks]


def mixtures_of(model: PreTrainedModel) -> list[Mixture]:
    """Return the mixtures of a prepared model; none if it has no experts."""
    return getattr(model, "_mixtures", [])


def blocks_of(layer: nn.Module) -> list[nn.Module]:
    """Return the blocks of a decoder layer that have experts and a router."""
    return [module for module in layer.modules() if hasattr(module, "experts") and _routers(module)]


def router_of(block: nn.Module) -> nn.Module:
    return _routers(block)[0]


def _routers(module: nn.Module) -> list[nn.Module]:
    return [child for name in ROUTERS if isinstance(child := getattr(module, name, None), nn.Module)]


Weighing = Callable[[tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]
"""Computes [N, top_k] float32 weights of chosen experts from what a router returned, and their ids."""


def find_weighing(block: nn.Module, config: PretrainedConfig) -> Weighing:
    """Find how a block weighs experts by running a router of its class with random weights, as no attribute holds it.

    Raises:
        ConfigError: it weighs them in an unknown way.
    """
    router = router_of(block)
    returned = _run_random_router(block, config)
    scores = [index for index, tensor in enumerate(returned) if tensor.is_floating_point() and tensor.dim() == 2]
    scales = {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}

    # The ids are the whole numbers; one tensor of scores gives the other one, if it is weighed as here.
    for chosen in (tensor for tensor in returned if not tensor.is_floating_point()):
        for (place, weights), squash, normalized, scale in product(
            permutations(scores, 2), (partial(torch.softmax, dim=-1), torch.sigmoid), (True, False), sorted(scales)
        ):
            weighing = partial(_weigh, place=place, squash=squash, normalized=normalized, scale=scale)
            if returned[weights].shape != chosen.shape or returned[place].shape[-1] < int(chosen.max()) + 1:
                continue
            if torch.allclose(weighing(returned, chosen), returned[weights], rtol=1e-4, atol=1e-6):
                return weighing
    raise ConfigError(
        f"`trainer.model.moe.router_replay = true`: how {type(router).__name__} weighs experts is not known - expected "
        "a softmax or sigmoid of its logits, normalised or not. Remove the line."
    )


def _run_random_router(block: nn.Module, config: PretrainedConfig) -> tuple[torch.Tensor, ...]:
    """Return what a router of the block's class returns for 32 random tokens; nothing if it cannot run by itself."""
    # The model itself has no values yet, so a router of its class is drawn at random.
    router = router_of(block)
    of_block = list(inspect.signature(type(router).forward).parameters)[2:]  # MiniMax M2's takes a bias of its block
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            random_router = type(router)(config).float()
            for tensor in (*random_router.parameters(), *random_router.buffers()):
                tensor.normal_(0.0, 0.3)
            more = [torch.zeros(getattr(block, name).shape) for name in of_block]
            returned = random_router(torch.randn(32, config.hidden_size), *more)
    except (TypeError, AttributeError, ValueError, RuntimeError):  # another constructor, or arguments of its own
        return ()
    return returned if isinstance(returned, tuple) else ()


def _weigh(
    returned: tuple[torch.Tensor, ...],
    chosen: torch.Tensor,
    *,
    place: int,
    squash: Callable[[torch.Tensor], torch.Tensor],
    normalized: bool,
    scale: float,
) -> torch.Tensor:
    weights = squash(returned[place].float()).gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights) * scale


class Mixture:
    """The experts of one layer: replays the engine's routes, and counts the tokens of each expert."""

    def __init__(self, index: int, layer: nn.Module, block: nn.Module, weighing: Weighing | None) -> None:
        self.weighing = weighing  # set if the engine's routes are replayed
        self._index = index
        self._routes: Routes | None = None  # the routes of the row in the current pass
        self._returned: tuple[torch.Tensor, ...] = ()  # the router's output in the current pass
        self._counts: torch.Tensor | None = None

        self._forward = layer.forward
        layer.forward = self._run
        if weighing:
            router_of(block).register_forward_hook(self._keep_returned)
        block.get_submodule("experts").register_forward_pre_hook(self._route)

    def _run(self, *args: Any, routes: Routes | None = None, **kwargs: Any) -> Any:
        """Run the layer's forward pass; also when it is recomputed in the backward pass."""
        self._routes = routes
        return self._forward(*args, **kwargs)

    def _keep_returned(self, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._returned = output

    def _route(
        self, experts: nn.Module, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, own, weights = args
        chosen, known = own, torch.zeros_like(own[:, :1], dtype=torch.bool)

        # Send tokens where the engine sent them.
        if self._routes is not None and self.weighing is not None:
            known = self._routes.known
            chosen = torch.where(known, self._routes.experts[:, self._index].to(own.dtype), own)
            weights = torch.where(known, self.weighing(self._returned, chosen).to(weights.dtype), weights)
        self._returned = ()

        # Count tokens that are trained on only.
        if torch.is_grad_enabled():
            places = chosen.reshape(-1).long()
            per_expert = torch.zeros(experts.num_experts, dtype=torch.int64, device=own.device)
            per_expert.scatter_add_(0, places, torch.ones_like(places))
            moved = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
            counts = torch.cat([per_expert, known.sum()[None], moved.sum()[None]])
            self._counts = counts if self._counts is None else self._counts + counts
        return hidden, chosen, weights

    def take_counts(self) -> torch.Tensor:
        """Return [experts + 2] float64 counts since the last call: the tokens of each expert, the tokens with a
        replayed route, and of these those that the router would have sent to other experts."""
        counts, self._counts = self._counts, None
        assert counts is not None, "no token was counted yet"
        return counts.double()


def expert_metrics(model: PreTrainedModel) -> dict[str, float]:
    """Return how evenly experts were used since the last call, averaged over layers. A collective.

    Returns nothing for a model without experts.
    """
    mixtures = mixtures_of(model)
    if not mixtures:
        return {}

    counts = torch.stack([mixture.take_counts() for mixture in mixtures])  # [layers, experts + 2]
    dist.all_reduce(counts)
    load, replayed, moved = counts[:, :-2], counts[:, -2].sum(), counts[:, -1].sum()
    metrics = {
        "moe/busiest_expert": float((load.amax(-1) / load.mean(-1)).mean()),
        "moe/idle_experts_frac": float((load == 0).double().mean()),
    }
    return metrics | ({"moe/rerouted_frac": float(moved / replayed)} if replayed else {})
