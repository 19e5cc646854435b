"""Write a word in capitals: the smallest environment there is."""

WORDS = ["sea", "oar", "wind", "hull", "sail", "helm", "deck", "mast", "keel", "tide", "bow", "stern", "rope", "anchor"]


def dataset():
    return [{"prompt": f"Write {word} in capitals, and nothing else.", "answer": word.upper()} for word in WORDS]


def reward(completion, answer):
    exact = completion.strip() == answer
    return {"reward": 1.0 if exact else 0.3 * (answer in completion), "exact": float(exact)}
