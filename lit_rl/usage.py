"""What the command line says of input that cannot be understood: one screen, with the name that was meant."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from lit_rl.errors import SettingsError, UsageError

LINES = 20
"""Of a message about one key; the start and the end of a longer one are shown."""

CLASS_PATH = re.compile(r"class_path '([\w.]+)'")
WRONG_NAMES = (
    re.compile(r"does not accept option '([^']+)'"),
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"has no attribute '([^']+)'"),
    re.compile(r"invalid choice: '([^']+)'"),
    re.compile(r"--([\w.]+)"),
)
WORDING = (
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"Parser key \"([^\"]*)\":", r"\1:"),
    (r"Expected an? ", "Expected "),
    (r"typing\.Literal\[", "one of ["),
)
"""The parser's ways of saying something, and plainer ones."""

NOISE = re.compile(r"Expected path but .* either not accessible|Subclasses are disabled|^\s*$|^\s*Subtypes: ")
"""Lines on ways of reading a value that nobody had in mind."""


class Parser(LightningArgumentParser):
    """Lightning's, whose errors are ours: no list of all options before them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes: dict[str, str] = {}

    def link_arguments(self, source: str, target: str, *args: Any, **kwargs: Any) -> None:
        """Remembers where a linked value is typed."""
        super().link_arguments(source, target, *args, **kwargs)
        self._homes[target] = source

    def _load_config_parser_mode(self, content: str, path: Any = "", *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._load_config_parser_mode(content, path, *args, **kwargs)
        except TypeError as cause:
            raise TypeError(f"{path}: {cause}" if path else str(cause)) from cause

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # one of the parsers inside, whose error the outer one words
            super().error(message, ex)
        said, hint = readable(message), suggestion(message, names_of(self))
        for parser in all_of(self):
            for target, source in parser._homes.items():
                said = said.replace(f"{target}:", f"{source}:")
        raise UsageError("\n".join([said, *hint, "`lit-rl fit --help` lists every key"])) from ex


def readable(message: str) -> str:
    """A parser's message without noise and without the words of its own workings."""
    for pattern, plainer in WORDING:
        message = re.sub(pattern, plainer, message)
    lines = [line[:300] for line in message.splitlines() if not NOISE.search(line)]
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES // 2], "  ...", *lines[-LINES // 2 :]])


def suggestion(message: str, options: set[str]) -> list[str]:
    """A line that names what was probably meant, or what there is; none where neither is known.

    Example: ``Subcommand 'fit' does not accept option 'data.num_genertions'`` gives ``did you mean
    data.num_generations?``.
    """
    known = options.union(*(names_in(path) for path in CLASS_PATH.findall(message)))
    wrong = next((found for pattern in WRONG_NAMES if (found := pattern.findall(message))), [])
    near = [name for word in wrong for name in difflib.get_close_matches(word, known, n=2, cutoff=0.65)]
    if near:
        return [f"did you mean {' or '.join(dict.fromkeys(near))}?"]
    modules = dict.fromkeys(re.findall(r"module '(lit_rl[\w.]*)' has no", message))
    return [f"{name} has {', '.join(importlib.import_module(name).__all__)}" for name in modules]


def names_of(parser: Parser) -> set[str]:
    """Its options and subcommands, and the options of those."""
    actions = [action for one in all_of(parser) for action in one._actions]
    commands = [action.choices for action in actions if isinstance(action.choices, Mapping)]
    return {action.dest for action in actions}.union(*commands)


def all_of(parser: Parser) -> Iterator[Parser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, Mapping):
            yield from action.choices.values()


def names_in(class_path: str) -> set[str]:
    """The options of a class; where there is no such class, the names beside it."""
    module_name, _, name = class_path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError):  # the message says so itself
        return set()
    found = getattr(module, name, None)
    return set(inspect.signature(found).parameters) if inspect.isclass(found) else set(dir(module))


@contextlib.contextmanager
def refusals_of_lightning(flags: Mapping[str, Any]) -> Iterator[None]:
    """What Lightning says of the Trainer's flags, with the keys that it speaks of.

    Args:
        flags: The Trainer's options.
    """
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, ImportError) as cause:
        said = str(cause)
        meant = [name for end in ("=", r"\b") for name in flags if re.search(rf"\b{name}{end}", said)]
        key, value = (f"trainer.{meant[0]}", flags[meant[0]]) if meant else ("trainer", dict(flags))
        raise SettingsError(key, value, f"Lightning's Trainer refuses it: {said}") from cause
