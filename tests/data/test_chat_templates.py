"""What is rendered with limits is what transformers renders."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.helpers.tiled_families import INTERNVL_TEMPLATE
from vlm_rl.data.chat_templates import render
from vlm_rl.toy.tiny_model import _CHAT_TEMPLATE

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
ODD = """{%- macro turn(m) %}<{{ m.role }}>{{ m.content | trim | tojson }}{% endmacro -%}
    {%- for m in messages -%}
      {%- if loop.index0 == 9 -%}{%- break -%}{%- endif -%}
      {% generation %}{{ turn(m) }}{% endgeneration %}
    {%- endfor %}
{{ strftime_now('%Y') }} {{ bos_token }} {{ 'é' | tojson(indent=1) }} {% if add_generation_prompt %}x{% endif %}
{{ documents is defined }} {{ tools is defined }}
"""


@pytest.mark.parametrize("template", [ODD, INTERNVL_TEMPLATE, _CHAT_TEMPLATE], ids=["odd", "internvl", "qwen"])
@pytest.mark.parametrize("generation", [True, False])
def test_the_environment_is_that_of_transformers(generation: bool, template: str) -> None:
    tokens: dict[str, Any] = {"bos_token": "<s>"}
    expected, _ = render_jinja_template([TURNS], chat_template=template, add_generation_prompt=generation, **tokens)
    assert render(template, TURNS, generation, tokens) == expected[0]
