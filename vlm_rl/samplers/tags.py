"""Ask a model whether it can write the tags that a prompt asks for, and spell them as plain text where it cannot.

    settle_tags(builder, sampler)    # with the weights in the sampler, before the first response that counts

A model whose tokenizer has tokens for <think> may never have been trained on them: none of its responses then has the
right format, and reinforcement finds nothing to reinforce (https://github.com/hiyouga/EasyR1/issues/597).
"""

from __future__ import annotations

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import from_main
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.remote.servers import all_served
from vlm_rl.templates import THINK
from vlm_rl.types import Problem

RESPONSES = 4  # to each question
TOKENS = len(THINK) + 2  # of a response: white space, and the tag in single characters
_FEW = RESPONSES * 3 // 4  # of all responses: a difference that is not chance
QUESTIONS = ("What is 17 + 25?", "How many sides does a hexagon have?", "What is 3 x 4 - 5?")


def settle_tags(builder: PromptBuilder, sampler: Sampler, *, context: int, seed: int) -> str:
    """Choose between the two spellings of the tags by what the model answers to three questions; all ranks together.

    They are spelled as plain text where clearly more responses then begin with <think>. A checkpoint's tokenizer
    keeps the choice. Returns a line, or "" if nothing changes.

    Args:
        builder: changed in place. One whose tags are not in doubt asks nothing.
        sampler: holds the model's weights.
        context: of the sampler, in tokens; questions that do not fit are left out.
        seed: of the responses.
    """
    if not builder.tags_are_doubtful:
        return ""
    builder.tags_are_doubtful = False
    total = len(QUESTIONS) * RESPONSES
    as_tokens = _count_opened(builder, sampler, context, seed)
    if 2 * as_tokens >= total or (plain := builder.plainly_spelled()) is None:
        return ""
    as_text = _count_opened(plain, sampler, context, seed)
    if as_text < as_tokens + _FEW:
        return ""
    reason = f"{as_text} of {total} responses begin with {THINK} so, and {as_tokens} with the model's tokens"
    builder.spell_tags_plainly(reason)
    return builder.tags_note


def _count_opened(builder: PromptBuilder, sampler: Sampler, context: int, seed: int) -> int:
    """Return how many responses begin with <think>, in whichever spelling."""
    problems = [Problem(f"tags-{n}", text, (), "", "text") for n, text in enumerate(QUESTIONS)]
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, responses=RESPONSES)
    prompts = [builder.build(problem) for problem in problems]
    prompts = [prompt for prompt in prompts if len(prompt.ids) + TOKENS <= context]
    if not prompts:
        return 0
    with all_served():
        groups = sampler.generate(SampleRequest(prompts, params, seed=seed, step=-2, together=True))
    opened = sum(rollout.text.lstrip().startswith(THINK) for group in groups for rollout in group)
    return from_main(lambda: opened)
