"""The process that runs one environment, started as `python .../worker FD` with the environment's own interpreter.

Nothing of `trireme` can be imported here: only the standard library and what the environment brought along. The
other files here are found because this folder is `sys.path[0]`, and `agents/` is added to the path; their names start
with `trireme_` so that they hide no module of the environment.
"""

import asyncio
import gc
import os.path
import socket
import sys

import trireme_guard
from trireme_server import Server
from trireme_wire import read_first_message, send_and_wait


def main() -> None:
    sys.path.insert(1, os.path.join(sys.path[0], "agents"))
    trireme_guard.send_prints_to_stderr()
    orchestrator = socket.socket(fileno=int(sys.argv[1]))
    trireme_guard.end_with(orchestrator)
    request, rest = read_first_message(orchestrator)
    # Loaded outside of any event loop, as verifiers' own server does: `load_environment` may call `asyncio.run`.
    server, answer = Server.load(request)
    trireme_guard.restore_signals()
    if server is None:
        send_and_wait(orchestrator, answer)
        sys.exit(1)
    gc.collect()
    gc.freeze()  # imports and loaded data live as long as this process
    asyncio.run(server.serve(orchestrator, first=answer, unread=rest))


if __name__ == "__main__":
    main()
