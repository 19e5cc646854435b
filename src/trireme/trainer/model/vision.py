"""Pictures in the trainer's rows: transformers' image processor cuts them into patches, and the vision encoder turns
those into features that take the place of the image tokens' embeddings.

The encoder runs once for each picture of a row. It is part of the root's FSDP unit (`sharding`), which is whole while a
row is computed: a rank whose row has no picture skips the encoder, and all ranks still run the same collectives. If
it is trained (`freeze_vision_encoder = false`), that rank adds gradients of zero to the others'.

Letters: T tokens of a row, P tokens of it that are computed (`share_prefixes`), N image tokens among these, M patches.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedModel

from trireme.algo.packing import positions
from trireme.algo.pictures import rotary_positions
from trireme.base.errors import ConfigError
from trireme.config.trainer import TOWER
from trireme.messages import MicroBatch, Picture
from trireme.trainer.model.loading import Untrained, processor_files
from trireme.transport.weights.published_files import PublishedFiles

CACHE_BYTES = 1 << 30  # bytes of patches that are kept for the next rows with the same pictures

ARGUMENT = "row_of_pictures"  # the argument under which a row's pictures reach the model

_ATTRIBUTE = "trireme_vision"


@dataclass(frozen=True)
class PlacedPictures:
    """The pictures of a row, and where their features go."""

    patches: torch.Tensor  # [M, values] float32: of all distinct pictures
    grids: torch.Tensor  # [pictures, 3] int64: frames, rows and columns of the patches of each
    places: torch.Tensor  # [N] int64: image tokens among the P that are computed
    features: torch.Tensor  # [N] int64: which feature each of them takes


class Vision:
    """Reads the pictures of one model's batches."""

    def __init__(self, name: str, trust_remote_code: bool) -> None:
        """Raises: ConfigError if the folder of the model has no image processor."""
        try:
            self._processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"The image processor of {name!r} cannot be loaded: {error}\nExpected a preprocessor_config.json "
                "beside its config.json. Copy the one of the published model there, or remove `[model.vlm]`."
            ) from error
        self.files: Mapping[str, bytes] = {}  # PNG files of the current batch, by digest
        self._cache: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def place(self, row: MicroBatch, kept: np.ndarray, device: torch.device) -> PlacedPictures:
        """Cut the pictures of a row into patches, and find where their features go.

        Args:
            kept: [P] int64: tokens of the row that are computed.

        Raises:
            ConfigError: the processor reads a picture as another number of tokens than the row has for it.
        """
        # A picture that several samples show goes through the encoder once.
        distinct = {picture.digest: picture for picture in row.tokens.pictures}
        sizes = [picture.num_tokens for picture in distinct.values()]
        first = dict(zip(distinct, np.cumsum([0, *sizes]), strict=False))
        features = np.full(row.tokens.length, -1)

        # Each image token takes the feature at its place in the picture.
        for picture in row.tokens.pictures:
            features[picture.place : picture.place + picture.num_tokens] = first[picture.digest] + np.arange(
                picture.num_tokens
            )
        features = features[kept]

        places = np.flatnonzero(features >= 0)
        patches, grids = zip(*map(self._read, distinct.values()), strict=True)
        return PlacedPictures(
            torch.cat(patches).to(device),
            torch.cat(grids).to(device),
            torch.from_numpy(places).to(device),
            torch.from_numpy(features[places]).to(device),
        )

    def _read(self, picture: Picture) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a picture's patches and its grid, [1, 3]."""
        # Rows of a batch share pictures, most of all those of one group. The least recently used go first.
        if picture.digest not in self._cache:
            assert picture.digest in self.files, f"a row has picture {picture.digest}, which its batch lacks"
            with Image.open(io.BytesIO(self.files[picture.digest]), formats=("PNG",)) as image:
                read = self._processor(images=[image.convert("RGB")], return_tensors="pt")
            self._cache[picture.digest] = (read["pixel_values"], read["image_grid_thw"])
        self._cache.move_to_end(picture.digest)
        while len(self._cache) > 1 and sum(each.nbytes for each, _ in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)

        patches, grid = self._cache[picture.digest]
        # Another number of tokens than in the rollout would shift all positions behind the picture.
        merged = self._processor.merge_size
        if grid.tolist() != [[1, picture.rows * merged, picture.columns * merged]]:
            rows, columns = (side / merged for side in grid[0, 1:].tolist())
            raise ConfigError(
                f"The picture {picture.digest} has {picture.rows} x {picture.columns} tokens in a rollout, and the "
                f"image processor of the trainer's model reads it as {rows:g} x {columns:g} - expected the same. Let "
                "`trainer.model.name` and `inference.model.name` have the same preprocessor_config.json."
            )
        return patches, grid


def attach_vision(model: PreTrainedModel, name: str, trust_remote_code: bool, *, frozen: bool) -> None:
    """Let the model see: give it the image processor of its folder, or of its hub name.

    Raises:
        ConfigError: there is no image processor.
    """
    model.get_submodule(TOWER).requires_grad_(not frozen)
    model.trireme_untrained = Untrained(PublishedFiles([]), [], processor_files(name))  # `find_layouts` knows more
    vars(model)[_ATTRIBUTE] = Vision(name, trust_remote_code)
    model.base_model.register_forward_pre_hook(_embed, with_kwargs=True)


def give_pictures(model: PreTrainedModel, pictures: Mapping[str, bytes]) -> None:
    """Give the model the pictures of the rows that it computes next: PNG files by their digests. A model that does not
    see takes none.
    """
    vision: Vision | None = getattr(model, _ATTRIBUTE, None)
    if vision is not None:
        vision.files = pictures
    elif pictures:
        raise _cannot_see(model)


def picture_inputs(model: PreTrainedModel, row: MicroBatch, kept: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Return the inputs that a row with pictures has in place of others, or more; none for a row of text.

    `position_ids` are [4, 1, P]: positions that restart with each sample, then those in time, height and width.

    Args:
        kept: [P] int64: tokens of the row that are computed.

    Raises:
        ConfigError: the model does not see, or reads a picture as another number of tokens.
    """
    pictures = row.tokens.pictures
    if not pictures:
        return {}
    vision: Vision | None = getattr(model, _ATTRIBUTE, None)
    if vision is None:
        raise _cannot_see(model)
    position_ids = np.concatenate([positions(row.lengths)[None], rotary_positions(row.lengths, pictures)])
    return {
        "position_ids": torch.from_numpy(position_ids[:, None, kept]).to(device),
        ARGUMENT: vision.place(row, kept, device),
    }


def _embed(decoder: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Embed the tokens of a row with pictures. Image tokens are found by their places: a model may sample their id.

    A row of text gets positions of the same shape: Qwen2.5-VL sees the borders between samples in no others.
    """
    placed: PlacedPictures | None = kwargs.pop(ARGUMENT, None)
    if (position_ids := kwargs.get("position_ids")) is not None and position_ids.ndim == 2:
        kwargs["position_ids"] = position_ids.expand(4, -1, -1)
    if placed is None:
        return args, kwargs

    embedded = decoder.get_input_embeddings()(kwargs.pop("input_ids"))
    found = decoder.get_image_features(placed.patches, placed.grids, return_dict=True).pooler_output
    features = torch.cat(tuple(found)).to(embedded.dtype)[placed.features]
    where = (torch.zeros_like(placed.places), placed.places)
    return args, kwargs | {"inputs_embeds": embedded.index_put(where, features)}


def _cannot_see(model: PreTrainedModel) -> ConfigError:
    return ConfigError(
        f"Rows with pictures came for {type(model).__name__}, which is held as a text model - expected rows of text. "
        "Set `[model.vlm]`."
    )
