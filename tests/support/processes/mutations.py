"""Bytes for fuzz tests: random ones, and real messages with something flipped, cut, put in or put twice."""

import random
from collections.abc import Iterator, Sequence


def mutations(originals: Sequence[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """The same `count` pieces for the same seed; about one in eight is random from end to end."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            _mutate(rng, data)
        yield rng.randbytes(rng.randrange(200)) if rng.randrange(8) == 0 else bytes(data)


def _mutate(rng: random.Random, data: bytearray) -> None:
    place = rng.randrange(len(data) + 1)
    end = min(len(data), place + rng.choice((1, 4, 16)))
    match rng.randrange(6):
        case 0:
            data[place:end] = rng.randbytes(end - place)
        case 1:
            del data[place:end]
        case 2:
            del data[place:]
        case 3:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            data[place:place] = data[place:end]
        case _ if place < len(data):
            data[place] ^= 1 << rng.randrange(8)
