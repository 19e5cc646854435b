"""An encyclopedia of an island country that does not exist, and questions about it: no model can know the answers.

Everything follows from the tables below by one fixed draw, so that pages, questions and answers always agree.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from wiki_search_index import Page, to_id

EVAL_SHARE = 0.2  # share of all questions; the rest is for training
COUNTRY = "Velmora"
TOWNS = [
    "Arlen",
    "Brisk",
    "Callowe",
    "Dunmere",
    "Eskerby",
    "Farrow",
    "Gellin",
    "Hathmoor",
    "Ivenport",
    "Jessel",
    "Kelder",
    "Lorne",
    "Marrow",
    "Nettleby",
]
RIVERS = ["Orrin", "Sull", "Teverne", "Wend", "Isk", "Amber", "Lorrow", "Fennel"]
MOUNTAINS = ["Graypeak", "Mount Ossil", "The Anvil", "Harrowhead", "Mount Lune", "Cold Crown"]
FIRST = """
    Aldo Berit Corvin Dessa Edwin Fenna Garrick Hale Ilse Joren Katrin Leopold Mirren Nils Odile Perrin
""".split()  # noqa: SIM905
LAST = [
    "Ashdown",
    "Brandt",
    "Coyle",
    "Dray",
    "Elmswood",
    "Fairlie",
    "Grant",
    "Holloway",
    "Innes",
    "Keld",
    "Lund",
    "Mercer",
    "Norwood",
    "Oake",
    "Pell",
    "Quill",
]
WORKS = [
    ("tide clock", "shows the time of high water", "clockmaker"),
    ("rope ferry", "crosses a river along a cable", "shipwright"),
    ("glass plough", "cuts heavy soil without sticking", "glassblower"),
    ("wind organ", "plays in the wind without a player", "musician"),
    ("salt lamp", "burns in the rain", "chemist"),
    ("folding bridge", "is carried on two carts", "engineer"),
    ("snow compass", "finds the way under thick snow", "surveyor"),
    ("paper sail", "is lighter than canvas", "printer"),
    ("honey press", "empties a comb without breaking it", "beekeeper"),
    ("echo bell", "rings twice for each stroke", "bellfounder"),
    ("copper telescope", "was the first to show the rings of the planet Orm", "astronomer"),
    ("moss bandage", "keeps wounds clean", "physician"),
    ("singing kettle", "tells how hot it is by its note", "potter"),
    ("star almanac", "lists the risings of 300 stars", "librarian"),
    ("mill brake", "stops a windmill in a storm", "miller"),
    ("ice saw", "cuts blocks of one size", "carpenter"),
]
FESTIVALS = [
    ("Lantern Crossing", "boats with lanterns are rowed across the harbour"),
    ("Feast of Nets", "the oldest net of the town is mended by everyone"),
    ("Stone Supper", "a meal is cooked on hot stones in the market square"),
    ("Day of Kites", "children fly kites that carry letters"),
    ("Bell Walk", "people walk around the walls with hand bells"),
    ("First Thaw", "the ice of the mill pond is broken by the youngest miller"),
    ("Apple Parliament", "an apple is elected and keeps its office for a week"),
    ("Night of Chalk", "the streets are covered with drawings until it rains"),
]
GOODS = """
    wool slate cheese glass rope honey pottery paper salt cider clocks copper linen barley
""".split()  # noqa: SIM905
MONTHS = """
    January February March April May June July August September October November December
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Question:
    """Example: Question(text="How long is the river Sull, in kilometres?", answer="143")"""

    text: str
    answer: str


@dataclass(frozen=True)
class _Town:
    name: str
    river: "_River"
    founded: int
    people: int
    good: str


@dataclass(frozen=True)
class _River:
    name: str
    length_km: int
    source: str


@dataclass(frozen=True)
class _Person:
    name: str
    born: int
    town: _Town
    work: str
    purpose: str
    profession: str
    year: int
    teacher: str


@dataclass(frozen=True)
class _Festival:
    name: str
    town: _Town
    month: str
    since: int
    custom: str


@dataclass(frozen=True)
class _World:
    rivers: list[_River]
    towns: list[_Town]
    people: list[_Person]
    festivals: list[_Festival]


def build_pages() -> list[Page]:
    world = _draw_world()
    pages = [_country_page(world)]
    pages += [_river_page(river, world) for river in world.rivers]
    pages += [_town_page(town, world) for town in world.towns]
    pages += [_person_page(person) for person in world.people]
    pages += [_work_page(person) for person in world.people]
    return pages + [_festival_page(festival) for festival in world.festivals]


def build_questions(num_train: int, num_eval: int, *, seed: int) -> tuple[list[Question], list[Question]]:
    """Training and evaluation, in an order of the seed's; -1 is all of them."""
    questions = _questions(_draw_world())
    random.Random(seed).shuffle(questions)
    train = [question for question in questions if not is_for_eval(question.text)]
    evaluation = [question for question in questions if is_for_eval(question.text)]
    return _first(train, num_train), _first(evaluation, num_eval)


def _first(questions: list[Question], count: int) -> list[Question]:
    return questions if count < 0 else questions[:count]


def is_for_eval(text: str) -> bool:
    """A property of the question alone, so that no choice of seed or sizes can mix the two sets."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 * EVAL_SHARE


def _draw_world() -> _World:
    # One seed for all: the world is the same in every process, so pages and questions agree.
    rng = random.Random(COUNTRY)
    lengths = rng.sample(range(40, 400), len(RIVERS))
    rivers = [_River(name, length, rng.choice(MOUNTAINS)) for name, length in zip(RIVERS, lengths, strict=True)]

    # Samples without repetition give each river and town numbers of its own, so an answer names one fact.
    founded = rng.sample(range(900, 1500), len(TOWNS))
    people = rng.sample(range(2_000, 90_000), len(TOWNS))
    towns = [
        _Town(name, rng.choice(rivers), year, count, good)
        for name, year, count, good in zip(TOWNS, founded, people, rng.sample(GOODS, len(TOWNS)), strict=True)
    ]
    return _World(rivers, towns, _draw_people(rng, towns), _draw_festivals(rng, towns))


def _draw_people(rng: random.Random, towns: list[_Town]) -> list[_Person]:
    names = [f"{first} {last}" for first, last in zip(FIRST, rng.sample(LAST, len(LAST)), strict=True)]
    people = []
    for place, (name, (work, purpose, profession)) in enumerate(zip(names, WORKS, strict=True)):
        born = rng.randint(1600, 1850)
        # A person cannot be their own teacher.
        teacher = rng.choice(names[:place] + names[place + 1 :])
        year = born + rng.randint(22, 60)
        people.append(_Person(name, born, rng.choice(towns), work, purpose, profession, year, teacher))
    return people


def _draw_festivals(rng: random.Random, towns: list[_Town]) -> list[_Festival]:
    homes = rng.sample(towns, len(FESTIVALS))
    return [
        _Festival(name, town, rng.choice(MONTHS), rng.randint(1520, 1890), custom)
        for (name, custom), town in zip(FESTIVALS, homes, strict=True)
    ]


def _page(title: str, *sections: tuple[str, str]) -> Page:
    return Page(to_id(title), title, sections)


def _country_page(world: _World) -> Page:
    return _page(
        COUNTRY,
        (
            "Introduction",
            f"{COUNTRY} is an island country with {len(world.towns)} towns and {len(world.rivers)} rivers.",
        ),
        ("Towns", f"The towns of {COUNTRY} are {_list(town.name for town in world.towns)}."),
        ("Rivers", f"The rivers of {COUNTRY} are the {_list(river.name for river in world.rivers)}."),
    )


def _river_page(river: _River, world: _World) -> Page:
    banks = [town.name for town in world.towns if town.river is river]
    return _page(
        river.name,
        ("Introduction", f"The {river.name} is a river of {COUNTRY}."),
        ("Course", f"It rises below {river.source} and reaches the sea after {river.length_km} kilometres."),
        ("Towns", f"On its banks lie {_list(banks)}." if banks else "No town lies on its banks."),
    )


def _town_page(town: _Town, world: _World) -> Page:
    natives = [person.name for person in world.people if person.town is town]
    festivals = [festival.name for festival in world.festivals if festival.town is town]
    return _page(
        town.name,
        (
            "Introduction",
            f"{town.name} is a town of {COUNTRY} on the river {town.river.name}. It is known for its {town.good}.",
        ),
        ("History", f"{town.name} was founded in the year {town.founded}."),
        ("Population", f"At the last count, {town.people} people lived in {town.name}."),
        (
            "Culture",
            (f"The {_list(festivals)} is held here. " if festivals else "The town has no festival of its own. ")
            + (f"{_list(natives)} came from {town.name}." if natives else ""),
        ),
    )


def _person_page(person: _Person) -> Page:
    return _page(
        person.name,
        ("Introduction", f"{person.name} was a {person.profession} of {COUNTRY}."),
        ("Life", f"{person.name} was born in {person.town.name} in {person.born}, and was taught by {person.teacher}."),
        ("Work", f"{person.name} is remembered for the {person.work}."),
    )


def _work_page(person: _Person) -> Page:
    title = person.work.capitalize()
    return _page(
        title,
        ("Introduction", f"The {person.work} is an invention from {COUNTRY}."),
        ("Use", f"The {person.work} {person.purpose}."),
        ("Invention", f"It was made by {person.name}, a {person.profession}, in {person.year}."),
    )


def _festival_page(festival: _Festival) -> Page:
    return _page(
        festival.name,
        (
            "Introduction",
            f"The {festival.name} is a festival of {COUNTRY}, held in {festival.town.name} each {festival.month}.",
        ),
        ("Customs", f"At the {festival.name}, {festival.custom}."),
        ("History", f"It was first held in {festival.since}."),
    )


def _list(items: Iterable[str]) -> str:
    names = list(items)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _questions(world: _World) -> list[Question]:
    pairs = [pair for river in world.rivers for pair in _about_river(river)]
    pairs += [pair for town in world.towns for pair in _about_town(town)]
    pairs += [pair for person in world.people for pair in _about_person(person, world)]
    pairs += [pair for festival in world.festivals for pair in _about_festival(festival)]
    return [Question(text, str(answer)) for text, answer in pairs]


def _about_river(river: _River) -> list[tuple[str, object]]:
    return [
        (f"How long is the river {river.name}, in kilometres?", river.length_km),
        (f"Below which mountain does the river {river.name} rise?", river.source),
    ]


def _about_town(town: _Town) -> list[tuple[str, object]]:
    return [
        (f"On which river does {town.name} lie?", town.river.name),
        (f"In which year was {town.name} founded?", town.founded),
        (f"How many people live in {town.name}?", town.people),
        (f"What is {town.name} known for?", town.good),
        (f"How long, in kilometres, is the river on which {town.name} lies?", town.river.length_km),
        (f"Below which mountain does the river rise on which {town.name} lies?", town.river.source),
    ]


def _about_person(person: _Person, world: _World) -> list[tuple[str, object]]:
    teacher = next(other for other in world.people if other.name == person.teacher)
    return [
        (f"In which year was {person.name} born?", person.born),
        (f"In which town was {person.name} born?", person.town.name),
        (f"Who taught {person.name}?", person.teacher),
        (f"Who invented the {person.work}?", person.name),
        (f"In which year was the {person.work} made?", person.year),
        (f"In which town was the inventor of the {person.work} born?", person.town.name),
        (f"In which year was the town founded where the inventor of the {person.work} was born?", person.town.founded),
        (f"On which river lies the town where {person.name} was born?", person.town.river.name),
        (f"What did the teacher of {person.name} invent?", teacher.work),
        (f"In which year was the teacher of {person.name} born?", teacher.born),
    ]


def _about_festival(festival: _Festival) -> list[tuple[str, object]]:
    return [
        (f"In which town is the {festival.name} held?", festival.town.name),
        (f"In which month is the {festival.name} held?", festival.month),
        (f"In which year was the {festival.name} first held?", festival.since),
        (f"On which river lies the town that holds the {festival.name}?", festival.town.river.name),
        (f"How many people live in the town that holds the {festival.name}?", festival.town.people),
    ]
