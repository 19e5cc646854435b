"""Pages, their sections, and a search over them: BM25, after Robertson and Zaragoza, 'The Probabilistic Relevance
Framework: BM25 and Beyond' (2009), with k1 = 1.2, b = 0.75 and a title that counts as several mentions."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

K1, B = 1.2, 0.75
TITLE_WEIGHT = 3
_WORD = re.compile(r"[^\W_]+")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$")
LEAD = "Introduction"  # what the text before the first heading is called


@dataclass(frozen=True)
class Page:
    """Example: Page(id="orrin", title="Orrin", sections=(("Introduction", "The Orrin is ..."), ("Course", "...")))"""

    id: str
    title: str
    sections: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return "\n".join(f"{heading}\n{text}" for heading, text in self.sections)


class UnknownId(ValueError):
    """A page or section that does not exist; the message is for the model."""


class WikiIndex:
    """All pages, by id and by what they say."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self.pages = {page.id: page for page in pages}
        self._sections = {
            section_id: (page, heading, text)
            for page in self.pages.values()
            for section_id, heading, text in _sections_of(page)
        }

        # BM25 needs each page's words and length, and for each word the pages that hold it.
        self._counts = {page.id: Counter(_terms_of(page)) for page in self.pages.values()}
        self._lengths = {id: counts.total() for id, counts in self._counts.items()}
        self._mean_length = sum(self._lengths.values()) / max(1, len(self._lengths))
        self._holding: dict[str, list[str]] = defaultdict(list)
        for id, counts in self._counts.items():
            for term in counts:
                self._holding[term].append(id)

    def search(self, query: str, num_results: int) -> list[Page]:
        """The best first; pages that share no word with the query are not among them."""
        scores: dict[str, float] = defaultdict(float)
        for term in set(terms(query)):
            for id in self._holding.get(term, ()):
                scores[id] += self._score(term, id)

        # Equal scores are ordered by id, so that a search always finds the same.
        best = sorted(scores, key=lambda id: (-scores[id], id))[:num_results]
        return [self.pages[id] for id in best]

    def _score(self, term: str, id: str) -> float:
        holding = len(self._holding[term])
        # The 1 keeps words that most pages hold from counting against a page.
        rarity = math.log(1 + (len(self.pages) - holding + 0.5) / (holding + 0.5))
        count = self._counts[id][term]
        length = self._lengths[id] / self._mean_length
        return rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * length))

    def sections(self, page_id: str) -> list[tuple[str, str]]:
        """Ids and headings. Raises: UnknownId."""
        if page_id not in self.pages:
            raise UnknownId(f"There is no page {page_id!r}. Take an id that search_pages shows.")
        return [(section_id, heading) for section_id, heading, _ in _sections_of(self.pages[page_id])]

    def section(self, section_id: str) -> str:
        """Raises: UnknownId."""
        if section_id not in self._sections:
            raise UnknownId(f"There is no section {section_id!r}. Take an id that view_sections shows.")
        return self._sections[section_id][2]


def terms(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _terms_of(page: Page) -> list[str]:
    return TITLE_WEIGHT * terms(page.title) + terms(page.text)


def _sections_of(page: Page) -> list[tuple[str, str, str]]:
    """Numbered where a page has two headings alike."""
    found: list[tuple[str, str, str]] = []
    seen: Counter[str] = Counter()
    for heading, text in page.sections:
        name = to_id(heading) or "section"
        seen[name] += 1
        number = "" if seen[name] == 1 else f"_{seen[name]}"
        found.append((f"{page.id}:{name}{number}", heading, text))
    return found


def to_id(text: str) -> str:
    return "_".join(terms(text))


def page_from_markdown(id: str, title: str, text: str) -> Page:
    """Sections are what stands under a heading of any level; the page's own title is no heading."""
    sections: list[tuple[str, list[str]]] = [(LEAD, [])]
    for line in text.splitlines():
        match = _HEADING.match(line)
        if match and match.group(1) != title:
            sections.append((match.group(1), []))
        elif not match:
            sections[-1][1].append(line)
    kept = [(heading, "\n".join(lines).strip()) for heading, lines in sections]
    return Page(id, title, tuple((heading, body) for heading, body in kept if body))
