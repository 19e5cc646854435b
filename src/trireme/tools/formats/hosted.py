"""The file of hosted training, translated into our configuration, key by key: the same run on machines of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.base.devices import Devices
from trireme.config.arguments import TypedFlag
from trireme.config.load import read_as
from trireme.tools.formats.flat_file import Hosted
from trireme.tools.formats.flat_keys import lift, put_memory, put_shared
from trireme.tools.formats.translation import Reader, Sheet, Translation


def translate(
    table: dict[str, Any], devices: Devices, *, where: str = "the file", flags: Sequence[TypedFlag] = ()
) -> Translation:
    """
    Args:
        flags: typed on top, in the keys of this format.

    Raises: ConfigError with all keys that are not of this format, cannot have that value, or mean nothing here.
    """
    sheet = Sheet()
    file = read_as(Hosted, lift(table, Hosted, sheet), where=where, flags=flags)
    Reader(sheet, file).take("model", "model.name")
    if devices.gpus:
        put_memory(sheet)
    else:
        sheet.set("device", "cpu")
        sheet.note('device = "cpu": this machine shows no GPU')
    put_shared(sheet, file)
    return sheet.finish(env_files=file.env_file)
