"""Name the colour of a square in a picture: what cannot be answered without looking. Needs no packages.

`blank = true` shows an empty picture in place of each one, as a control: then no policy is better than guessing.
"""

import base64
import random
import struct
import zlib

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 215, 30),
    "black": (20, 20, 20),
    "white": (240, 240, 240),
}
BACKGROUND = (150, 150, 150)
QUESTION = "What colour is the square?"
SIDE = 56  # pixels of a picture


def dataset(num_train: int = 600, seed: int = 0, blank: bool = False):
    return _examples(num_train, seed=seed, blank=blank, held_out=False)


def eval_dataset(num_eval: int = 120, seed: int = 0, blank: bool = False):
    return _examples(num_eval, seed=seed, blank=blank, held_out=True)


def reward(completion, answer):
    return float(completion.strip() == answer)


def _examples(num: int, *, seed: int, blank: bool, held_out: bool) -> list[dict]:
    """Draw as many pictures of one set. A square's place decides to which of the two it belongs."""
    rng = random.Random(f"{seed} {held_out}")
    examples = []
    while len(examples) < num:
        # Colours take turns, so that guessing one is right as often as guessing another.
        color, side = list(COLORS)[len(examples) % len(COLORS)], rng.randint(28, 52)
        left, top = rng.randint(0, SIDE - side), rng.randint(0, SIDE - side)
        if ((left + top) % 5 == 0) == held_out:
            picture = png([] if blank else [(left, top, side, shade(COLORS[color], rng))])
            examples.append({"prompt": question(picture), "answer": color})
    return examples


def question(picture: bytes) -> list[dict]:
    """Return a chat message with the picture and the question, as OpenAI's API takes them."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def shade(color: tuple[int, int, int], rng: random.Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, channel + rng.randint(-12, 12))) for channel in color)


def png(squares: list[tuple[int, int, int, tuple[int, ...]]]) -> bytes:
    """Draw squares (left, top, side, colour) and return the PNG file."""
    rows = [bytearray(bytes(BACKGROUND) * SIDE) for _ in range(SIDE)]
    for left, top, side, color in squares:
        for row in rows[top : top + side]:
            row[3 * left : 3 * (left + side)] = bytes(color) * side
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))  # 0: each row as it is
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
