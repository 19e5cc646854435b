"""The tree: runs, in them training and evaluations, in these their steps, each with its mean reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from trireme.monitor.in_words import sparkline
from trireme.tools.rollouts import clean, decimal
from trireme.tools.viewer.found import Home, Shelf, Source
from trireme.tools.viewer.listing import reward_style
from trireme.tools.viewer.rewards import Rewards

TREND = 10  # cells
FEW = 60  # sources of a shelf that is open from the start

Key = tuple[str, ...]


class Shelves(Tree[Source | None]):
    """Keeps what is open and where the cursor stands when it is shown anew. Sources appear when their shelf is opened:
    a run may have ten thousand batches."""

    DEFAULT_CSS = """
    Shelves { width: 40; padding: 0 1; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("left", "close", "close", show=False),
        Binding("right", "open", "open", show=False),
    ]

    def __init__(self, rewards: Rewards, **options: Any) -> None:
        super().__init__("", **options)
        self.show_root = False
        self.guide_depth = 2
        self._rewards = rewards
        self._branches: dict[Key, TreeNode[Source | None]] = {}
        self._shelves: dict[Key, Shelf] = {}
        self._titles: dict[Key, str] = {}

    def show(self, homes: Sequence[Home]) -> None:
        """What is new is added, what has gone is removed, the rest stays as it is."""
        wanted: list[Key] = []
        for home in homes:
            key: Key = (str(home.folder),)
            wanted.append(key)
            self._titles[key] = home.title
            node = self._node(key, self.root, expand=True)
            for shelf in home.shelves.values():
                wanted.append((*key, shelf.name))
                self._shelves[*key, shelf.name] = shelf
                is_open = shelf.name != "training" and len(shelf.sources) <= FEW
                child = self._node((*key, shelf.name), node, expand=is_open)
                if child.is_expanded:
                    self._fill((*key, shelf.name))
                wanted += [(*key, shelf.name, str(source.path)) for source in shelf.sources]
        self._drop(set(wanted))
        self.name_all()

    def _node(self, key: Key, parent: TreeNode[Source | None], *, expand: bool) -> TreeNode[Source | None]:
        if key not in self._branches:
            after = [name for name in self._branches if name[:-1] == key[:-1] and name > key]
            before = self._branches[min(after)] if after and len(key) == 1 else None
            self._branches[key] = parent.add(key[-1], expand=expand, before=before)
        return self._branches[key]

    def _fill(self, key: Key) -> None:
        node, shelf = self._branches[key], self._shelves[key]
        for place, source in enumerate(shelf.sources):
            if (*key, str(source.path)) not in self._branches:
                before = place if place < len(node.children) else None
                self._branches[*key, str(source.path)] = node.add_leaf(self._label(source), source, before=before)

    def _drop(self, wanted: set[Key]) -> None:
        gone = [key for key in self._branches if key not in wanted]
        for key in sorted(gone, key=len, reverse=True):
            self._branches.pop(key).remove()
            self._shelves.pop(key, None)

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Source | None]) -> None:
        for key in self._shelves:
            if self._branches.get(key) is event.node:
                self._fill(key)

    # labels

    def name_all(self) -> None:
        for key, node in self._branches.items():
            if key in self._shelves:
                node.set_label(self._shelf_label(self._shelves[key]))
            elif len(key) == 1:
                node.set_label(Text(clean(self._titles[key]), style="bold"))
            elif node.data is not None:
                node.set_label(self._label(node.data))

    def _shelf_label(self, shelf: Shelf) -> Text:
        trend = self._rewards.trend(shelf.sources)
        label = Text(f"{clean(shelf.name)} ")
        if len(trend) > 1:
            label.append(f"{sparkline(trend, TREND)} ", style="cyan")
            label.append(f"{decimal(trend[0])}→{decimal(trend[-1])}", style="bright_black")
        else:
            label.append(str(len(shelf.sources)), style="bright_black")
        return label

    def _label(self, source: Source) -> Text:
        mean = self._rewards.known.get(source.path)
        label = Text(f"{clean(source.label)}  ")
        return label.append(decimal(mean), style=reward_style(mean)) if mean is not None else label

    # moving

    def node_of(self, source: Source) -> TreeNode[Source | None] | None:
        """Opens what it is in."""
        key = (str(source.home), source.shelf)
        if key not in self._shelves:
            return None
        self._branches[key].expand()
        self._fill(key)
        return self._branches.get((*key, str(source.path)))

    def go_to(self, source: Source) -> None:
        if node := self.node_of(source):
            self.call_after_refresh(self.move_cursor, node)

    def action_close(self) -> None:
        """The branch, or the one that it is in."""
        node = self.cursor_node
        if node is None:
            return
        if node.is_expanded and node.allow_expand:
            node.collapse()
        elif node.parent is not None and node.parent is not self.root:
            self.move_cursor(node.parent)

    def action_open(self) -> None:
        node = self.cursor_node
        if node is not None and node.allow_expand:
            node.expand()
