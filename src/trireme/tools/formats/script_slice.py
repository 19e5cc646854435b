"""Carry a part of a Python program over into a file of its own: what some expressions need, and nothing else."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterable
from copy import copy
from importlib.util import find_spec
from typing import Any

from trireme.tools.formats.script_values import DEFINITIONS, Program, changed

OWN = {"think_format_reward": "trireme_worker.trl_rewards"}
"""Functions of TRL's that Trireme has, too."""


class Slice:
    """The statements that expressions need, in the order of the program.

    Attributes:
        frozen: objects that are known already, by name: they are written with their values in place of what makes them.
    """

    def __init__(self, program: Program, trainer: ast.Call, frozen: dict[str, dict[str, Any]]) -> None:
        self.program = program
        self.frozen = frozen
        self.statements = [*_before(program.module, trainer), *_before(program.function, trainer)]
        self.names = {id(each): _names(each) for each in self.statements}
        self.needed: set[str] = set()
        self.chosen: set[int] = set()

    def add(self, *expressions: ast.expr | None) -> None:
        """Take in what these expressions need, and what that needs in turn."""
        for expression in filter(None, expressions):
            self.needed |= _names(ast.Expr(expression))[1]
        before = -1
        while before != len(self.chosen):
            before = len(self.chosen)
            for each in self.statements:
                bound, read = self.names[id(each)]
                wanted = bound & self.needed - self.frozen.keys()
                if id(each) not in self.chosen and wanted:
                    self.chosen.add(id(each))
                    self.needed |= read

    @property
    def undefined(self) -> list[str]:
        """Names that nothing in the program binds."""
        bound = {name for each in self.statements if id(each) in self.chosen for name in self.names[id(each)][0]}
        known = bound | self.frozen.keys() | self.program.parameters.keys() | {*dir(builtins), "__file__", "__name__"}
        return sorted(self.needed - known)

    def text(self) -> str:
        """Return the part as a program: imports and definitions as they are written."""
        used = sorted(self.needed & self.frozen.keys())
        fixed = [f"{name} = SimpleNamespace(**{self.frozen[name]!r})" for name in used]
        passed = [f"{name} = {ast.unparse(value)}" for name, value in self._passed()]
        written = [self._written(each) for each in self.statements if id(each) in self.chosen]
        imports = ["from types import SimpleNamespace"] if fixed else []
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join([*imports, *fixed, *passed, *written])).strip()

    def _passed(self) -> Iterable[tuple[str, ast.expr]]:
        """Yield parameters of the function around the trainer that are needed, unless their argument has their name."""
        for name, value in self.program.parameters.items():
            if name in self.needed and name not in self.frozen and ast.unparse(value) != name:
                yield name, value

    def _written(self, statement: ast.stmt) -> str:
        """Return a statement as text; of imports, what is needed."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            kept = [each for each in statement.names if (each.asname or each.name.partition(".")[0]) in self.needed]
            is_of_trl = str(getattr(statement, "module", "")).partition(".")[0] == "trl"
            own = [each for each in kept if is_of_trl and each.name in OWN]
            lines = [f"from {OWN[each.name]} import {each.name}" for each in own]
            rest = [each for each in kept if each not in own]
            if rest:
                shorter = copy(statement)
                shorter.names = rest
                lines.append(ast.unparse(shorter))
            return "\n".join(lines)

        # The text itself keeps comments; it counts only if it means the same without its indentation.
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        text = textwrap.dedent("\n".join(self.program.source.splitlines()[first - 1 : statement.end_lineno]))
        try:
            is_same = [ast.dump(each) for each in ast.parse(text).body] == [ast.dump(statement)]
        except SyntaxError:
            is_same = False
        text = text if is_same else ast.unparse(statement)
        return f"\n\n{text}\n\n" if isinstance(statement, DEFINITIONS) else text

    @property
    def modules(self) -> set[str]:
        """The modules that the part imports, by the first part of their names."""
        nodes = list(ast.walk(ast.parse(self.text())))
        names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        return {name.partition(".")[0] for name in names}

    @property
    def neighbours(self) -> set[str]:
        """Those that lie in the folder of the script."""
        folder = self.program.path.resolve().parent
        return {name for name in self.modules if (folder / f"{name}.py").exists() or (folder / name).is_dir()}

    @property
    def missing(self) -> list[str]:
        """Those that are not installed here."""
        return sorted(name for name in self.modules - self.neighbours if find_spec(name) is None)


def _before(statements: list[ast.stmt], trainer: ast.Call) -> list[ast.stmt]:
    """Return the statements in front of the one with a call in it; all, if none has."""
    holds = [any(node is trainer for node in ast.walk(each)) for each in statements]
    here = next((place for place, each in enumerate(holds) if each), None)
    if here is None:
        return statements
    # The function around the call is seen from inside, so the statements after it count, too.
    inside = isinstance(statements[here], ast.FunctionDef)
    return [each for place, each in enumerate(statements) if place != here] if inside else statements[:here]


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement binds or changes, and those that it reads from around it."""
    table = symtable.symtable(ast.unparse(statement), "statement", "exec")
    bound = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    read = {each.get_name() for each in table.get_symbols() if each.is_referenced()}
    left = list(table.get_children())
    while left:
        inner = left.pop()
        left += inner.get_children()
        read |= {each.get_name() for each in inner.get_symbols() if each.is_global() and each.is_referenced()}

    # A statement that changes what a name stands for belongs to it, as does one that calls it for its effect.
    bound |= set(changed(statement))
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            bound.add(name)
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))]):
            bound.add(name)
    return bound, read
