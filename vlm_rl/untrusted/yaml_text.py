"""Read YAML that a file, a data set's card or another trainer gives: within limits, and with one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

_MOST_CHARACTERS = 1 << 18  # PyYAML reads some 100 kB a second; the largest recipe has 10 kB
_MOST_VALUES = 100_000  # with what aliases repeat; the largest recipe has some hundreds
_MOST_TOLD = 500  # characters of a message, which may quote the text
_MOST_DIGITS = 1000  # Python writes no number of more than 4,300


def read_yaml(text: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """Return the value of a YAML text. Raises ValueError, in one line, for a text that cannot be read.

    Refused too: a text that is too long or nested too deeply, aliases that repeat too much, and a value that does not
    fit its tag or form.

    Args:
        text: of the whole file.
        load: reads a text that keeps the limits; whatever it raises becomes the ValueError.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
    try:
        if _expanded(yaml.compose(text, yaml.SafeLoader), {}) > _MOST_VALUES:
            raise ValueError(f"it repeats parts (&name, *name) until they are more than {_MOST_VALUES} values")
        return load(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(_told(error)) from None
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # what int(), a dict or a match raises
        raise ValueError(f"a value is not what its tag or its form says ({error!r})") from None
    except Exception as error:  # PyYAML's, a loader's, and whatever else the constructor of a value raises
        raise ValueError(" ".join(str(error).split())[:_MOST_TOLD]) from None


def _told(error: yaml.MarkedYAMLError) -> str:
    """Return the place and the problem, without the lines of the text that PyYAML quotes."""
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    since = f" of line {begun.line + 1}" if mark and begun and begun.line != mark.line else ""
    parts = [part for part in (error.context and error.context + since, error.problem) if part]
    return " ".join(f"{place}{', '.join(parts)}".split())[:_MOST_TOLD]


def _expanded(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Return how many values a node has once its aliases are copied.

    Raises RecursionError for one inside itself, and ValueError for a number that is too long and a text that is none.
    """
    if node in known:
        return known[node]
    if isinstance(node, yaml.CollectionNode):
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[node] = 1 + sum(_expanded(part, known) for part in parts)
        return known[node]
    if isinstance(node, yaml.ScalarNode):
        node.value.encode()  # a ValueError for half of a surrogate pair, which no page and no file can hold
        if "\0" in node.value:
            raise ValueError(f"line {node.start_mark.line + 1}: a text with a zero, which no name of a file can hold")
    if isinstance(node, yaml.ScalarNode) and len(node.value) > _MOST_DIGITS and node.tag.endswith((":int", ":float")):
        raise ValueError(f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits")
    return 1
