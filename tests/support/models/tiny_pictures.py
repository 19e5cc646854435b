"""Pictures of one colour."""

import io

from PIL import Image


def picture_file(width: int, height: int, shade: int = 0) -> bytes:
    """A PNG file as the journal keeps it."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def shown(digest: str) -> dict[str, object]:
    """A part of a message in the journal."""
    return {"type": "image_url", "image_url": {"url": f"picture:{digest}"}}
