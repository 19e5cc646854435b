"""A picture that knows whether it is looked at: what is not in view need not be sent.

NiceGUI's own element for ECharts has no word for that, and stumbles where it is taken away before it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui.element import Element
from nicegui.elements import echart as _brings_echarts_to_the_page  # noqa: F401


class Canvas(Element, component="canvas.js"):
    """Empty until `draw`."""

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        *,
        on_seen: Callable[[bool], Any] | None = None,
        on_stretch: Callable[[float, float], Any] | None = None,
        on_whole: Callable[[], Any] | None = None,
    ) -> None:
        """
        Args:
            on_seen: it came into view, or left it.
            on_stretch: from where to where of the horizontal axis was dragged.
            on_whole: it was double-clicked.
        """
        super().__init__()
        self._props["options"] = options or {}
        self._props["chooses"] = on_stretch is not None
        self.classes("tr-canvas tr-chooses" if on_stretch else "tr-canvas")
        if on_seen:
            self.on("seen", lambda event: on_seen(bool(event.args)))
        if on_stretch:
            self.on("stretch", lambda event: on_stretch(float(event.args[0]), float(event.args[1])))
        if on_whole:
            self.on("whole", lambda: on_whole())

    def draw(self, options: dict[str, Any]) -> None:
        """In place of what is there."""
        self._props["options"] = options
        self.update()
