"""Whoever can write to a socket or a file of ours can make us fail, not make us run his code."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.processes.parsing import parse

REPOSITORY = Path(__file__).parents[3]

# reading with these runs what was written; the metadata of torch's distributed checkpoints is a pickle
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.serialization"}
MODULES |= {"torch.distributed.checkpoint", "multiprocessing.connection", "multiprocessing.managers"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"}
METHODS |= {"scatter_object_list", "send_object_list", "recv_object_list", "unsafe_load", "full_load", "load_all"}
LOADS = {"torch", "yaml", "pickle", "dcp", "joblib", "marshal", "dill"}  # `NAME.load(...)`
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
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="from_pretrained"), keywords=keywords):
                # it reads a `.bin` with pickle where there are no safetensors, unless told not to
                if owner.startswith("AutoModel") and "use_safetensors" not in {keyword.arg for keyword in keywords}:
                    yield f"{node.lineno}: {owner}.from_pretrained(...) without use_safetensors"
            case ast.Attribute(attr=name) if name in METHODS:
                yield f"{node.lineno}: .{name}"
            case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value))) if (name, value) in KEYWORDS:
                yield f"{node.lineno}: {name}={value}"


def _is_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def test_nothing_in_the_source_unpickles_or_evaluates():
    files = sorted(file for folder in ("src", "packages") for file in (REPOSITORY / folder).rglob("*.py"))
    assert len(files) > 80
    assert [f"{file.relative_to(REPOSITORY)}:{bad}" for file in files for bad in dangers(file.read_text())] == []


def test_this_test_would_see_it_and_lets_pass_what_runs_nothing():
    seen = (
        "import pickle", "import torch.distributed.checkpoint as dcp", "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import load", "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)", "dist.broadcast_object_list(objects)", "hook = dist.all_gather_object",
        "yaml.load(text)", "eval(text)", "run(line, shell=True)", "AutoModel.from_pretrained(name)",
    )  # fmt: skip
    for source in seen:
        assert list(dangers(source)), source
    for source in ("json.load(file)", "np.load(path)", "safetensors.torch.load_file(path)", "model.eval()"):
        assert not list(dangers(source)), source
