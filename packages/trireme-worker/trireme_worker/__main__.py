"""Run one program of this package under an environment's interpreter: `python .../trireme_worker PROGRAM ARGUMENT...`.

    server FD                                           a worker: loads the environment, and runs its rollouts
    agents.programs SOCKET GATEWAY FOLDERS ABSENCE_S    runs the agent programs of an environment, and outlives workers
    agents.reaper ORDER REPORT GRACE_S                  runs one agent program, and ends all that descends from it
    agents.sandbox ORDER REPORT                         runs one agent program in namespaces of Linux

No environment has this package installed: it is run where it lies, so none keeps a copy of an earlier version. It needs
the standard library alone; an adapter also imports what its environment brings along.
"""

import importlib
import sys
from types import ModuleType


def main() -> None:
    """Register the package under its name, and call the program's `main`."""
    # Python puts the folder that it runs first on the path. There, our modules would hide those of the environment; the
    # folder above may hold packages that the environment must not see.
    package = ModuleType("trireme_worker")
    package.__path__ = [sys.path.pop(0)]
    sys.modules["trireme_worker"] = package

    importlib.import_module(f"trireme_worker.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
