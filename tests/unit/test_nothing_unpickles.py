"""Whoever can write to a socket or a file of ours can make us fail, not make us run his code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsing import parse

SOURCE = Path(__file__).parents[2] / "src"

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MODULES |= {
    "torch.distributed.checkpoint",
    "torch.serialization",
    "multiprocessing.connection",
    "multiprocessing.managers",
}
"""Reading with these runs what was written. DCP's metadata file is a pickle."""

CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"}
METHODS |= {"scatter_object_list", "send_object_list", "recv_object_list", "unsafe_load", "full_load", "load_all"}
LOADS = {"torch", "yaml", "pickle", "dcp", "joblib", "marshal", "dill"}
"""`NAME.load(...)`."""

KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("shell", True)}


def dangers(source: str) -> Iterator[str]:
    """Each as `LINE: what`."""
    for node in ast.walk(parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"{node.lineno}: import {alias.name}" for alias in names if _is_module(alias.name))
            case ast.ImportFrom(module=str(module), names=names):
                full = [f"{module}.{alias.name}" for alias in names]
                yield from (f"{node.lineno}: import {name}" for name in full if _is_module(name))
            case ast.Call(func=ast.Name(id=name)) if name in CALLS | METHODS:
                yield f"{node.lineno}: {name}(...)"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="load")) if owner in LOADS:
                yield f"{node.lineno}: {owner}.load(...)"
            case ast.Attribute(attr=name) if name in METHODS:
                yield f"{node.lineno}: .{name}"
            case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value))) if (name, value) in KEYWORDS:
                yield f"{node.lineno}: {name}={value}"


def _is_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def weights_from_pickles(source: str) -> Iterator[str]:
    """`AutoModel....from_pretrained` reads a `.bin` with pickle where there are no safetensors, unless told not to."""
    for node in ast.walk(parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="from_pretrained"), keywords=keywords):
                if owner.startswith("AutoModel") and "use_safetensors" not in {keyword.arg for keyword in keywords}:
                    yield f"{node.lineno}: {owner}.from_pretrained(...) without use_safetensors"


def test_nothing_in_the_source_unpickles_or_evaluates() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 80
    found = [f"{file.relative_to(SOURCE)}:{danger}" for file in files for danger in dangers(file.read_text())]
    found += [f"{file.relative_to(SOURCE)}:{bad}" for file in files for bad in weights_from_pickles(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import load",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "dist.broadcast_object_list(objects)",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "eval(text)",
        "run(line, shell=True)",
        "hook = dist.all_gather_object",
    ],
)
def test_this_test_would_see_it(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source", ["json.load(file)", "np.load(path)", "safetensors.torch.load_file(path)", "model.eval()"]
)
def test_it_lets_pass_what_runs_nothing(source: str) -> None:
    assert list(dangers(source)) == []
