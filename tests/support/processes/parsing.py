"""Python source as a tree, for tests that look at the code itself."""

import ast
import gc


def parse(source: str) -> ast.Module:
    """As `ast.parse`, with the garbage collector off.

    Up to 3.11.8, CPython fails with "AST constructor recursion depth mismatch" (gh-106905) where it collects garbage in
    the middle of a parse and what is collected parses too, as the formatting of a traceback does.
    """
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()
