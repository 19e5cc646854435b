"""Wordle: a multi-turn game that needs no download."""

import verifiers as vf
from datasets import Dataset
from wordle_game import FIRST_QUESTION, check_sizes, choose_secrets, closeness, instructions, read_guess, reply

SOLVED, CLOSE, QUICK, WELL_FORMED = 0.5, 0.2, 0.2, 0.1  # weights; a word found with the first guess is worth 1


def load_environment(
    num_train: int = 700,
    num_eval: int = 100,
    max_turns: int = 6,
    word_length: int = 5,
    num_words: int | None = None,
    alphabet: str = "",
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    check_sizes(max_turns=max_turns, num_words=num_words)
    train, evaluation = choose_secrets(
        num_train, num_eval, word_length=word_length, alphabet=alphabet, num_words=num_words, seed=seed
    )
    parser = vf.XMLParser(["guess"], answer_field="guess")
    if system_prompt is None:
        system_prompt = instructions(word_length, max_turns, alphabet)

    # An empty prompt means none at all.
    return WordleEnv(
        dataset=_to_dataset(train),
        eval_dataset=_to_dataset(evaluation) if evaluation else None,
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=_build_rubric(parser, max_turns),
        max_turns=max_turns,
    )


class WordleEnv(vf.MultiTurnEnv):
    """Answers each guess with a mark for each letter. What is not a guess costs a turn as well."""

    @vf.stop
    async def word_found(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and self._last_guess(state) == state["answer"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        guesses_left = self.max_turns - len(state["trajectory"])
        return [vf.UserMessage(content=reply(self._last_guess(state), state["answer"], guesses_left))]

    def _last_guess(self, state: vf.State) -> str | None:
        return _guesses(state["trajectory"][-1]["completion"], state["answer"], self.parser)[-1]


def solved(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(answer in _guesses(completion, answer, parser))


def close(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """Of the best guess: share of its letters that are right; one that belongs elsewhere counts half."""
    return max((closeness(guess, answer) for guess in _guesses(completion, answer, parser)), default=0.0)


def quick(completion: vf.Messages, answer: str, parser: vf.Parser, max_turns: int) -> float:
    """1 for the word with the first guess, 1 / max_turns with the last one, 0 where it was not found."""
    guesses = _guesses(completion, answer, parser)
    return (max_turns - guesses.index(answer)) / max_turns if answer in guesses else 0.0


def well_formed(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """Share of the turns that hold a guess: a word of the right length in tags."""
    guesses = _guesses(completion, answer, parser)
    return sum(guess is not None for guess in guesses) / max(1, len(guesses))


def _build_rubric(parser: vf.Parser, max_turns: int) -> vf.Rubric:
    rubric = vf.Rubric(
        funcs=[solved, close, quick, well_formed], weights=[SOLVED, CLOSE, QUICK, WELL_FORMED], parser=parser
    )
    rubric.add_class_object("max_turns", max_turns)
    return rubric


def _guesses(completion: vf.Messages, answer: str, parser: vf.Parser) -> list[str | None]:
    """One per message of the player. Of several in one message, the first counts."""
    said = parser.get_assistant_messages(completion)
    return [read_guess(parser.parse_answer([message]), len(answer)) for message in said]


def _to_dataset(words: list[str]) -> Dataset:
    return Dataset.from_list([{"question": FIRST_QUESTION, "answer": word} for word in words])
