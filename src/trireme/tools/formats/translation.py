"""Translate a run file of another format into our configuration, key by key.

A format is a schema whose fields name their destinations; `translate` reads a file as that schema and follows them.

Example:
    class VfArgs(Section):
        learning_rate: Annotated[PositiveFloat, To("trainer.optim.lr")] = 1e-5
        gradient_checkpointing: Annotated[bool, To(checkpoint_layers)] = False
        max_prompt_len: Annotated[int | None, To(None, "prompt and completion share max_seq_len")] = None
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.config.arguments import TypedFlag
from trireme.config.files import given_values, to_toml, toml_value
from trireme.config.load import read_as
from trireme.config.problems import raise_together
from trireme.config.run import RunConfig
from trireme.config.section import Section, fields_of, find
from trireme.config.translation import Line, Refused, Settings, nested

Rule = Callable[[Any, Any, Devices], Settings]
"""A function of a key's value, the whole file and this machine's devices."""


@dataclass(frozen=True)
class To:
    """The destination of a key of another format.

    Attributes:
        target: our dotted key, which takes the value as it is; or a rule that returns our keys with their values and
            raises `Refused`; or None for a key that sets nothing here.
        otherwise: why the key sets nothing, for the comments of the translated file.
        when: a condition on the file and the devices; without it the key sets nothing.
        like: our key that means the same, if `target` is a rule.
    """

    target: str | Rule | None
    otherwise: str = "sets nothing here"
    when: Callable[[Any, Devices], bool] | None = None
    like: str = ""

    @property
    def doc(self) -> str:
        """The meaning of a key whose schema gives none: the words of our key, or why it sets nothing."""
        ours = self.target if isinstance(self.target, str) else self.like
        found = find(RunConfig, tuple(ours.split(".")))
        return found.doc if found else self.otherwise

    def settings(self, value: Any, file: Section, devices: Devices) -> Settings:
        if self.target is None or (self.when and not self.when(file, devices)):
            return {}
        settings = {self.target: value} if isinstance(self.target, str) else self.target(value, file, devices)
        return {ours: given_values(each) for ours, each in settings.items() if each is not None}


@dataclass(frozen=True)
class ToEach:
    """The destinations of the keys of a table that takes any key.

    Attributes:
        known: destinations by key, written with underscores.
        rest: our table that takes the other keys as they are.
    """

    known: Mapping[str, To]
    rest: str


@dataclass(frozen=True)
class Format:
    """A format of run files.

    Attributes:
        schema: its keys with types, defaults and destinations.
        presets: our keys that the format sets without a key of its own, and those that it sets on GPUs only.
    """

    schema: type[Section]
    presets: Settings = field(default_factory=dict)
    presets_on_gpus: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Translation:
    """A run in our keys.

    Example:
        Translation(table={"max_steps": 100}, notes=("trainer.args.max_steps = 100 -> max_steps = 100",))
    """

    table: dict[str, Any]  # nested tables, as our TOML is read
    notes: tuple[str, ...] = ()  # a line for each key, with what became of it
    env_files: tuple[Path, ...] = ()  # files of environment variables that the run is to have
    lines: tuple[Line, ...] = ()  # each key that sets something, with what became of it, for messages


def as_toml(translation: Translation) -> str:
    """Return a file for `rl @`, with the notes as comments on top."""
    comments = "".join(f"# {line}\n" for note in translation.notes for line in note.splitlines())
    return f"{comments}\n{to_toml(translation.table)}"


def translate(
    format: Format, table: dict[str, Any], devices: Devices, *, where: str = "the file", flags: Sequence[TypedFlag] = ()
) -> Translation:
    """Translate a file that was read already.

    Args:
        where: the file's name, for messages.
        flags: keys of this format that were typed on top of the file.

    Raises: ConfigError with all keys that the format does not have, that cannot have that value, or that disagree.
    """
    file = read_as(format.schema, _lift(table, format.schema), where=where, flags=flags)
    presets = format.presets | (format.presets_on_gpus if devices.gpus else {"device": "cpu"})

    # Two keys may set the same one of ours. A given key wins over a default, and two given ones must agree.
    keys, chosen, problems = list(_keys(file)), dict[str, _Key](), list[str]()
    for key in keys:
        try:
            key.settings = key.to.settings(key.value, file, devices)
        except Refused as refused:
            problems.append(f"`{key.written}` - {refused}")
        for ours, value in key.settings.items():
            rival = chosen.get(ours)
            if rival and rival.is_given and key.is_given and rival.settings[ours] != value:
                problems.append(
                    f"`{rival.written}` and `{key.written}` set `{ours}` to {toml_value(rival.settings[ours])} and "
                    f"{toml_value(value)} - expected them to agree. Remove one of the two."
                )
            elif rival is None or key.is_given:
                chosen[ours] = key

    # All problems are raised at once, so that the user corrects the file once.
    raise_together(problems)

    # The notes explain every key of the translated run, so that users can compare it with their file.
    notes = [f"{ours} = {toml_value(value)}: from no key of the file" for ours, value in presets.items()]
    notes += [note for key in keys for note in _notes(key, chosen)]

    # Keys of the file come after the presets, and override them.
    settings = {ours: key.settings[ours] for ours, key in chosen.items()}
    return Translation(
        table=nested({path_of(ours): value for ours, value in (presets | settings).items()}),
        notes=tuple(notes),
        env_files=getattr(file, "env_file", ()),
        lines=tuple(
            Line(path_of(key.name), key.value, {path_of(ours): settings[ours]}, "", where)
            for ours, key in chosen.items()
        ),
    )


def path_of(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def on_gpus(target: str | Rule) -> To:
    """Return a destination that counts on a machine with GPUs only."""
    return To(target, "without effect: this machine shows no GPU", lambda file, devices: bool(devices.gpus))


def if_true(ours: str, value: Any) -> Rule:
    """Return a rule that gives our key a value if theirs is true."""
    return lambda wanted, file, devices: {ours: value} if wanted else {}


@dataclass
class _Key:
    """A key of the file, with its value or its default."""

    name: str  # dotted
    value: Any
    is_given: bool
    to: To
    settings: Settings = field(default_factory=dict)

    @property
    def written(self) -> str:
        value = None if self.value is None else given_values(self.value)
        return f"{self.name} = {toml_value(value)}"


def _lift(table: dict[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Move keys of the whole run out of the tables below which the guide shows them. TOML takes them for keys of those
    tables.

    Example:
        _lift({"wandb": {"env_file": ["secrets.env"]}}, Hosted)  # {"wandb": {}, "env_file": ["secrets.env"]}
    """
    lifted, root = dict(table), fields_of(schema)
    for name, below in table.items():
        section = root[name].section if name in root else None
        if section and isinstance(below, dict):
            # A key stays in its table if the table has it, and it never overwrites one of the top level.
            strays = (below.keys() & root.keys()) - fields_of(section).keys() - table.keys()
            lifted |= {key: below[key] for key in strays}
            lifted[name] = {key: value for key, value in below.items() if key not in strays}
    return lifted


def _keys(section: Section, above: str = "") -> Iterator[_Key]:
    """Yield every key that has a destination; tables without one are walked through."""
    for name, info in type(section).model_fields.items():
        value, is_given = getattr(section, name), name in section.model_fields_set
        destination = next((each for each in info.metadata if isinstance(each, To | ToEach)), None)
        if isinstance(destination, To):
            yield _Key(f"{above}{name}", value, is_given, destination)
        elif isinstance(destination, ToEach):
            for item, each in value.items():
                # vLLM takes its flags with hyphens and with underscores.
                plain = item.replace("-", "_")
                to = destination.known.get(plain, To(f"{destination.rest}.{plain}"))
                yield _Key(f"{above}{name}.{plain}", each, True, to)
        elif isinstance(value, Section):
            yield from _keys(value, f"{above}{name}.")


def _notes(key: _Key, chosen: dict[str, _Key]) -> Iterator[str]:
    """Say what became of a key. A default is mentioned only if it sets something."""
    used = {ours: value for ours, value in key.settings.items() if key.is_given or chosen[ours] is key}
    for ours, value in used.items():
        default = "" if key.is_given else " (default)"
        yield f"{key.written}{default} -> {ours} = {toml_value(value)}"
    if key.is_given and not used:
        yield f"{key.written}: {key.to.otherwise}"
