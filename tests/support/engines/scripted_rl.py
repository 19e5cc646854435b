"""`rl` with a scripted engine in place of vLLM; all else is the real thing.

python tests/support/engines/scripted_rl.py @ tests/e2e/scripted.toml --output-dir FOLDER
python tests/support/engines/scripted_rl.py vf-rl @ FILE                 the same of `vf-rl`
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.cli import rl
from trireme.cli.command import run_command
from trireme.cli.other_formats import vf_rl
from trireme.launch.plan import Plan, ProcessSpec

ENGINE = Path(__file__).with_name("scripted_engine.py")


def main() -> None:
    rl.plan = _with_scripted_engine(rl.plan)  # type: ignore[attr-defined]
    if sys.argv[1:2] == ["vf-rl"]:
        del sys.argv[1]
        vf_rl()
    run_command("rl", rl.rl)


def _with_scripted_engine(plan: Any) -> Any:
    def scripted(*args: Any, **kwargs: Any) -> Plan:
        real = plan(*args, **kwargs)
        return real | {"inference": _scripted(real["inference"])}

    return scripted


def _scripted(spec: ProcessSpec) -> ProcessSpec:
    return replace(spec, argv=(sys.executable, str(ENGINE), *spec.argv[3:]))


if __name__ == "__main__":
    main()
