"""The pictures of a run: one PNG file for each, named after its SHA-256, on disk before the first turn that shows it.

A picture that an environment or an agent program sends is decoded and written again as RGB, so that the engine, the
trainer and the dashboard read the same pixels from any format.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import threading
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from trireme.algo.pictures import PictureRules
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import atomic_write
from trireme.config.model.folder import read_config, read_image_processor
from trireme.config.model.vision import KINDS

PICTURES = "pictures"  # name of their folder
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LARGEST_FILE = 32 << 20  # bytes that are decoded
MOST_PIXELS = 64 << 20  # pixels of one picture
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rules_of_model(name: str) -> PictureRules:
    """Read from a model's files how it reads pictures. They are downloaded from the hub unless they are on this disk.

    Raises: ConfigError if they cannot be read, a kind is not known, or the image processor's file is missing.
    """
    if not (read_config(name) and read_image_processor(name)) and not Path(name).is_dir():
        _download(name)
    config = read_config(name)

    # The trainer can build a vision tower for these kinds only.
    if (kind := config.get("model_type")) not in KINDS:
        raise ConfigError(
            f"`[model.vlm]` is set, and {name} is of the kind {kind} - expected one of {', '.join(KINDS)}. Remove "
            "`[model.vlm]` to train without pictures, or choose another model."
        )

    try:
        return PictureRules.of(config, read_image_processor(name))
    except KeyError as error:
        raise ConfigError(
            f"`[model.vlm]` is set, and the files of {name} do not say how it reads pictures ({error} is missing) - "
            "expected config.json, and preprocessor_config.json or processor_config.json. Copy them from the model."
        ) from error


def _download(name: str) -> None:
    """Download the small files of a model to the hub's cache, in which they are found by its name."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, allow_patterns=["config.json", *PROCESSORS])
    except Exception as error:
        raise ConfigError(
            f"`[model.vlm]` is set, and the config.json of {name!r} could not be loaded ({type(error).__name__}: "
            f"{error}) - expected a folder, or a hub name that this machine can reach. Set `model.name` to one."
        ) from error


def from_data_uri(url: str) -> bytes:
    """Return the bytes of a picture that its URL contains, as `data:image/png;base64,iVBORw0K…`.

    Raises: ValueError if it is another URL, or no base64, or larger than pictures that are decoded.
    """
    head, comma, body = url.partition(",")
    if not (comma and head.lower().startswith("data:image/") and head.lower().endswith(";base64")):
        raise ValueError(f"a picture at {url[:80]!r} - expected data:image/…;base64,…, as no address is looked up")

    # Base64 takes four letters for three bytes. Checked before decoding, which would double the memory.
    if len(body) > LARGEST_FILE * 4 // 3 + 4:
        raise ValueError(
            f"a picture of {len(body)} letters in base64 - expected at most {LARGEST_FILE} bytes. Scale it down."
        )
    return base64.b64decode(body, validate=True)


def to_data_uri(png: bytes) -> str:
    """Return a URL that contains the PNG file itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def to_png(data: bytes) -> bytes:
    """Decode a picture and return it as a PNG file: RGB, the right way up, the first of several frames, on white.

    Raises: ValueError if the bytes are no picture, or a larger one than is read.
    """
    if len(data) > LARGEST_FILE:
        raise ValueError(f"a picture of {len(data)} bytes - expected at most {LARGEST_FILE}. Scale it down.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:  # only reads the header
            # Before decoding: a small file can describe an image of gigabytes.
            if image.width * image.height > MOST_PIXELS:
                size = f"{image.width} x {image.height}"
                raise ValueError(f"a picture of {size} pixels - expected at most {MOST_PIXELS} in all. Scale it down.")
            whole = ImageOps.exif_transpose(image).convert("RGBA")
    except ValueError:
        raise
    except Exception as error:  # broken bytes make decoders raise OSError, SyntaxError, struct.error, …
        words = type(error).__name__ if isinstance(error, UnidentifiedImageError) else str(error)  # it names an object
        raise ValueError(f"{len(data)} bytes that are no picture ({words}) - expected {', '.join(FORMATS)}") from error

    # Models read RGB. Transparent parts become white, as a browser shows them.
    flat = Image.new("RGB", whole.size, "white")
    flat.paste(whole, mask=whole.getchannel("A"))
    file = io.BytesIO()
    flat.save(file, "PNG")
    return file.getvalue()


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height in pixels."""
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        return image.size


def pictures_folder(journal: Path) -> Path:
    """Return the folder of a run's pictures, in the journal's folder."""
    return journal / PICTURES


class PictureFiles:
    """The pictures of one run, or of an evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = threading.Lock()

    def path(self, digest: str) -> Path:
        """Return the file of a picture.

        Raises: ValueError if this is no digest, and so might name another file.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is no digest of a picture")
        return self._folder / f"{digest}.png"

    def add(self, png: bytes) -> str:
        """Write a picture unless it is there, and return its digest when it is on disk. Threads may call it at once.

        Raises: OSError if it could not be written (a full disk).
        """
        digest = hashlib.sha256(png).hexdigest()
        path = self.path(digest)
        with self._writing:  # `atomic_write` has one name for the unfinished file of a process
            if not path.exists():
                with atomic_write(path) as file:
                    file.write(png)
        return digest

    def read(self, digest: str) -> bytes:
        """Return the PNG file.

        Raises: JournalCorrupt if the file is missing or was changed.
        """
        path = self.path(digest)
        try:
            png = path.read_bytes()
        except FileNotFoundError as error:
            raise JournalCorrupt(f"{path} is missing, a picture of this run's rollouts. Restore it.") from error
        if hashlib.sha256(png).hexdigest() != digest:
            raise JournalCorrupt(f"{path} holds another picture than the one that its name gives. Restore it.")
        return png
