"""Benchmarks, each of them a module: `uv run python -m benchmarks.trainer.head`. docs/benchmarks.md has their figures.

They use what supports the tests (fake engines, tiny models), so those folders are put on the path of modules here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "e2e" / "engine")]
