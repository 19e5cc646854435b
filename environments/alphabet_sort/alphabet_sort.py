"""Sort a list that grows from turn to turn: a multi-turn environment that needs no download."""

import verifiers as vf
from alphabet_sort_episodes import FIRST_TAG, LATER_TAG, Episode, items_in, make_episodes, similarity
from datasets import Dataset


def load_environment(
    num_train: int = 1000,
    num_eval: int = 100,
    min_turns: int = 1,
    max_turns: int = 3,
    min_names_per_turn: int = 1,
    max_names_per_turn: int = 5,
    similarity_power: float = 4.0,
    power_per_turn: bool = True,
    items: str = "names",
    sort_by: str = "any",
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    train, evaluation = make_episodes(
        num_train,
        num_eval,
        num_turns=(min_turns, max_turns),
        names_per_turn=(min_names_per_turn, max_names_per_turn),
        items=items,
        sort_by=sort_by,
        seed=seed,
    )

    # The last tag is the answer field; the first turn has a tag of its own, which `TurnRubric` reads.
    parser = vf.XMLParser([FIRST_TAG, LATER_TAG], answer_field=LATER_TAG)
    return AlphabetSortEnv(
        dataset=_to_dataset(train),
        eval_dataset=_to_dataset(evaluation) if evaluation else None,
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=TurnRubric(parser, power=_checked_power(similarity_power), power_per_turn=power_per_turn),
    )


class AlphabetSortEnv(vf.MultiTurnEnv):
    """Asks for the next list whatever the answer was, right or wrong. How many turns there are is the example's."""

    @vf.stop
    async def all_turns_answered(self, state: vf.State) -> bool:
        return len(state["trajectory"]) > len(state["info"]["follow_ups"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        return [vf.UserMessage(content=state["info"]["follow_ups"][len(state["trajectory"]) - 1])]


class TurnRubric(vf.Rubric):
    """The reward, and beside it each turn's similarity. A turn that an episode does not have has no number."""

    def __init__(self, parser: vf.XMLParser, *, power: float, power_per_turn: bool) -> None:
        super().__init__(parser=parser)
        self._power = power
        self._power_per_turn = power_per_turn
        self.add_reward_func(self.similarity_reward)
        for metric in (self.exact_turns, self.answered_turns):
            self.add_metric(metric)

    def similarity_reward(self, completion: vf.Messages, info: dict) -> float:
        """Mean over the turns of similarity ** power; or, without `power_per_turn`, the mean's power."""
        similarities = self.similarities(completion, info)
        if self._power_per_turn:
            return _mean([value**self._power for value in similarities])
        return _mean(similarities) ** self._power

    def exact_turns(self, completion: vf.Messages, info: dict) -> float:
        return _mean([float(value == 1.0) for value in self.similarities(completion, info)])

    def answered_turns(self, completion: vf.Messages, info: dict) -> float:
        """Share of the turns that have an answer in the tags asked for."""
        answers = self.answers(completion, info)
        return _mean([float(answer is not None) for answer in answers])

    async def score_rollout(self, state: vf.State) -> None:
        await super().score_rollout(state)
        similarities = self.similarities(state["completion"], state["info"])
        # Episodes differ in their turns, so these metrics have no functions of their own.
        state["metrics"] |= {f"similarity_turn_{n}": value for n, value in enumerate(similarities, start=1)}

    def similarities(self, completion: vf.Messages, info: dict) -> list[float]:
        """One per turn of the example, before the power; 0 for a turn that was not reached or not answered."""
        answers = self.answers(completion, info)
        return [similarity(answer, wanted) for answer, wanted in zip(answers, info["expected"], strict=True)]

    def answers(self, completion: vf.Messages, info: dict) -> list[list[str] | None]:
        said = [message["content"] or "" for message in self.parser.get_assistant_messages(completion)]
        # A turn that was not reached counts as one without an answer.
        said += [""] * (len(info["expected"]) - len(said))
        return [self._answer(text, LATER_TAG if turn else FIRST_TAG) for turn, text in enumerate(said)]

    def _answer(self, text: str, tag: str) -> list[str] | None:
        """The last one where there are several, so that a second try replaces the first and adds nothing to it."""
        content = getattr(self.parser.parse(text, last=True), tag)
        return None if content is None else items_in(content)


def _checked_power(power: float) -> float:
    if power <= 0:
        raise ValueError(
            f"similarity_power={power} - expected more than 0, such as 4 (the larger, the less a list that is only "
            "nearly right is worth) - raise it."
        )
    return power


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _to_dataset(episodes: list[Episode]) -> Dataset:
    return Dataset.from_list([_to_row(episode) for episode in episodes])


def _to_row(episode: Episode) -> dict:
    prompts, expected = episode.prompts(), episode.expected()
    return {
        "question": prompts[0],
        "answer": "\n".join(expected[-1]),
        "info": {"follow_ups": prompts[1:], "expected": [items_in("\n".join(lines)) for lines in expected]},
    }
