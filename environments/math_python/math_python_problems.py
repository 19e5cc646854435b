"""Problems with a whole number as their answer that computing helps with, of five difficulties.

1: one product and a sum. 2: a longer expression of larger numbers. 3: powers, divisors and digits of large numbers.
4: counting among many numbers. 5: what needs a loop of its own making: sequences, partitions, ways through a grid.

Each answer is computed by a plain algorithm beside its question, never by the words of the question.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EVAL_SHARE = 0.2  # share of all problems; the rest is for training
DRAWS_PER_PROBLEM = 50  # easy problems repeat; after so many draws per problem that is wanted, there are no more


@dataclass(frozen=True)
class Problem:
    """Example: Problem(question="Compute 17*23+5.", answer=396, difficulty=1)"""

    question: str
    answer: int
    difficulty: int


def make_problems(
    num_train: int, num_eval: int, *, difficulties: tuple[int, int], seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Different problems, as many as asked for or as there are. Training and evaluation never share one."""
    lowest, highest = difficulties
    if not 1 <= lowest <= highest <= len(_MAKERS):
        raise ValueError(
            f"difficulty={list(difficulties)} - expected one of 1 to {len(_MAKERS)}, or [lowest, highest] among them - "
            "change `difficulty`."
        )

    # Each problem belongs to one set, so draws continue until both are full.
    train: dict[str, Problem] = {}
    evaluation: dict[str, Problem] = {}
    draws = _draw(random.Random(seed), lowest, highest)
    for _ in range(DRAWS_PER_PROBLEM * (num_train + num_eval)):
        if len(train) >= num_train and len(evaluation) >= num_eval:
            break
        problem = next(draws)
        wanted, limit = (evaluation, num_eval) if is_for_eval(problem.question) else (train, num_train)
        if len(wanted) < limit:
            wanted[problem.question] = problem
    return list(train.values()), list(evaluation.values())


def is_for_eval(question: str) -> bool:
    """A property of the question alone, so that no choice of seed or sizes can mix the two sets."""
    return hashlib.sha256(question.encode()).digest()[0] < 256 * EVAL_SHARE


def _draw(rng: random.Random, lowest: int, highest: int) -> Iterator[Problem]:
    while True:
        difficulty = rng.randint(lowest, highest)
        question, answer = rng.choice(_MAKERS[difficulty])(rng)
        yield Problem(question, answer, difficulty)


def _short_expression(rng: random.Random) -> tuple[str, int]:
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    text, answer = rng.choice([(f"{a}*{b}+{c}", a * b + c), (f"{a}*{b}-{c}", a * b - c), (f"{c}+{a}*{b}", a * b + c)])
    return f"Compute {text}.", answer


def _long_expression(rng: random.Random) -> tuple[str, int]:
    a, b, c, d = (rng.randint(1000, 99999) for _ in range(4))
    e = rng.randint(3, 97)
    choices = [
        (f"({a}*{b}-{c})*{e}", (a * b - c) * e),
        (f"{a}*{b}+{c}*{d}", a * b + c * d),
        (f"({a}+{b})*({c}-{d})", (a + b) * (c - d)),
        (f"({a}*{b}) % {c}", a * b % c),
    ]
    text, answer = rng.choice(choices)
    return f"Compute {text}.", answer


def _power_remainder(rng: random.Random) -> tuple[str, int]:
    base, exponent, modulus = rng.randint(2, 99), rng.randint(50, 999), rng.randint(101, 9999)
    return f"What is the remainder of {base}^{exponent} divided by {modulus}?", pow(base, exponent, modulus)


def _digit_sum(rng: random.Random) -> tuple[str, int]:
    base, exponent = rng.randint(2, 30), rng.randint(20, 120)
    return f"What is the sum of the decimal digits of {base}^{exponent}?", sum(map(int, str(base**exponent)))


def _common_divisor(rng: random.Random) -> tuple[str, int]:
    factor = rng.randint(12, 999)
    a, b = factor * rng.randint(100, 9999), factor * rng.randint(100, 9999)
    return f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)


def _divisors(rng: random.Random) -> tuple[str, int]:
    n = math.prod(rng.choice([2, 2, 3, 3, 5, 7, 11, 13]) for _ in range(rng.randint(5, 9)))
    return f"How many positive divisors does {n} have?", sum(
        2 - (d * d == n) for d in range(1, math.isqrt(n) + 1) if n % d == 0
    )


def _primes_between(rng: random.Random) -> tuple[str, int]:
    low = rng.randint(10, 3000)
    high = low + rng.randint(100, 2000)
    answer = sum(_is_prime(n) for n in range(low, high + 1))
    return f"How many prime numbers are there from {low} to {high}, both included?", answer


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _divisible(rng: random.Random) -> tuple[str, int]:
    limit, a, b = rng.randint(500, 9999), rng.randint(3, 19), rng.randint(3, 19)
    # With equal divisors the answer would always be 0.
    b += a == b
    answer = sum(n % a == 0 and n % b != 0 for n in range(1, limit + 1))
    return f"How many of the whole numbers from 1 to {limit} are divisible by {a} but not by {b}?", answer


def _palindromes(rng: random.Random) -> tuple[str, int]:
    low = rng.randint(1, 2000)
    high = low + rng.randint(500, 9000)
    answer = sum(n for n in range(low, high + 1) if str(n) == str(n)[::-1])
    return f"What is the sum of all numbers from {low} to {high} that read the same backwards?", answer


def _recurrence(rng: random.Random) -> tuple[str, int]:
    first, second, p, q = (rng.randint(1, 9) for _ in range(4))
    index, modulus = rng.randint(30, 300), rng.randint(100, 9999)
    a, b = first, second
    for _ in range(index - 1):
        a, b = b, p * b + q * a
    question = (
        f"A sequence begins with a(1) = {first} and a(2) = {second}; from then on, a(n) = {p}*a(n-1) + {q}*a(n-2). "
        f"What is the remainder of a({index}) divided by {modulus}?"
    )
    return question, a % modulus


def _coins(rng: random.Random) -> tuple[str, int]:
    coins = sorted(rng.sample([1, 2, 3, 5, 7, 10, 12, 20, 25, 50], 4))
    total = rng.randint(30, 200)

    # One coin after the other, so that each set of coins counts once, whatever its order.
    ways = [1] + [0] * total
    for coin in coins:
        for amount in range(coin, total + 1):
            ways[amount] += ways[amount - coin]
    shown = ", ".join(map(str, coins[:-1])) + f" and {coins[-1]}"
    question = (
        f"In how many ways can {total} cents be paid with coins of {shown} cents, if their order is of no matter?"
    )
    return question, ways[total]


def _grid(rng: random.Random) -> tuple[str, int]:
    width, height = rng.randint(4, 12), rng.randint(4, 12)
    column, row = rng.randint(1, width - 1), rng.randint(1, height - 1)

    # Ways to a point are those to its left and lower neighbours; none lead through the forbidden one.
    ways = [[0] * (width + 1) for _ in range(height + 1)]
    for y in range(height + 1):
        for x in range(width + 1):
            if (x, y) == (0, 0):
                ways[y][x] = 1
            elif (x, y) != (column, row):
                ways[y][x] = (ways[y - 1][x] if y else 0) + (ways[y][x - 1] if x else 0)
    question = (
        f"How many paths of single steps to the right or up lead from (0, 0) to ({width}, {height}) without passing "
        f"through ({column}, {row})?"
    )
    return question, ways[height][width]


_MAKERS: dict[int, list[Callable[[random.Random], tuple[str, int]]]] = {
    1: [_short_expression],
    2: [_long_expression],
    3: [_power_remainder, _digit_sum, _common_divisor, _divisors],
    4: [_primes_between, _divisible, _palindromes],
    5: [_recurrence, _coins, _grid],
}
