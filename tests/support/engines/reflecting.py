"""A chat endpoint with two minds, whose answers depend on what they are told and on nothing else.

`follower` does what its system prompt says and knows nothing by itself. `reflector` reads feedback, looks which
component of the reward was missed, and adds the instruction for the first of them to the prompt it was shown.
"""

import re
from collections.abc import Callable
from typing import Any

from aiohttp import web

from support.engines.fake_chat import FakeChat, completion

ENVIRONMENT = '''
    """Say a word the way the harbour wants it."""

    WORDS = ["sea", "oar", "wind", "hull", "sail", "helm", "deck", "mast", "keel", "tide", "bow", "stern"] * 4

    def dataset(system_prompt="You are a parrot."):
        said = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return [{"prompt": [*said, {"role": "user", "content": f"Say: {word}"}], "answer": word} for word in WORDS]

    def reward(completion, answer, example):
        example["heard"] = completion.lower()
        twice = completion.lower().count(answer) == 2
        parts = {"capitals": completion.isupper(), "mark": completion.endswith("!"), "twice": twice}
        return {"reward": sum(parts.values()) / 3} | {name: float(value) for name, value in parts.items()}
'''
"""A reward of three parts; none of them is in the prompt to begin with."""

RULES = {"capitals": "Use capitals.", "mark": "End with an exclamation mark.", "twice": "Say it twice."}


def follow(messages: list[dict[str, Any]]) -> str:
    system = "\n".join(str(message["content"]) for message in messages if message["role"] == "system")
    said = str(messages[-1]["content"]).removeprefix("Say: ")
    said = f"{said} {said}" if RULES["twice"] in system else said
    said = said.upper() if RULES["capitals"] in system else said
    return said + ("!" if RULES["mark"] in system else "")


def reflect(messages: list[dict[str, Any]]) -> str:
    question = str(messages[-1]["content"])
    if "```" not in question:
        return "ready"
    prompt = question.split("```")[1].strip()
    missed = [name for name in RULES if re.search(rf"# {name}\n0\n", question) and RULES[name] not in prompt]
    return f"I would say:\n```\n{prompt}\n{RULES[missed[0]] if missed else ''}\n```"


class Endpoint(FakeChat):
    def __init__(self) -> None:
        super().__init__()
        self.answered: list[dict[str, Any]] = []
        self.minds: dict[str, Callable[[list[dict[str, Any]]], str]] = {"follower": follow, "reflector": reflect}
        self.status: Callable[[dict[str, Any]], int] = lambda body: 200

    def asked(self, model: str) -> list[dict[str, Any]]:
        """What was answered, without the first question that each is greeted with."""
        bodies = [body for body in self.answered if body["model"] == model]
        return [body for body in bodies if "Answer with one word" not in str(body["messages"])]

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append(body := await request.json())
        if (status := self.status(body)) != 200:
            return web.json_response({"error": "no"}, status=status)
        self.answered.append(body)
        return web.json_response(completion(self.minds[body["model"]](body["messages"])))
