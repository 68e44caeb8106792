"""How a model calls a tool, and how its turn is read.

    tool_call    <tool_call>{"name": "zoom", "arguments": {"bbox_2d": [1, 2, 3, 4]}}</tool_call>
    fenced       the same JSON in a fenced block:  ```tool_call ... ```

The first is the form that Qwen's models are trained on (Hermes). A turn has one call or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_rl.untrusted.json_object import read_object

LONGEST = 100_000  # characters of a call that are read
_FORMS = {
    "tool_call": re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL),
    "fenced": re.compile(r"^```tool_call[ \t]*\n(.*?)(^```|\Z)", re.DOTALL | re.MULTILINE),
}
_SHAPES = {"tool_call": "<tool_call>\n{}\n</tool_call>", "fenced": "```tool_call\n{}\n```"}


class ToolCallError(Exception):
    """Raised where a turn tries a call that cannot be read or followed; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool with its arguments."""

    name: str
    arguments: Mapping[str, Any]


def written(name: str, arguments: Mapping[str, Any], form: str) -> str:
    """Return a call as a model writes it."""
    return _SHAPES[form].format(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def read_call(text: str, form: str) -> ToolCall | None:
    """Return the only call of a turn, None if it has none.

    Raises ToolCallError if there are several, or one that is cut off or no JSON of that shape.
    """
    found = [*_FORMS[form].finditer(text)]
    if not found:
        return None
    if len(found) > 1:
        raise ToolCallError(f"{len(found)} calls in one turn; make one at a time")
    body, end = found[0].groups()
    if not end:
        raise ToolCallError("the call has no end")
    if len(body) > LONGEST:
        raise ToolCallError(f"the call has {len(body)} characters, more than {LONGEST}")
    try:
        tree = read_object(body)
    except ValueError as error:
        raise ToolCallError(f"the call is no JSON object: {error!s:.100}") from None
    if not isinstance(tree.get("name"), str):
        raise ToolCallError('the call needs a "name" and "arguments"')
    arguments = tree.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ToolCallError('"arguments" must be an object')
    return ToolCall(tree["name"], arguments)


def described(name: str, purpose: str, arguments: Mapping[str, Any], required: list[str], form: str) -> str:
    """Return the words of the system's message for one tool.

    Args:
        name: of the tool.
        purpose: what it does, a sentence.
        arguments: the JSON schema of each argument.
        required: arguments that must be given.
        form: tool_call or fenced.
    """
    schema = {"type": "object", "properties": arguments, "required": required}
    tool = {"type": "function", "function": {"name": name, "description": purpose, "parameters": schema}}
    shape = _SHAPES[form].format('{"name": <name>, "arguments": <arguments>}')
    return (
        "You may call this tool before you answer, one call in a turn. The tool's response comes in the next "
        f"message.\n<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>\nWrite a call like this, and end your "
        f"turn behind it:\n{shape}"
    )
