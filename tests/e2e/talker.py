"""An agent program that starts in no time: it asks the policy three times, and returns its words between.

As the SDKs do, it asks again where its connection breaks (TALKER_TRIES), and writes down who has had which turn
(TALKER_LOG).
"""

import http.client
import json
import os
import sys
import time
import urllib.request

rollout = os.path.basename(os.environ.get("TRIREME_ROLLOUT", ""))


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    for left in reversed(range(int(os.environ.get("TALKER_TRIES", "3")))):
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except urllib.request.HTTPError:
            raise
        except (OSError, http.client.HTTPException):
            if not left:
                raise
        time.sleep(0.5)
    raise AssertionError


messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    said = ask(messages)
    messages += [{"role": "assistant", "content": said.strip()}, {"role": "user", "content": f"sure? {len(said)}"}]
    if log := os.environ.get("TALKER_LOG"):
        with open(log, "a") as file:
            file.write(f"{rollout} {os.getpid()}\n")
