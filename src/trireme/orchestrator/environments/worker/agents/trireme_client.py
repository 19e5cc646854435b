"""A plain environment whose rollouts are played by clients of a user's own harness, through the gateway.

The environment gives the examples. Its `reward` is optional: it is called if a client ends a rollout without posting
a reward.
"""

from dataclasses import dataclass, field

from trireme_plain import PlainAdapter, Played
from trireme_rollout import Ask


@dataclass
class ClientPlayed(Played):
    """A rollout that its client has ended."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class ClientAdapter(PlainAdapter):
    """Shows clients their examples, and scores what they have made of them."""

    needs_reward = False
    player = "a client"

    async def play(self, request: dict, ask: Ask) -> ClientPlayed:
        example, index, prompt = self.begin(request)
        reply = await ask(prompt, tools=None, sampling={}, example=example, has_reward=self._reward is not None)
        done = reply["played"]
        said = done["messages"] or prompt
        num_prompt = next((place for place, each in enumerate(said) if each["role"] == "assistant"), len(said))
        return ClientPlayed(
            example, index, said, num_prompt, stop="client_ended", reward=done["reward"], metrics=done["metrics"]
        )

    async def score(self, played: list[Played]) -> list[dict]:
        (one,) = played
        assert isinstance(one, ClientPlayed), one
        # the client's reward counts; without one, the environment's own function is called
        if one.reward is None:
            return [scored | {"metrics": one.metrics | scored["metrics"]} for scored in await super().score(played)]
        return [{"reward": one.reward, "metrics": one.metrics, "turn_rewards": []} | self.fields(one)]
