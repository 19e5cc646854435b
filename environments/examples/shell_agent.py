"""A complete agent program in thirty lines: a loop of OpenAI's SDK with one tool. It knows nothing of training.

python shell_agent.py "Write the sum of 2 and 3 into sum.txt."
"""

import json
import subprocess
import sys

from openai import OpenAI

MOST_TURNS = 8
TOOL = {
    "type": "function",
    "function": {
        "name": "exec_command",
        "description": "Run a command and return what it prints.",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}


def main() -> None:
    client = OpenAI()  # the address and the key are in its environment variables
    messages: list = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(MOST_TURNS):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return print(message.content)
        for call in message.tool_calls:
            output = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def run(arguments: str) -> str:
    try:
        command = json.loads(arguments)["cmd"]
    except (ValueError, KeyError, TypeError):
        return "The arguments are no JSON with a `cmd`."
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr)[-2000:] or f"(exit code {done.returncode})"


if __name__ == "__main__":
    main()
