"""Balance rows over ranks, which wait for each other at every micro-batch.

Rows are sorted by cost and dealt in rounds, one row per rank. A round's rows are neighbours in cost, and no other way
to deal the same rows makes ranks wait less. All is deterministic: ties go by index.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace

from trireme.algo.model.flops import Cost

MOST_EXCHANGES = 8
"""Most exchanges per row. Each halves the difference of two rows, as nearly as samples allow."""

ENOUGH = 1e-3  # relative difference of costs below which the rows of a round stay as they are
NONE = -1  # the index of no sample: one is given and none taken

Rows = list[list[int]]


class Table:
    """The samples of a batch."""

    def __init__(self, lengths: list[int], capacity: int, cost: Cost) -> None:
        self._lengths = lengths
        self._capacity = capacity
        self._cost = cost
        self._weights = [cost.of_sample(length) for length in lengths]

    def tokens(self, row: list[int]) -> int:
        return sum(self._lengths[i] for i in row)

    def cost(self, row: list[int]) -> float:
        if self._cost.is_by_row:
            return self._cost.of_row([self._lengths[i] for i in row])
        return sum(self._weights[i] for i in row)

    def slowest(self, rows: Rows, ranks: int) -> float:
        """Return the cost of all rounds together, each of which takes as long as its most expensive row."""
        return sum(sorted(map(self.cost, rows), reverse=True)[::ranks])

    def even_rows(self, num_rows: int) -> Rows | None:
        """Put each sample, most expensive first, into the cheapest row with room (Graham 1969, with capacities).

        Returns None if some sample has no room left.
        """
        rows: Rows = [[] for _ in range(num_rows)]
        filled = [0] * num_rows
        cheapest = [(0.0, row) for row in range(num_rows)]  # a heap
        full: list[tuple[int, int, float]] = []  # a heap of rows that a sample did not fit into, most room first
        for index in sorted(range(len(self._lengths)), key=lambda i: (-self._weights[i], i)):
            length = self._lengths[index]
            while full and length <= -full[0][0]:
                _, row, weighed = heappop(full)
                heappush(cheapest, (weighed, row))

            # Set aside until a shorter sample comes, as looking at them again for each takes the square of the time.
            while cheapest and filled[cheapest[0][1]] + length > self._capacity:
                weighed, row = heappop(cheapest)
                heappush(full, (filled[row] - self._capacity, row, weighed))
            if not cheapest:
                return None

            weighed, row = cheapest[0]
            rows[row].append(index)
            filled[row] += length
            heapreplace(cheapest, (weighed + self._weights[index], row))
        return rows

    def exchange(self, rows: Rows, ranks: int) -> Rows:
        """Exchange samples between the most expensive and the cheapest row of a round, as long as that helps.

        Costs stay between those two, so the rows of a round stay together, and no other round becomes slower.
        """
        rows = [list(row) for row in rows]
        costs = [self.cost(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda row: (-costs[row], row))

        # The rows of one round: `ranks` neighbours in the order of cost.
        for together in (order[first : first + ranks] for first in range(0, len(order), ranks)):
            for _ in range(MOST_EXCHANGES * len(together)):
                high = max(together, key=lambda row: (costs[row], -row))
                low = min(together, key=lambda row: (costs[row], row))
                if costs[high] - costs[low] <= ENOUGH * costs[high]:
                    break

                # The round takes as long as its most expensive row, so only that one is worth changing.
                changed = self._exchanged(rows[high], rows[low])
                after = [self.cost(row) for row in changed]
                if max(after) >= costs[high]:
                    break
                rows[high], rows[low] = changed
                costs[high], costs[low] = after
        return rows

    def _exchanged(self, high: list[int], low: list[int]) -> tuple[list[int], list[int]]:
        """Return the two rows after the exchange (one sample of `high` for one of `low`, or for none) that leaves them
        nearest to each other; unchanged if there is no room for any."""
        half = (sum(self._weights[i] for i in high) - sum(self._weights[i] for i in low)) / 2
        room = self._capacity - self.tokens(low), self._capacity - self.tokens(high)

        # The rows are even if the sample given outweighs the one taken by `half`. So of `low` sorted by weight, only
        # the two neighbours of that weight are tried.
        others = sorted((self._weights[i], i) for i in low)
        best: tuple[float, int, int] | None = None  # how far from even, given, taken

        for given in high:
            place = bisect_left(others, (self._weights[given] - half, NONE))
            nearest = [index for _, index in others[max(0, place - 1) : place + 1]]
            for taken in (NONE, *nearest):
                more = self._lengths[given] - (0 if taken == NONE else self._lengths[taken])
                off = abs(self._weights[given] - (0.0 if taken == NONE else self._weights[taken]) - half)
                if -room[1] <= more <= room[0]:
                    best = min(best or (off, given, taken), (off, given, taken))

        if best is None:
            return high, low
        _, given, taken = best
        back = [] if taken == NONE else [taken]
        return [i for i in high if i != given] + back, [i for i in low if i != taken] + [given]

    def to_ranks(self, rows: Rows, ranks: int) -> list[Rows]:
        """Deal rows to ranks: return `[rank][round]`, the slowest round first.

        In each round, the rank with the lowest total so far gets the most expensive row.
        """
        costs = [self.cost(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
        dealt: list[Rows] = [[] for _ in range(ranks)]
        had = [0.0] * ranks
        for first in range(0, len(order), ranks):
            waiting = sorted(range(ranks), key=lambda rank: (had[rank], rank))
            for row, rank in zip(order[first : first + ranks], waiting, strict=True):
                dealt[rank].append(rows[row])
                had[rank] += costs[row]
        return dealt
