"""An agent program that starts in no time: it asks the policy three times, and returns its words between."""

import json
import os
import sys
import urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said.strip()}, {"role": "user", "content": f"sure? {len(said)}"}]
