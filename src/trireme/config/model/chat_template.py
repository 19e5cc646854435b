"""Chat templates: the environment that compiles them, and the variables that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

GIVEN = {"messages", "tools", "documents", "add_generation_prompt"} | {"raise_exception", "strftime_now"}
"""Variables of every template that are filled in for it."""


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers documents for chat templates."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def template_variables(*texts: str) -> frozenset[str]:
    """Return the variables that templates read. Raises: jinja2.TemplateSyntaxError."""
    environment = template_environment()
    return frozenset().union(*(meta.find_undeclared_variables(environment.parse(text)) for text in texts))


OTHER_THINKING = ("<|channel", "[THINK]", "seed:think", "thought", "analysis")
"""Words of templates whose thinking has other marks than `<think>`."""


def keeps_thinking(text: str, given: Mapping[str, Any]) -> bool:
    """Return whether a template renders what the assistant thought before an earlier answer, in whichever form.

    It does so if it knows of no thinking, as the content is rendered as it is. False if that is not certain.

    Args:
        given: variables of the template, and special tokens.
    """
    if any(word in text for word in OTHER_THINKING):
        return False
    turns = [{"content": f"<think>\n{_THOUGHT}\n</think>\n\nb"}]
    turns += [{"content": "b", "reasoning_content": _THOUGHT}] if "reasoning_content" in text else []

    for turn in turns:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", **turn}, {"role": "user", "content": "c"}]
        try:
            rendered = (
                template_environment()
                .from_string(text)
                .render(**{**given, "messages": talk, "tools": None, "add_generation_prompt": True})
            )
        except jinja2.TemplateError:
            return False
        if _THOUGHT not in rendered:
            return False
    return True


_THOUGHT = "what was thought"


def unread_variables(request: Mapping[str, Any], variables: frozenset[str]) -> list[str]:
    """Return what a request gives the chat template for nothing (see `template_kwargs_of`)."""
    given = request.get("chat_template_kwargs")
    unread = sorted(given.keys() - variables) if isinstance(given, Mapping) else []
    has_effort = request.get("reasoning_effort") is not None
    return unread + ["reasoning_effort"] * (has_effort and not {"reasoning_effort", "enable_thinking"} & variables)


def unread_problems(table: str, request: Mapping[str, Any], variables: frozenset[str], model: str) -> Iterator[str]:
    """Yield one message per variable that a table gives the chat template for nothing."""
    own = sorted(each for each in variables - GIVEN if not each.endswith("_token"))
    for name in unread_variables(request, variables):
        near = get_close_matches(name, own, n=1, cutoff=0.6)
        advice = f"Did you mean `{near[0]}`?" if near else "Remove it."
        expected = f"one of {', '.join(own)}" if own else "none, as it has no variables of its own"
        yield f"{table}: `{name}` is no variable of the chat template of {model} - expected {expected}. {advice}"


class _GenerationTag(Extension):
    """Ignores `{% generation %}`, which marks the assistant's words in some templates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
