"""An environment whose rewards mean nothing, differ nearly always, and cost nothing."""


def dataset(size=40):
    return [{"prompt": f"say {number}", "answer": str(number)} for number in range(size)]


def reward(completion, answer):
    return sum(place * ord(letter) for place, letter in enumerate(completion, start=1)) % 97 / 97
