"""A loss function of the user's (`trainer.loss.type = "custom"`): load it, try it out, and check what it returns."""

from __future__ import annotations

from typing import Any

import torch

from trireme.algo.columns import Columns, CustomLoss
from trireme.base.errors import ConfigError
from trireme.base.functions import load_function
from trireme.config.losses import Loss

KEY = "trainer.loss.path"


def load_custom_loss(recipe: Loss) -> CustomLoss | None:
    """Return the user's loss with its arguments and checks, or None if the recipe is not `custom`.

    Raises:
        ConfigError: it cannot be loaded, does not take its arguments, or fails on three made-up tokens.
    """
    if recipe.surrogate != "custom":
        return None
    assert recipe.path, "`loss_problems` asks for a path"
    function = load_function(recipe.path, key=KEY)

    def loss(columns: Columns) -> torch.Tensor:
        return _checked(function(columns, **recipe.args), columns, recipe)

    _try_out(loss, recipe)
    return loss


def _checked(found: Any, columns: Columns, recipe: Loss) -> torch.Tensor:
    # Each of these would otherwise fail later, in the middle of a step and without the name of the function.
    count = len(columns.logprobs)
    if not isinstance(found, torch.Tensor):
        raise _nonsense(recipe, f"a {type(found).__name__}")
    if found.shape != columns.logprobs.shape:
        raise _nonsense(recipe, f"a tensor of shape {list(found.shape)} for {count} tokens")
    if not found.is_floating_point():
        raise _nonsense(recipe, f"a tensor of {found.dtype}")
    if torch.is_grad_enabled() and columns.logprobs.requires_grad and not found.requires_grad:
        raise _nonsense(recipe, "a tensor without a gradient")
    return found


def _nonsense(recipe: Loss, what: str) -> ConfigError:
    return ConfigError(
        f'`{KEY} = "{recipe.path}"` returned {what} - expected each token\'s loss: a floating-point tensor of the '
        "shape of `columns.logprobs`, computed from it. Do not average: that is what `trainer.loss.normalize` is for."
    )


def _try_out(loss: CustomLoss, recipe: Loss) -> None:
    """Call the loss on made-up tokens before a model is loaded."""
    columns = made_up_columns(with_reference=recipe.beta > 0)
    try:
        found = loss(columns)
        found.sum().backward()
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f'`{KEY} = "{recipe.path}"` raised {type(error).__name__}: {error} when it was tried out on three tokens '
            f"with {dict(recipe.args)}. Expected `def loss(columns, ...)` of `trireme.algo.columns.Columns`, with a "
            "keyword for each of `trainer.loss.args`. Correct it."
        ) from error

    # A loss or gradient that is not finite on ordinary values would end the run at its first step.
    gradient = columns.logprobs.grad
    if not bool(found.isfinite().all()) or gradient is None or not bool(gradient.isfinite().all()):
        raise _nonsense(recipe, f"{found.tolist()} with the gradient {None if gradient is None else gradient.tolist()}")


def made_up_columns(*, with_reference: bool = False) -> Columns:
    """Return columns of three tokens in two samples."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-0.6, -1.0, -1.5])
    return Columns(
        logprobs=logprobs,
        entropies=torch.tensor([0.7, 1.1, 1.3], requires_grad=True),
        behaviour=behaviour,
        proximal=behaviour,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        versions=torch.tensor([0, 0, 0]),
        samples=torch.tensor([0, 0, 1]),
        num_samples=2,
        mask=torch.ones(3, dtype=torch.bool),
        reference=torch.tensor([-0.5, -1.2, -1.9]) if with_reference else None,
    )
