"""Names that vLLM knows, read from its source: importing it takes seconds, and a dry run is to take none."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = {
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}


@cache
def parser_names(kind: str) -> tuple[str, ...]:
    """Of `tool_call_parser` or `reasoning_parser`. Empty where vLLM is not installed, or names them in another way."""
    file, table = _REGISTERED[kind]
    for node in _statements(file):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [table]:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return tuple(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return ()


@cache
def sampling_names() -> tuple[str, ...]:
    """Fields of vLLM's SamplingParams. Empty where vLLM is not installed."""
    for node in _statements("sampling_params.py"):
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams":
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            return tuple(field.id for field in fields if isinstance(field, ast.Name) and field.id[0] != "_")
    return ()


def _statements(file: str) -> list[ast.stmt]:
    spec = find_spec("vllm")
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    return ast.parse(path.read_text()).body if path and path.exists() else []
