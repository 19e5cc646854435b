"""A list that is read page by page: sorted and turned by whoever looks, filled by whoever knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

Row = dict[str, Any]


def column(name: str, label: str, *, align: str = "right", sortable: bool = True) -> dict[str, Any]:
    return {"name": name, "label": label, "field": name, "align": align, "sortable": sortable}


class PagedList:
    """Its rows have an `id`; the column `env` is there only while the rows shown are of several."""

    def __init__(
        self,
        columns: list[dict[str, Any]],
        *,
        length: int,
        sort: str,
        backwards: bool,
        turned: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            length: rows of a page.
            sort: column that it is sorted by until somebody chooses another.
            turned: another page, or another order, is wanted.
        """
        self.length, self.page = length, 1
        self.sort, self.backwards = sort, backwards
        self._first_sort, self._all_columns, self._turned = sort, columns, turned
        few = [each for each in columns if each["name"] != "env"]
        self._table = ui.table(rows=[], columns=few, row_key="id", pagination=self._pagination(0))
        self._table.classes("tr-list").props(f'flat dense binary-state-sort :rows-per-page-options="[{length}]"')
        self._table.on("request", self._turn)

    @property
    def offset(self) -> int:
        return (self.page - 1) * self.length

    @property
    def rows(self) -> list[Row]:
        return self._table.rows

    def opens(self, name: str, label: str, keys: list[str], opened: Callable[[Row], Awaitable[None]]) -> None:
        """A click on a row, or on the button in column `name`, opens it.

        Args:
            label: what the button does, before the row's `id`.
            keys: of the row, that `opened` is given.
        """
        self._table.add_slot(
            f"body-cell-{name}",
            '<q-td :props="props"><q-btn flat dense no-caps padding="0 6px" class="tr-open" :label="props.value" '
            f":aria-label=\"'{label} ' + props.row.id\" @click.stop=\"$parent.$emit('read', props.row)\" /></q-td>",
        )
        self._table.on("rowClick", lambda event: opened(event.args[1]), [[], keys, []])
        self._table.on("read", lambda event: opened(event.args), keys)

    def draws(self, name: str, html: str) -> None:
        """The cells of a column, in Vue."""
        self._table.add_slot(f"body-cell-{name}", f'<q-td :props="props">{html}</q-td>')

    def marks(self, key: str) -> None:
        """Rows whose `key` is true stand out; its name is their class."""
        self._table.props(f":table-row-class-fn=\"row => row.{key} ? '{key}' : ''\"")

    def show(self, rows: list[Row], total: int) -> None:
        """This page of them."""
        self._table.pagination = self._pagination(total)
        self._table.rows = rows
        if len({row["env"] for row in rows}) > 1:
            self._table.columns = self._all_columns
        self._table.update()

    def update(self) -> None:
        self._table.update()

    def _pagination(self, total: int) -> dict[str, Any]:
        return {
            "rowsPerPage": self.length,
            "rowsNumber": total,
            "sortBy": self.sort,
            "descending": self.backwards,
            "page": self.page,
        }

    async def _turn(self, event: Any) -> None:
        asked = event.args["pagination"]
        self.page, self.sort = int(asked["page"]), asked.get("sortBy") or self._first_sort
        self.backwards = bool(asked["descending"])
        await self._turned()
