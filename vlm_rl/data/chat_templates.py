"""Render a model's chat template in a process with limits, and nowhere else.

A template is a program of the model's folder. Jinja2's sandbox keeps it from files and attributes, but not from loops
without an end, and not from numbers and indents that fill the memory. Nor does a trial help: what a template does can
depend on the clock, on chance, and on where it runs, which the names of its functions tell.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError

_worker = LimitedWorker(f"{__name__}.render", cpu_seconds=5.0, memory=256 << 20, output=16 << 20)


def render_limited(renderer: Any, messages: list[dict[str, Any]], *, generation: bool, where: str) -> str:
    """Return the text of messages, rendered in a process with limits.

    Args:
        renderer: the processor or tokenizer whose template it is.
        messages: of the chat, plain JSON.
        generation: whether the template adds what comes before a response.
        where: the model's folder, for the message.

    Raises UserError if there is no template, and if it takes too much or fails.
    """
    template = renderer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(f"{where} has no chat template: use a model that comes with one, such as an instruct model")
    tokens = getattr(renderer, "tokenizer", renderer).special_tokens_map
    try:
        return _worker.call(template, messages, generation, tokens)
    except LimitError as limit:
        raise UserError(
            f"{where}: its chat template {limit}: replace the template, or use a different model"
        ) from None
    except FaultError as fault:
        raise UserError(f"{where}: its chat template cannot be used: {fault}") from None


def render(template: str, messages: list[dict[str, Any]], generation: bool, tokens: dict[str, Any]) -> str:
    """Return the text, rendered as transformers 5 does (utils/chat_template_utils.py)."""
    given = {"messages": messages, "add_generation_prompt": generation, "tools": None, "documents": None}
    return _compiled(template).render(**given, **tokens)


@cache
def _compiled(template: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads {% generation %} as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(template)
