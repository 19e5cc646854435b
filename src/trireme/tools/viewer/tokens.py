"""The tokens of a sample: their text, and colours by what the journal knows of each. Pure but for finding a tokenizer.

A token's text is what it adds to the text before it; where several tokens make up one character, the last one has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.style import Style
from rich.text import Text

from trireme.messages import Tokens
from trireme.tools.rollouts import clean
from trireme.tools.tokenizer import visible

COLOURS = ("logprob", "advantage", "version", "plain")
WINDOW = 1500  # tokens shown at once
PART = "▯"  # a token that is the beginning of a character
GIVEN = Style(dim=True)
CURSOR = Style(reverse=True, bold=True)
VERSIONS = ("#1f4f7a", "#5b2a6e", "#1f6b4a", "#7a5a1f", "#7a2f3d", "#3d4b8a")
RARE = -5.0  # a logprob that has the strongest colour, as everything below


def token_text(sample: Tokens, texts: Sequence[str], colour: str, *, cursor: int, window: range) -> Text:
    """The tokens of the window, each in its colour, the one under the cursor turned round."""
    scale = _scale(sample)
    found = Text(no_wrap=False)
    for place in window:
        style = style_of(sample, place, colour, scale=scale)
        found.append(visible(texts[place]), style + CURSOR if place == cursor else style)
    return found


def _scale(sample: Tokens) -> float:
    """The largest advantage, whichever its sign."""
    return float(np.abs(sample.advantages).max(initial=0.0)) or 1.0


def style_of(sample: Tokens, place: int, colour: str, *, scale: float) -> Style:
    if sample.loss_mask[place] == 0:
        return GIVEN
    if colour == "logprob":
        return _blend("#7a1f1f", min(1.0, float(sample.logprobs[place]) / RARE))
    if colour == "advantage":
        value = float(sample.advantages[place]) / scale
        return _blend("#1f5f2f" if value > 0 else "#7a1f1f", abs(value))
    if colour == "version":
        return Style(bgcolor=VERSIONS[int(sample.versions[place]) % len(VERSIONS)], color="#ffffff")
    return Style()


def _blend(colour: str, share: float) -> Style:
    """From no colour at all to this one."""
    share = max(0.0, min(1.0, share)) if math.isfinite(share) else 1.0
    if share < 0.05:
        return Style()
    parts = [int(int(colour[at : at + 2], 16) * (0.35 + 0.65 * share)) for at in (1, 3, 5)]
    return Style(bgcolor=f"#{parts[0]:02x}{parts[1]:02x}{parts[2]:02x}", color="#ffffff")


def legend(colour: str) -> str:
    return {
        "logprob": f"redder: less likely when it was sampled (darkest at 1, strongest at {math.exp(RARE):.3f} or less)",
        "advantage": "green: made more likely by this batch, red: less",
        "version": "a colour for each version of the policy that sampled",
        "plain": "dim: given to the model, not sampled by it",
    }[colour]


def describe(sample: Tokens, place: int, text: str, *, step: int | None) -> str:
    """All that is known of one token, on a line.

    Example:
        token 57/97 · 17 'ab' · logprob -0.693, p 0.500 · adv +0.310 · v3, lag 1
    """
    head = f"token {place + 1}/{sample.length} · {int(sample.ids[place])} {clean(text)!r}"
    if sample.loss_mask[place] == 0:
        return f"{head} · given"
    logprob, version = float(sample.logprobs[place]), int(sample.versions[place])
    lag = "" if step is None else f", lag {step - version}"
    return (
        f"{head} · logprob {logprob:.3f}, p {math.exp(min(0.0, logprob)):.3f} · "
        f"adv {float(sample.advantages[place]):+.3f} · v{version}{lag}"
    )
