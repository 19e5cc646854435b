"""Every route of the real vLLM server, as we start it, rejects requests without a token: its own application, with our
arguments, without an engine behind it."""

import json
import os
import subprocess
import sys

from real_run import DEADLINE_S, REPOSITORY
from trireme.base.token import TOKEN

SECRET = "a-token-for-tests-0123456789"

KNOCK_AT_ALL = """
import json, os
from trireme.config.run import RunConfig
from trireme.inference.server import environment, server_arguments

config = RunConfig.model_validate({"device": "cpu", "inference": {"server": {"port": 1}}})
os.environ.update(environment(config))
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(server_arguments(config))
app = build_app(args, ("generate",))
client = TestClient(app, raise_server_exceptions=False)
found = {}
for route in app.routes:
    if isinstance(route, WebSocketRoute):
        continue
    path = route.path.replace("{", "").replace("}", "") or "/"
    for method in getattr(route, "methods", None) or ["GET"]:
        found[f"{method} {path}"] = client.request(method, path).status_code
found["GET /nowhere"] = client.get("/nowhere").status_code
friend = {"Authorization": "Bearer " + os.environ["TRIREME_TOKEN"]}
print("FOUND", json.dumps({"without": found, "with": client.get("/openapi.json", headers=friend).status_code}))
"""


def test_every_route_of_vllm_is_shut_without_the_token_but_for_health() -> None:
    words, env = [sys.executable, "-c", KNOCK_AT_ALL], os.environ | {TOKEN: SECRET}
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    answers = found["without"]
    known = {"POST /pause", "POST /update_weights", "POST /inference/v1/generate", "POST /collective_rpc"}
    assert known | {"GET /metrics", "POST /v1/chat/completions", "GET /ping"} <= answers.keys()
    assert {route for route, status in answers.items() if status != 401} == {"GET /health"}
    assert found["with"] == 200
