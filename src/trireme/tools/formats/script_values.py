"""Read values out of a Python program by its syntax tree. Nothing of the program is run or imported.

Example:
    Program(Path("train.py")).value(node)  # the literal that an expression, or the name of one, stands for
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.tools.formats.script_words import SCRIPT_DEFAULTS, read_typed, read_with_argparse

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Not: operator.not_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many},
}
PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    **{"dict": dict, "str": str, "int": int, "float": float, "bool": bool, "list": list, "tuple": tuple, "len": len},
    **{"Path": lambda *parts: str(Path(*parts)), "os.path.join": lambda *parts: str(Path(*parts))},
    "getattr": lambda one, name: f"{one}.{name}",
}
MOST_LEVELS = 50  # expressions inside of one another
MOST_STEPS = 100_000  # expressions that one value is computed of
MOST_ITEMS = 1 << 20  # items of a list that is written as `[…] * n`
TEXT_METHODS = ("split", "replace", "lower", "upper", "strip", "removeprefix", "removesuffix")
MODULES = ("torch", "transformers", "argparse")
"""Modules of which `torch.bfloat16` and the like are read as words."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PARSES = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")


class Unreadable(Exception):
    """An expression whose value is known only when the program runs."""

    def __init__(self, node: ast.AST, why: str) -> None:
        self.text = f"`{ast.unparse(node)[:80]}`"
        self.why = why
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {self.text} {why}")


@dataclass(frozen=True)
class Parsed:
    """Values by name that a parser of the command line returns for one of its classes.

    Example:
        Parsed("GRPOConfig", {"learning_rate": 1e-5})
    """

    of: str
    values: dict[str, Any]


@dataclass
class Program:
    """A program, seen from the place of one call: statements of its module, and of the function around the call.

    Attributes:
        words: what was typed behind the program's name.
    """

    path: Path
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self.source = self.path.read_text(encoding="utf-8")
            self.tree = ast.parse(self.source, str(self.path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} cannot be read ({error}) - expected a Python file. Check it.") from None
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path} is not valid Python ({error}) - expected a script. Correct it.") from None
        self.module = list(_flat(self.tree.body))
        self.function: list[ast.stmt] = []
        self.parameters: dict[str, ast.expr] = {}
        self.steps = 0  # expressions looked at for the value that is being read
        self.passed: set[int] = set()  # nodes of the arguments, whose names are those of the module

    def look_from(self, call: ast.Call) -> None:
        """See names as they are at a call: those of the function around it, then those of the module.

        Raises: ConfigError for a call inside of a class, or of a function in another.
        """
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (*DEFINITIONS, ast.Lambda)) and any(inner is call for inner in ast.walk(node))
        ]
        for each in around:
            if len(around) > 1 or not isinstance(each, ast.FunctionDef):
                raise ConfigError(
                    f"{self.path}, line {call.lineno}: the trainer is made inside of a class, or of a function in "
                    "another - expected the module, or a function of it. Move the call there."
                )
            self.function = list(each.body)
            self._bind_parameters(each)

    def _bind_parameters(self, function: ast.FunctionDef) -> None:
        calls = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and name_of(node.func) == function.name
        ]
        names = [each.arg for each in function.args.args]
        defaults = function.args.defaults
        self.parameters = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        if len(calls) == 1:
            self.parameters |= dict(zip(names, calls[0].args, strict=False))
            self.parameters |= {each.arg: each.value for each in calls[0].keywords if each.arg}
        self.passed = {id(node) for each in self.parameters.values() for node in ast.walk(each)}

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions or classes of these names, wherever they are."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return [node for node in nodes if name_of(node.func).rpartition(".")[2] in names]

    def binding(self, name: ast.Name) -> ast.AST:
        """Return the one expression, definition or import that a name stands for.

        Raises: Unreadable if there are none or several.
        """
        is_passed = id(name) in self.passed
        for scope in (self.module,) if is_passed else (self.function, self.module):
            found = [(each, value) for each in scope for bound, value in bindings(each) if bound == name.id]
            if len(found) > 1:
                lines = ", ".join(str(each.lineno) for each, _ in found)
                raise Unreadable(name, f"is set at several places (lines {lines}); write its value")
            if found:
                statement, value = found[0]
                if value is None:
                    raise Unreadable(name, f"is set by `{_head(statement)}`; write its value")
                return value
            if scope is self.function and name.id in self.parameters:
                return self.parameters[name.id]
        raise Unreadable(name, "is not defined in the script; write its value")

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Return the plain value of an expression. Raises: Unreadable."""
        self.steps = 0 if depth == 0 else self.steps + 1
        if depth > MOST_LEVELS or self.steps > MOST_STEPS:
            raise Unreadable(node, "leads in a circle, or to too large a value; write it")
        try:
            return self._value(node, lambda inner: self.value(inner, depth + 1))
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise Unreadable(node, f"cannot be computed ({error})") from None

    def _value(self, node: ast.AST, read: Callable[[ast.AST], Any]) -> Any:
        """Return the value of one kind of expression.

        Args:
            read: returns the value of an expression inside of it.
        """
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                bound = self.binding(node)
                return node.id if isinstance(bound, ast.Import) and node.id in MODULES else read(bound)
            case ast.List() | ast.Tuple() | ast.Set():
                items = ((read(item.value) if isinstance(item, ast.Starred) else [read(item)]) for item in node.elts)
                return [each for many in items for each in many]
            case ast.Dict():
                found: dict[Any, Any] = {}
                for key, each in zip(node.keys, node.values, strict=True):
                    found |= read(each) if key is None else {read(key): read(each)}
                return found
            case ast.JoinedStr():
                return "".join(str(read(each)) for each in node.values)
            case ast.FormattedValue(format_spec=None):
                return read(node.value)

            # Operators, on values that are read first.
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](read(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return self._operate(node, read(node.left), read(node.right))
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
                return OPERATORS[type(node.ops[0])](read(node.left), read(node.comparators[0]))
            case ast.BoolOp():
                value = None
                for each in node.values:  # up to the first that decides
                    value = read(each)
                    if bool(value) is isinstance(node.op, ast.Or):
                        break
                return value
            case ast.IfExp():
                return read(node.body if read(node.test) else node.orelse)

            # Parts of other values, and a few functions.
            case ast.Attribute():
                return self._attribute(node, read)
            case ast.Subscript():
                inside = read(node.value)
                if isinstance(inside, dict | list) and not isinstance(node.slice, ast.Slice):
                    return inside[read(node.slice)]
            case ast.Call():
                return self._call(node, read)
        raise Unreadable(node, "is known only when the script runs; write its value")

    def _operate(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        # `"%99999d" % 1` and `[0] * n` may take more than all memory.
        repeats = isinstance(node.op, ast.Mult | ast.Mod) and isinstance(left, str | list)
        if isinstance(left, Parsed) or (repeats and not (isinstance(right, int) and len(left) * right <= MOST_ITEMS)):
            raise Unreadable(node, "is known only when the script runs; write its value")
        return OPERATORS[type(node.op)](left, right)

    def _attribute(self, node: ast.Attribute, read: Callable[[ast.AST], Any]) -> Any:
        if name_of(node).partition(".")[0] in MODULES:
            return name_of(node)
        inside = read(node.value)
        if isinstance(inside, Parsed) and node.attr in inside.values:
            return inside.values[node.attr]
        raise Unreadable(node, "is known only when the script runs; write its value")

    def _call(self, node: ast.Call, read: Callable[[ast.AST], Any]) -> Any:
        """Return what a parser of the command line, or one of a few plain functions, would return."""
        name = name_of(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in PARSES:
            return self.parsed(node)

        defined = self.binding(node.func) if isinstance(node.func, ast.Name) and name not in PLAIN_CALLS else None
        if isinstance(defined, ast.FunctionDef):
            # `def parse_args(): ...; return parser.parse_args()` is a common way to write it
            for inner in ast.walk(defined):
                match inner:
                    case ast.Return(value=ast.Call(func=ast.Attribute(value=parser, attr="parse_args"))):
                        return Parsed("arguments", self._with_argparse(ast.unparse(parser)))

        if name in PLAIN_CALLS:
            given = {each.arg: read(each.value) for each in node.keywords if each.arg}
            spread = [read(each.value) for each in node.keywords if not each.arg]
            return PLAIN_CALLS[name](
                *map(read, node.args), **{k: v for table in (*spread, given) for k, v in table.items()}
            )
        if isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS and not node.keywords:
            text = read(node.func.value)
            if isinstance(text, str):
                return getattr(text, node.func.attr)(*map(read, node.args))
        raise Unreadable(node, "is known only when the script runs; write its value")

    # The command line of the program.

    def parsed(self, call: ast.Call) -> Parsed | list[Parsed]:
        """Return what the program's own parser makes of the words that were typed behind its name."""
        assert isinstance(call.func, ast.Attribute), call
        parser = self.binding(call.func.value) if isinstance(call.func.value, ast.Name) else call.func.value
        if not isinstance(parser, ast.Call):
            raise Unreadable(call, "is no parser that can be read; write the values")
        if name_of(parser.func).rpartition(".")[2] == "ArgumentParser":
            return Parsed("arguments", self._with_argparse(ast.unparse(call.func.value)))

        # TrlParser and HfArgumentParser: each class takes its own names.
        given = parser.args[0] if parser.args else next((each.value for each in parser.keywords), None)
        classes = given.elts if isinstance(given, ast.Tuple | ast.List) else [given] if given else []
        if not classes:
            raise Unreadable(call, "has classes that are known only when the script runs; write the values")
        typed = read_typed(self.words)
        objects = []
        for each in classes:
            own = self._fields(name_of(each))
            values = own | typed if own is not None else dict(typed)
            objects.append(Parsed(name_of(each), values))
        return objects

    def _fields(self, name: str) -> dict[str, Any] | None:
        """Return the defaults of a data class: of the script, or those that TRL documents; None for a configuration."""
        defined = next((each for each in self.module if isinstance(each, ast.ClassDef) and each.name == name), None)
        if defined is None:
            return SCRIPT_DEFAULTS.get(name.rpartition(".")[2])
        found: dict[str, Any] = {}
        for base in defined.bases:
            found |= self._fields(name_of(base)) or {}
        for each in defined.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
                value: ast.expr | None = each.value
                if isinstance(value, ast.Call) and name_of(value.func) == "field":
                    value = next((word.value for word in value.keywords if word.arg == "default"), None)
                if value is not None:
                    found[each.target.id] = self.value(value)
        return found

    def _with_argparse(self, parser: str) -> dict[str, Any]:
        """Return what a parser with the arguments of the script's own makes of the words that were typed.

        Args:
            parser: its name in the script.

        Raises: ConfigError if the words are none of its arguments.
        """
        arguments = []
        for call in self.calls("add_argument"):
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == parser:
                words = {each.arg: each.value for each in call.keywords if each.arg and each.arg != "help"}
                kwargs = {name: self.value(value) for name, value in words.items() if name != "type"}
                kwargs |= {"type": ast.unparse(words["type"])} if "type" in words else {}
                arguments.append((list(map(self.value, call.args)), kwargs))
        return read_with_argparse(arguments, self.words, where=str(self.path))


def name_of(node: ast.AST | None) -> str:
    """Return a dotted name; empty for another expression."""
    if isinstance(node, ast.Attribute):
        above = name_of(node.value)
        return f"{above}.{node.attr}" if above else ""
    return node.id if isinstance(node, ast.Name) else ""


def bindings(statement: ast.stmt) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the names that a statement binds or changes, with what they stand for; None if that is not one plain
    expression."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name, statement.value
        case ast.Assign(targets=[ast.Tuple(elts=elts)]):
            for number, each in enumerate(elts):
                if isinstance(each, ast.Name):
                    yield each.id, _part(statement.value, number)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name, statement
        case ast.Import() | ast.ImportFrom():
            yield from (((each.asname or each.name.partition(".")[0]), statement) for each in statement.names)
        case _:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            yield from ((node.id, None) for node in names if isinstance(node.ctx, ast.Store))
            yield from ((name, None) for name in changed(statement))


CHANGES = ("append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "sort", "reverse")


def changed(statement: ast.stmt) -> Iterator[str]:
    """Yield names whose lists or tables a statement changes: `rows.append(x)`, `rows[0] = x`."""
    for node in [] if isinstance(statement, DEFINITIONS) else ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in CHANGES:
                yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name


def _part(value: ast.expr, number: int) -> ast.AST | None:
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts[number] if number < len(value.elts) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in PARSES:
        return ast.copy_location(ast.Subscript(value, ast.Constant(number), ast.Load()), value)
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, with those behind `if __name__ == "__main__":` as if they were not."""
    for each in body:
        if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test) and not each.orelse:
            yield from _flat(each.body)
        else:
            yield each


def _head(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0][:60]
