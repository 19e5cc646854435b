"""A page as Markdown, for where HTML is not welcome: in issues, wikis, notebooks."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trireme.base.paths import atomic_write
from trireme.tools.report.page import Block, Code, Conversation, Figure, Fold, Page, Table, Words

Link = Callable[[Figure], str]


def embedded(figure: Figure) -> str:
    """The picture itself, as its own address. As PNG: readers that are careful show no SVG that comes so."""
    return f"data:image/png;base64,{base64.b64encode(figure.draw('png')).decode()}"


def linked(folder: Path, *, beside: Path) -> Link:
    """Writes each picture to a file of `folder`, for places that show no embedded ones.

    Args:
        beside: the page, from which the files are looked for.
    """

    def link(figure: Figure) -> str:
        with atomic_write(folder / f"{figure.name}.svg") as file:
            file.write(figure.draw("svg"))
        return Path(os.path.relpath(folder, beside.parent), f"{figure.name}.svg").as_posix()

    return link


def to_markdown(page: Page, link: Link = embedded) -> str:
    """
    Args:
        link: where the picture of a figure is to be found.
    """
    parts = [f"# {_plain(page.title)}", _text(page.lead)]
    for section in page.sections:
        parts += [f"## {_plain(section.title)}", *_blocks(section.blocks, link)]
    return "\n\n".join(parts) + "\n"


def _blocks(blocks: Sequence[Block], link: Link) -> Iterator[str]:
    for block in blocks:
        match block:
            case Words(text):
                yield _text(text)
            case Table():
                yield _table(block)
            case Figure():
                yield f"**{_plain(block.title)}**"
                yield f"![{_plain(block.alt)}]({link(block)})"
            case Code():
                yield fenced(block.text, block.language)
            case Conversation():
                yield from _conversation(block)
            case Fold():
                yield f"<details><summary>{_plain(block.title)}</summary>"
                yield from _blocks(block.blocks, link)
                yield "</details>"


def _table(table: Table) -> str:
    width = max(map(len, [table.head, *table.rows]), default=0)
    head = [*table.head, *[""] * (width - len(table.head))]
    return "\n".join(map(_row, [head, ["---"] * width, *table.rows]))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _conversation(block: Conversation) -> Iterator[str]:
    yield f"**{_plain(block.title)}**"
    if block.facts:
        yield _table(Table([(name, f"`{_inline(value)}`") for name, value in block.facts]))
    yield fenced("\n\n".join(f"[{message.role}]\n{message.text}" for message in block.messages))


def fenced(text: str, language: str = "") -> str:
    """Between fences that are longer than any in it: what a model wrote stays what it wrote."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _inline(text: str) -> str:
    return text.replace("`", "'")


def _text(text: str) -> str:
    """With its `code`, and no other mark-up."""
    parts = text.split("`")
    is_paired = len(parts) % 2 == 1
    return "`".join(part if is_paired and number % 2 else _escaped(part) for number, part in enumerate(parts))


def _escaped(text: str) -> str:
    return re.sub(r"([\\<>*_\[\]])", r"\\\1", text)


def _plain(text: str) -> str:
    """No mark-up, on one line."""
    return _escaped(" ".join(text.split())).replace("`", "\\`")
