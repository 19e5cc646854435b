"""What the real vLLM rejects as we start it: requests without a token, on every route of its own application (no engine
is behind it), and arguments with which it cannot start."""

import json
from pathlib import Path

from real_run import run_command
from trireme.base.token import TOKEN

SECRET = "a-token-for-tests-0123456789"

ASK_VLLM = """
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
found = {"without": found, "with": client.get("/openapi.json", headers=friend).status_code, "refused": []}

from trireme.base.errors import ConfigError
from trireme.inference.server import serve

for name, value in (("kv-cache-dtype", "foo"), ("enable-log-outputs", True), ("max-num-batched-tokens", 1)):
    inference = {"model": {"name": "models/reverse-text-tiny"}, "server": {"port": 1}, "args": {name: value}}
    try:
        serve(RunConfig.model_validate({"device": "cpu", "inference": inference}))
    except ConfigError as error:
        found["refused"].append(str(error))
print("FOUND", json.dumps(found))
"""


def test_every_route_of_vllm_but_for_health_wants_the_token_and_refused_arguments_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "ask_vllm.py").write_text(ASK_VLLM)
    output = run_command("python", tmp_path / "ask_vllm.py", env={TOKEN: SECRET})
    found = json.loads(output.rpartition("FOUND")[2].splitlines()[0])
    answers = found["without"]
    known = {"POST /pause", "POST /update_weights", "POST /inference/v1/generate", "POST /collective_rpc"}
    assert known | {"GET /metrics", "POST /v1/chat/completions", "GET /ping"} <= answers.keys()
    assert {route for route, status in answers.items() if status != 401} == {"GET /health"}
    assert found["with"] == 200
    reasons = ("'foo'", "--enable-log-requests", "max_num_batched_tokens (1)")
    for error, reason in zip(found["refused"], reasons, strict=True):
        assert error.startswith("vLLM refuses its arguments: ")
        assert reason in error
