"""The tree of the viewer: runs, in them training and evaluations, in these their steps with their mean rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from trireme.base.safe_text import clean, decimal
from trireme.tools.viewer.sources import TRAINING, Source
from trireme.tools.viewer.table import reward_style

TREND = 10  # cells of the sparkline
FEW = 60  # most evaluations of a series that is open from the start

Key = tuple[Path | str, ...]
"""(run), (run, series) or (run, series, path)."""


class RunTree(Tree[Key]):
    """Stays as it is, with its cursor and open branches, when files appear or disappear."""

    DEFAULT_CSS = """
    RunTree { width: 40; padding: 0 1; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("left", "close", "close", show=False),
        Binding("right", "open", "open", show=False),
    ]

    def __init__(self, means: Mapping[Path, float | None], **options: Any) -> None:
        super().__init__("", **options)
        self.show_root = False
        self.guide_depth = 2
        self._means = means
        self._by_key: dict[Key, TreeNode[Key]] = {}
        self._sources: dict[Key, Source] = {}

    def show(self, sources: Sequence[Source], titles: Mapping[Path, str]) -> None:
        if list(self._sources.values()) == list(sources):
            return

        # The tree is built from scratch, so what the user opened is remembered.
        was_open = {key: node.is_expanded for key, node in self._by_key.items()}
        cursor = self.cursor_node.data if self.cursor_node else None
        self.clear()
        self._by_key.clear()

        self._sources = {(one.run, one.series, one.path): one for one in sources}
        for run, of_run in groupby(sources, key=lambda source: source.run):
            top = self.root.add(Text(clean(titles[run]), style="bold"), (run,), expand=was_open.get((run,), True))
            self._by_key[run,] = top
            for series, group in groupby(of_run, key=lambda source: source.series):
                files = list(group)

                # Long series start closed, so that all runs fit on a screen.
                is_open = was_open.get((run, series), series != TRAINING and len(files) <= FEW)
                branch = top.add("", (run, series), expand=is_open)
                self._by_key[run, series] = branch
                for source in files:
                    key = (run, series, source.path)
                    self._by_key[key] = branch.add_leaf("", key)

        # The new nodes have their lines only after the next refresh.
        self.relabel()
        if cursor in self._by_key:
            self.call_after_refresh(self.move_cursor, self._by_key[cursor])

    def relabel(self) -> None:
        """Show the mean rewards of files, and the trends of all series."""
        means: dict[Key, list[float | None]] = {}
        for key, source in self._sources.items():
            mean = self._means.get(source.path)
            means.setdefault(key[:2], []).append(mean)
            label = Text(f"{clean(source.label)}  ")
            if mean is not None:
                label.append(decimal(mean), style=reward_style(mean))
            # Each new label redraws the tree.
            if self._by_key[key].label != label:
                self._by_key[key].set_label(label)
        for series, values in means.items():
            label, trend = Text(f"{clean(str(series[1]))} "), [value for value in values if value is not None]
            if len(trend) > 1:
                label.append(f"{sparkline(trend, TREND)} ", style="cyan")
                label.append(f"{decimal(trend[0])}→{decimal(trend[-1])}", style="bright_black")
            else:
                label.append(str(len(values)), style="bright_black")
            self._by_key[series].set_label(label)

    def source_of(self, node: TreeNode[Key]) -> Source | None:
        return self._sources.get(node.data or ())

    def go_to(self, source: Source) -> None:
        """Move the cursor to a source and open its series."""
        node = self._by_key[source.run, source.series, source.path]
        self._by_key[source.run, source.series].expand()
        self.call_after_refresh(self.move_cursor, node)

    def action_close(self) -> None:
        """Close the branch under the cursor, or else go to the branch that it is in."""
        node = self.cursor_node
        if node and node.is_expanded and node.allow_expand:
            node.collapse()
        elif node and node.parent and node.parent is not self.root:
            self.move_cursor(node.parent)

    def action_open(self) -> None:
        if self.cursor_node and self.cursor_node.allow_expand:
            self.cursor_node.expand()


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw means of equal shares of the values, from lowest to highest."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / span))] for mean in means)
