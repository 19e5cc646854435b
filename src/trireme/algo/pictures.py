"""Pictures as models of the Qwen kind read them: how many tokens stand for one, and at which positions these are.

A picture is scaled to a multiple of a block of pixels, and each block becomes one image token. A chat template writes
one placeholder for a picture (`collapsed`); the model sees one token for each block (`expanded`). Engines are given the
former with the pictures and expand it themselves; what they report must be our own expansion.

Letters: T tokens of a sample or a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trireme.messages import Picture

LONGEST_RATIO = 200  # largest ratio of a picture's sides that the image processor admits


@dataclass(frozen=True)
class PictureRules:
    """How a model reads pictures, from its `config.json` and `preprocessor_config.json`."""

    token: int  # the placeholder, `image_token_id`
    block: int  # pixels of a side of the square that becomes one token
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> PictureRules:
        """
        Raises:
            KeyError: something is missing in one of them.
        """
        size = processor.get("size") or {}
        return cls(
            token=config["image_token_id"],
            block=processor["patch_size"] * processor["merge_size"],
            min_pixels=processor.get("min_pixels") or size["shortest_edge"],
            max_pixels=processor.get("max_pixels") or size["longest_edge"],
        )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the image tokens of a picture with so many pixels.

        `smart_resize` of transformers' Qwen2-VL, in blocks.

        Raises:
            ValueError: it is longer than `LONGEST_RATIO` times its width, or the other way round.
        """
        if max(width, height) > LONGEST_RATIO * min(width, height):
            raise ValueError(f"a picture of {width} x {height} pixels - expected sides of at most 1 to {LONGEST_RATIO}")

        rows, columns = round(height / self.block), round(width / self.block)
        if rows * columns * self.block**2 > self.max_pixels:
            # Rounded down, and up below: the rounded size must stay within the bound.
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / self.block))
            columns = max(1, math.floor(width / shrink / self.block))
        elif rows * columns * self.block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / self.block), math.ceil(width * grow / self.block)
        return rows, columns


def expand(ids: Sequence[int], token: int, grids: Sequence[tuple[str, int, int]]) -> tuple[list[int], list[Picture]]:
    """Replace each placeholder by the tokens of its picture.

    Args:
        token: the placeholder.
        grids: digest, rows and columns of each picture, in order.

    Raises:
        ValueError: there are more or fewer placeholders than pictures.

    Example:
        expand([7, 9, 8], 9, [("9f…", 1, 2)])  # [7, 9, 9, 8], [Picture("9f…", place=1, rows=1, columns=2)]
    """
    if (found := list(ids).count(token)) != len(grids):
        raise ValueError(f"{found} placeholders for {len(grids)} pictures in a prompt - expected as many")
    whole: list[int] = []
    pictures: list[Picture] = []
    for each in ids:
        if each == token:
            digest, rows, columns = grids[len(pictures)]
            pictures.append(Picture(digest, len(whole), rows, columns))
            whole += [token] * (rows * columns)
        else:
            whole.append(each)
    return whole, pictures


def collapse(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Undo `expand`: leave one token of each picture."""
    short: list[int] = []
    at = 0
    for picture in pictures:
        short += ids[at : picture.place + 1]
        at = picture.place + picture.num_tokens
    return [*short, *ids[at:]]


def rotary_positions(lengths: Sequence[int], pictures: Sequence[Picture]) -> np.ndarray:
    """Return [3, T] positions in time, height and width, which restart with each sample (M-RoPE, arXiv:2409.12191,
    section 2.1).

    A picture's tokens have the time at which it begins, and their row and column from there on. What follows continues
    after the larger of its sides.
    """
    # How much larger the position of the next token is. Within a picture time does not advance.
    steps = np.ones(sum(lengths), np.int64)
    for picture in pictures:
        steps[picture.place : picture.place + picture.num_tokens] = 0
        steps[picture.place + picture.num_tokens - 1] = max(picture.rows, picture.columns)

    # Positions along the whole row, and then from the beginning of each sample.
    before = np.cumsum(steps) - steps
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    found = np.tile(before - before[starts], (3, 1))

    # Height and width count a picture's rows and columns from where it begins.
    for picture in pictures:
        rows, columns = np.divmod(np.arange(picture.num_tokens), picture.columns)
        found[1, picture.place : picture.place + picture.num_tokens] += rows
        found[2, picture.place : picture.place + picture.num_tokens] += columns
    return found


def distinct_ids(ids: np.ndarray, pictures: Sequence[Picture]) -> np.ndarray:
    """Return [T] int64 ids in which image tokens of different pictures, or of different places in one, differ.

    They are negative: for finding samples that begin alike, not for a model.
    """
    distinct = ids.astype(np.int64)
    for picture in pictures:
        # 32 bits of the digest, above 24 for the place of a token within its picture.
        name = int(picture.digest[:8], 16) << 24
        distinct[picture.place : picture.place + picture.num_tokens] = -1 - name - np.arange(picture.num_tokens)
    return distinct
