"""Every name of vLLM and torch that Trireme uses: it is in the GPU build, and takes the arguments that we pass.

Run with the Python of an environment; with `--listed` it prints the signatures alone, as JSON. The GPU build must have
those of the CPU build, on which the tests run.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rows import Row, failure

import trireme

SOURCE = Path(trireme.__file__).parent
LIBRARIES = ("vllm", "torch")
ELSEWHERE = ("cli", "tools", "trainer", "inference/cpu")
"""Folders that are left out: the trainer is a part of its own (`training.py`), the others need no GPU."""

ATTRIBUTES = {
    "vllm.config:ParallelConfig": "data_parallel_index world_size rank",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": "device model model_config parallel_config",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": "_registry",
    "vllm.engine.protocol:EngineClient": "generate",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": "lora_a_stacked lora_b_stacked",
    "vllm.lora.model_manager:LRUCacheLoRAModelManager": "activate_adapter add_adapter lora_index_to_id model modules "
    "packed_modules remove_adapter",
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager": "_adapter_manager lora_config",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": "hidden_dim_unpadded "
    "intermediate_size_per_partition_unpadded w13_num_shards",
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "moe_config quant_method",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "moe_kernel "
    "_init_moe_kernel",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader": "_prepare_weights _get_weights_iterator",
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": "can_load load_numel load_numel_total",
    "vllm.outputs:CompletionOutput": "finish_reason index logprobs sampling_mask stop_reason token_ids weight_versions",
    "vllm.v1.engine.async_llm:AsyncLLM": "engine_core",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient": "call_utility_all_async",
    "vllm.v1.worker.gpu_worker:Worker": "model_runner weight_transfer_engine",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "lora_manager",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "lora_manager",
    "torch.distributed:BroadcastOptions": "rootRank asyncOp",
    "torch.distributed:ProcessGroupNCCL": "abort broadcast",
    "torch.distributed:ProcessGroupNCCL.Options": "_timeout",
    "torch.distributed:Work": "is_completed wait",
    "torch.cuda:Event": "record query",
}
"""What our code reads of objects that it is handed, whose classes it does not name."""

Signatures = dict[str, str]
"""Arguments of each function and class, by the name under which it is used; "" where Python cannot tell them."""


def main(other: str) -> None:
    used: Signatures = {}
    for name, tree in modules():
        check(name, lambda name=name, tree=tree: used.update(check_module(name, tree)))
    for place, names in ATTRIBUTES.items():
        check(f"{place}: {names}", lambda place=place, names=names: check_attributes(place, names.split()))
    compare(used, other)


def modules() -> Iterator[tuple[str, ast.AST]]:
    """Yield our modules that import a library, with their source."""
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        if not is_elsewhere(file) and uses_libraries(tree):
            yield "trireme." + ".".join(file.relative_to(SOURCE).with_suffix("").parts), tree


def is_elsewhere(file: Path) -> bool:
    return file.relative_to(SOURCE).as_posix().startswith(tuple(f"{folder}/" for folder in ELSEWHERE))


def uses_libraries(tree: ast.AST) -> bool:
    return any(
        (node.module or "").split(".")[0] in LIBRARIES
        if isinstance(node, ast.ImportFrom)
        else isinstance(node, ast.Import) and any(each.name.split(".")[0] in LIBRARIES for each in node.names)
        for node in ast.walk(tree)
    )


def check(what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        failure(Row("failed", what), error).print()
    else:
        Row("ok", what).print()


def check_module(name: str, tree: ast.AST) -> Signatures:
    """Import a module of ours, and hold each use of a library in its source against the library.

    Raises: AttributeError for a name that is not there; TypeError for a call with other arguments.
    """
    known = dict(vars(import_module(name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            library = import_module(str(node.module))
            known |= {each.asname or each.name: getattr(library, each.name) for each in node.names}
    used: Signatures = {}
    for node in ast.walk(tree):
        place = dotted(node)
        if place and is_of_library(known.get(place[0])):
            used[".".join(place)] = signature_of(resolve(known, place))
        if isinstance(node, ast.Call) and (place := dotted(node.func)) and is_of_library(known.get(place[0])):
            check_call(resolve(known, place), node)
        if isinstance(node, ast.ClassDef):
            check_overrides(vars(import_module(name)).get(node.name))
    return {f"{name}: {key}": value for key, value in used.items()}


def dotted(node: ast.AST) -> list[str]:
    """Return the parts of `a.b.c`; none for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    above = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*above, node.attr] if above and isinstance(node, ast.Attribute) else []


def is_of_library(value: Any) -> bool:
    module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    is_named = inspect.ismodule(value) or callable(value)
    return is_named and str(module).split(".")[0] in LIBRARIES


def resolve(known: dict[str, Any], place: list[str]) -> Any:
    found = known[place[0]]
    for name in place[1:]:
        found = getattr(found, name)
    return found


def signature_of(value: Any) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):  # a module, a value, or a function in C++
        return ""


def check_call(function: Any, call: ast.Call) -> None:
    """Raises: TypeError if a function does not take as many arguments, or not these names."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return
    if signature_of(function):
        try:
            inspect.signature(function).bind(*call.args, **{str(each.arg): each.value for each in call.keywords})
        except TypeError as error:
            raise TypeError(f"{ast.unparse(call)}: {error}") from None


def check_overrides(own: Any) -> None:
    """Raises: TypeError if a class of ours overrides a method of a library with other arguments."""
    for base in own.__mro__[1:] if inspect.isclass(own) else ():
        for name, method in vars(own).items() if is_of_library(base) else ():
            above = vars(base).get(name)
            if inspect.isfunction(method) and inspect.isfunction(above) and name != "__init__":
                ours, theirs = (list(inspect.signature(each).parameters) for each in (method, above))
                if ours != theirs:
                    raise TypeError(f"{own.__name__}.{name} takes {ours}, and that of {base.__name__} {theirs}")


def check_attributes(place: str, names: list[str]) -> None:
    """Raises: AttributeError for an attribute that a class neither has nor sets."""
    module, _, path = place.partition(":")
    found = resolve(vars(import_module(module)), path.split("."))
    source = "".join(source_of(each) for each in found.__mro__)
    missing = [name for name in names if not hasattr(found, name) and not sets(name, source)]
    if missing:
        raise AttributeError(f"{path} has no {', '.join(missing)}")


def sets(name: str, source: str) -> bool:
    return bool(re.search(rf"\bself\.{name}\b(:[^=\n]+)? =|^    {name}:", source, re.MULTILINE))


def source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # of C++
        return ""


# both builds


def compare(used: Signatures, other: str) -> None:
    """Print how this build differs from that of another environment, where our tests run."""
    settings = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    settings["PYTHONPATH"] = str(Path(__file__).parent)
    answer = subprocess.run([other, __file__, "--listed"], env=settings, capture_output=True, text=True)
    if answer.returncode:
        Row("failed", "CPU build", answer.stderr.strip()[-300:]).print()
        return
    theirs = json.loads(answer.stdout.splitlines()[-1])
    for name, signature in used.items():
        if theirs["used"].get(name) != signature:
            Row("failed", name, f"takes {signature}, and {theirs['used'].get(name)} in the CPU build").print()
    Row("ok", f"{len(used)} uses of vLLM and torch have the same arguments in the CPU build").print()
    own, others = sources(), theirs["sources"]
    differ = [file for file in own if others.get(file, own[file]) != own[file]]
    Row("ok", "Python files of vLLM that differ between the builds", ", ".join(differ)).print()
    folders = Counter("/".join(file.split("/")[:2]) for file in own.keys() - others.keys())
    only_here = ", ".join(f"{folder} ({count})" for folder, count in sorted(folders.items()))
    Row("ok", "Python files of vLLM that only the GPU build has", only_here).print()


def sources() -> dict[str, str]:
    folder = Path(str(import_module("vllm").__file__)).parent
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.py"))
    }


if __name__ == "__main__":
    if sys.argv[1] == "--listed":
        used = {key: value for each in modules() for key, value in check_module(*each).items()}
        print(json.dumps({"used": used, "sources": sources()}))
    else:
        main(sys.argv[1])
