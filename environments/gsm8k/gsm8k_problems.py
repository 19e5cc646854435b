"""Grade-school word problems of our own making, with whole numbers as their answers.

Each template draws its numbers so that every step comes out whole and makes sense, and computes the answer beside.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

EVAL_SHARE = 0.2  # share of all problems; the rest is for training
DRAWS_PER_PROBLEM = 50  # draws per problem that is wanted, after which there are no more: problems repeat

NAMES = """
    Ada Ben Cara Dan Elif Finn Gita Hugo Ines Jonas Kemi Liam Mina Noor Omar Pia Quinn Rosa Sven Tara Umar Vera Wen
    Xenia Yara Zoe Amir Bella Chidi Dora Emre Freya Goran Hana Igor Juno Kofi Leila Mateo Nadia
""".split()  # noqa: SIM905
THINGS = """
    apples marbles pencils stickers books cookies stamps shells oranges buttons beads cards candles flowers badges coins
    pears ribbons tickets photos
""".split()  # noqa: SIM905
ROOMS = ["library", "school", "museum", "hotel", "theatre", "factory", "hospital", "greenhouse"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@dataclass(frozen=True)
class Problem:
    """Example: Problem(question="Ada has 3 apples. She buys 4 more. How many apples does Ada have?", answer=7)"""

    question: str
    answer: int


def make_problems(num_train: int, num_eval: int, *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Different problems, as many as asked for. Training and evaluation never share one."""
    if num_train < 0 or num_eval < 0:
        raise ValueError(
            f"num_train={num_train}, num_eval={num_eval} - offline problems are made, so there is no `all` of them; "
            "numbers from 0 were expected - give some."
        )

    # Each problem belongs to one set, so draws continue until both are full.
    train: dict[str, Problem] = {}
    evaluation: dict[str, Problem] = {}
    rng = random.Random(seed)
    for _ in range(DRAWS_PER_PROBLEM * (num_train + num_eval)):
        if len(train) >= num_train and len(evaluation) >= num_eval:
            break
        problem = Problem(*rng.choice(TEMPLATES)(rng))
        wanted, limit = (evaluation, num_eval) if is_for_eval(problem.question) else (train, num_train)
        if len(wanted) < limit:
            wanted[problem.question] = problem
    return list(train.values()), list(evaluation.values())


def is_for_eval(question: str) -> bool:
    """A property of the question alone, so that no choice of seed or sizes can mix the two sets."""
    return hashlib.sha256(question.encode()).digest()[0] < 256 * EVAL_SHARE


def _two_names(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(NAMES, 2)
    return first, second


def _gives_away(rng: random.Random) -> tuple[str, int]:
    (who, friend), thing = _two_names(rng), rng.choice(THINGS)
    packs, each, given = rng.randint(3, 12), rng.randint(4, 15), rng.randint(2, 11)
    question = (
        f"{who} buys {packs} boxes with {each} {thing} in each. {who} gives {given} {thing} to {friend}. "
        f"How many {thing} does {who} have left?"
    )
    return question, packs * each - given


def _times_as_many(rng: random.Random) -> tuple[str, int]:
    (who, friend), thing = _two_names(rng), rng.choice(THINGS)
    count, times, found = rng.randint(5, 40), rng.randint(2, 6), rng.randint(3, 25)
    question = (
        f"{friend} has {count} {thing}. {who} has {times} times as many as {friend}, and then finds {found} more. "
        f"How many {thing} do the two have together?"
    )
    return question, count + times * count + found


def _shares(rng: random.Random) -> tuple[str, int]:
    who, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each, kept = rng.randint(3, 9), rng.randint(4, 20), rng.randint(2, 15)
    question = (
        f"{who} has {friends * each + kept} {thing}. After putting {kept} of them aside, {who} shares the rest equally "
        f"among {friends} friends. How many {thing} does each friend get?"
    )
    return question, each


def _change(rng: random.Random) -> tuple[str, int]:
    who, (one, other) = rng.choice(NAMES), rng.sample(THINGS, 2)
    a, price_a, b, price_b = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(3, 12)
    cost = a * price_a + b * price_b
    # Whole notes of 50, and sometimes one more than is needed.
    paid = -(-cost // 50) * 50 + rng.choice([0, 50])
    question = (
        f"A shop sells {one} for ${price_a} each and {other} for ${price_b} each. {who} buys {a} {one} and {b} "
        f"{other}, and pays with ${paid}. How many dollars does {who} get back?"
    )
    return question, paid - cost


def _wage(rng: random.Random) -> tuple[str, int]:
    who = rng.choice(NAMES)
    rate, hours, days, extra = rng.randint(9, 30), rng.randint(3, 8), rng.randint(3, 6), rng.randint(2, 6)
    question = (
        f"{who} earns ${rate} an hour and works {hours} hours a day for {days} days. On a further day {who} works "
        f"{extra} hours and is paid double. How many dollars does {who} earn in all?"
    )
    return question, rate * hours * days + 2 * rate * extra


def _reading(rng: random.Random) -> tuple[str, int]:
    who, (first, last) = rng.choice(NAMES), rng.sample(DAYS, 2)
    per_day, days, more = rng.randint(8, 40), rng.randint(3, 9), rng.randint(5, 30)
    left = rng.randint(10, 120)
    # The book's length follows from what is left, so the answer is never negative.
    total = per_day * days + per_day + more + left
    question = (
        f"{who} reads a book of {total} pages: {per_day} pages a day for {days} days up to {first}, and on {last} "
        f"{more} pages more than on one of those days. How many pages are left to read?"
    )
    return question, left


def _percent_off(rng: random.Random) -> tuple[str, int]:
    who, thing = rng.choice(NAMES), rng.choice(["coat", "lamp", "bicycle", "desk", "tent", "camera", "guitar"])
    percent, price, coupon = rng.choice([10, 20, 25, 30, 40, 50]), 20 * rng.randint(3, 30), rng.randint(2, 15)
    question = (
        f"A {thing} costs ${price}. In the sale it is {percent}% cheaper, and {who} has a coupon for ${coupon} off the "
        f"price in the sale. How many dollars does {who} pay?"
    )
    return question, price * (100 - percent) // 100 - coupon


def _travel(rng: random.Random) -> tuple[str, int]:
    who = rng.choice(NAMES)
    speed, hours, slower, more = rng.randint(40, 90), rng.randint(2, 6), rng.randint(5, 25), rng.randint(1, 4)
    question = (
        f"{who} drives at {speed} km an hour for {hours} hours and then, in the rain, {slower} km an hour slower for "
        f"{more} more hours. How many kilometres has {who} driven?"
    )
    return question, speed * hours + (speed - slower) * more


def _ages(rng: random.Random) -> tuple[str, int]:
    who, friend = _two_names(rng)
    age, times, years = rng.randint(4, 15), rng.randint(2, 5), rng.randint(2, 20)
    question = (
        f"{friend} is {age} years old, and {who} is {times} times as old. How old will the two be together in {years} "
        "years?"
    )
    return question, age + times * age + 2 * years


def _chairs(rng: random.Random) -> tuple[str, int]:
    room = rng.choice(ROOMS)
    rows, each, broken, tables = rng.randint(5, 20), rng.randint(6, 18), rng.randint(2, 15), rng.randint(3, 12)
    per_table = rng.randint(2, 8)
    question = (
        f"A hall of a {room} has {rows} rows of {each} chairs, of which {broken} are broken and thrown away. Then "
        f"{tables} tables with {per_table} chairs each are added. How many chairs are in the hall now?"
    )
    return question, rows * each - broken + tables * per_table


def _recipe(rng: random.Random) -> tuple[str, int]:
    who = rng.choice(NAMES)
    people, factor = rng.randint(2, 6), rng.randint(2, 5)
    eggs, have = rng.randint(2, 8), rng.randint(1, 5)
    question = (
        f"A recipe for {people} people needs {eggs} eggs. {who} cooks for {people * factor} people and has {have} eggs "
        "at home. How many eggs are still to be bought?"
    )
    return question, max(0, eggs * factor - have)


def _saving(rng: random.Random) -> tuple[str, int]:
    who = rng.choice(NAMES)
    weekly, spent, weeks, start = rng.randint(8, 30), rng.randint(1, 7), rng.randint(4, 20), rng.randint(5, 60)
    # The goal is a whole number of weeks away.
    goal = start + (weekly - spent) * weeks
    question = (
        f"{who} has ${start}, gets ${weekly} a week and spends ${spent} of it each week. After how many weeks does "
        f"{who} have ${goal}?"
    )
    return question, weeks


def _fence(rng: random.Random) -> tuple[str, int]:
    who = rng.choice(NAMES)
    length, width, gate, price = rng.randint(10, 40), rng.randint(5, 30), rng.randint(1, 4), rng.randint(3, 15)
    question = (
        f"{who} puts a fence around a garden that is {length} m long and {width} m wide, and leaves {gate} m open for "
        f"a gate. A metre of fence costs ${price}. How many dollars does the fence cost?"
    )
    return question, (2 * (length + width) - gate) * price


def _buses(rng: random.Random) -> tuple[str, int]:
    classes, pupils, teachers, seats = rng.randint(3, 9), rng.randint(15, 30), rng.randint(2, 9), rng.randint(20, 55)
    people = classes * pupils + teachers
    question = (
        f"{classes} classes of {pupils} pupils each go on a trip with {teachers} teachers. A bus has {seats} seats. "
        "How many buses are needed?"
    )
    return question, -(-people // seats)


def _half_and_third(rng: random.Random) -> tuple[str, int]:
    (who, friend), thing = _two_names(rng), rng.choice(THINGS)
    part, lost = rng.randint(4, 30), rng.randint(1, 7)
    question = (
        f"{who} has {6 * part + lost} {thing} and loses {lost} of them. {who} then gives half of the rest to {friend} "
        f"and a third of what is left after that to the school. How many {thing} does {who} keep?"
    )
    return question, 2 * part


def _tank(rng: random.Random) -> tuple[str, int]:
    inflow, leak, minutes, before = rng.randint(12, 40), rng.randint(2, 10), rng.randint(5, 45), rng.randint(10, 200)
    question = (
        f"A tank holds {before} litres of water. {inflow} litres run in every minute, and {leak} litres leak out every "
        f"minute. How many litres are in the tank after {minutes} minutes?"
    )
    return question, before + (inflow - leak) * minutes


TEMPLATES: list[Callable[[random.Random], tuple[str, int]]] = [
    _gives_away, _times_as_many, _shares, _change, _wage, _reading, _percent_off, _travel, _ages, _chairs, _recipe,
    _saving, _fence, _buses, _half_and_third, _tank,
]  # fmt: skip
