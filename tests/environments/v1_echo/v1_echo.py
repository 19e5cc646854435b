"""Small v1 environments of verifiers 0.4: say a word again, as often as a user asks for it."""

import random

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str
    again: int = 0
    times: int = 1


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=1.0)
    async def echoes(self, trace: vf.Trace) -> float:
        if self.data.answer.isdigit():  # one for policies that say anything but their task
            return sum(place * ord(letter) for place, letter in enumerate(trace.last_reply, start=1)) % 97 / 97
        if self.data.answer == "unjudgeable":
            raise ValueError("this cannot be judged")
        return float("nan") if self.data.answer == "nan" else float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EchoConfig(vf.TasksetConfig):
    system: str | None = None
    endless: bool = False
    picture: str = ""  # a task is played instead that shows it
    numbers: int = 0  # tasks that are played instead, of three turns each


TASKS = [
    {"answer": "word"},
    {"answer": "a much longer word"},
    {"answer": "often", "again": 9},
    {"answer": "unjudgeable"},
    {"answer": "nan"},
    {"answer": "twice", "times": 2},
]


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    @property
    def INFINITE(self):
        return self.config.endless

    def load(self):
        while self.config.endless:
            word = str(random.random())
            yield EchoTask(EchoData(prompt=f"say: {word}", answer=word), self.config.task)
        if self.config.picture:
            shown = vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": self.config.picture}}])
            yield EchoTask(EchoData(prompt=[shown], answer="red"), self.config.task)
        numbers = [{"answer": str(number), "again": 2} for number in range(self.config.numbers)]
        for fields in numbers or TASKS:
            data = EchoData(prompt=f"say: {fields['answer']}", system_prompt=self.config.system, **fields)
            yield EchoTask(data, self.config.task)


class EchoEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class EchoEnv(vf.Env[EchoEnvConfig]):
    """The agent is asked once, and then `again` times more by a user who wants nothing else."""

    async def run(self, task, agents):
        for _ in range(task.data.times):
            await (self.talk(task, agents) if task.data.again else agents.agent.run(task))

    async def talk(self, task, agents):
        opened = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.agent.interaction(opened) as talk:
            answer = await talk.turn(task.data.prompt_text)
            for _ in range(task.data.again):
                if answer.terminated:
                    return
                answer = await talk.turn("again")


__all__ = ["EchoEnv", "EchoTaskset"]
