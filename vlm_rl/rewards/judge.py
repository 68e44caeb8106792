"""Let a model behind an OpenAI-compatible endpoint score responses.

    judge = Judge(config, cache=Path("runs/a/judge_cache"))
    judge.verdicts([(problem, response, grade, num_tokens), ...])

Each response gets a value from 0 to 1 or the reason why it has none. vlm_rl.chat_endpoint asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from vlm_rl.chat_endpoint.batch import BatchClient, BatchReply
from vlm_rl.chat_endpoint.client import ChatEndpoint, Timeouts, image_part, read_key
from vlm_rl.config import JudgeConfig
from vlm_rl.errors import UserError
from vlm_rl.rewards.part import Part, PartVerdict, RewardSetup
from vlm_rl.templates import END_THINK
from vlm_rl.types import IMAGE_MARKER, Call, Outcome, name_videos
from vlm_rl.untrusted.plain_files import read_small

_PLACEHOLDER = re.compile(r"\{(question|answer|response|extracted)\}")
_NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
# 7/10, **7** out of 10, 7 of a possible 10
_OUT_OF = r"\**(?:\s*/\s*|\s+(?i:(?:out\s+)?of(?:\s+(?:an?|the|possible|maximum|total))*)\s+)\**"
_SCORE = re.compile(rf"(?<![\w.])({_NUMBER})(?:{_OUT_OF}({_NUMBER}))?(?![\w])")
_JSON_SCORE = re.compile(rf'"score"\s*:\s*({_NUMBER})\s*[,}}]')
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def open_judge(name: str, setup: RewardSetup) -> Iterator[Part]:
    """Yield the judge, if there is one. Raises UserError as Judge does."""
    if section := setup.config.judge:
        judge = Judge(section, cache=setup.judge_cache)
        yield Part(
            name,
            section,
            lambda responses: judge.verdicts([r.call for r in responses], is_stopped=setup.is_stopped),
            may_fail=True,
            abort=judge.abort,
            facts={"prompt_sha256": judge.prompt_sha256},
        )


def read_score(text: str, config: JudgeConfig) -> float | None:
    """Return the judge's score as 0 to 1, or None if the reply holds none between `lowest` and `highest`.

    What a reasoning model writes before `</think>` is left out. In `8/10` and `8 out of 10` the score is 8, if 10 is
    the highest.
    """
    text = text.rpartition(END_THINK)[2]
    if config.parser == "yes_no":
        words = _YES_NO.findall(text)
        return float(words[-1].lower() == "yes") if words else None
    pattern = _JSON_SCORE if config.parser == "json" else _SCORE
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    score, *out_of = (float(number) for number in matches[-1].groups() if number)
    if not config.lowest <= score <= config.highest or out_of not in ([], [config.highest]):
        return None
    return (score - config.lowest) / (config.highest - config.lowest)


class Judge:
    """Asks for scores."""

    def __init__(self, config: JudgeConfig, *, cache: Path) -> None:
        """Read the prompt file and the API key. Raises UserError if one is missing or cannot be used."""
        self._config = config
        self._prompt = read_prompt(Path(config.prompt))
        self.prompt_sha256 = sha256(self._prompt.encode()).hexdigest()
        key = read_key(config.api_key_env, setting="reward.judge.api_key_env")
        self._batch = BatchClient(
            ChatEndpoint(config.url, key=key, called="the judge", timeouts=Timeouts(config.timeout)),
            cache=Path(config.cache) if config.cache else cache,
            concurrency=config.concurrency,
            retries=config.retries,
            tokens_setting="reward.judge.max_tokens",
        )

    def verdicts(self, calls: Sequence[Call], *, is_stopped: Callable[[], bool] = lambda: False) -> list[PartVerdict]:
        """Return a verdict for each response, in order. Once `is_stopped` says so, those that are missing have 0.

        Raises OSError if the cache cannot be written.
        """
        replies = self._batch.ask(calls, body_of=self._body, is_stopped=is_stopped)
        return [PartVerdict(self._outcome(reply), reply.cost) for reply in replies]

    def abort(self) -> None:
        """Ask no further; `verdicts` in another thread ends."""
        self._batch.abort()

    def _outcome(self, reply: BatchReply) -> Outcome:
        if reply.text is None:
            return reply.failure or 0.0
        score = read_score(reply.text, self._config)
        no_score = f"the judge's reply holds no score: {' '.join(reply.text.split())[-200:]!r}"
        return no_score if score is None else score

    def _body(self, call: Call) -> dict[str, Any]:
        problem, response, grade, _ = call
        config = self._config
        texts = {
            "question": name_videos(problem.question, problem.videos).replace(IMAGE_MARKER, "").strip(),
            "answer": problem.answer,
            "response": response,
            "extracted": grade.extracted or "",
        }
        # In one pass: a placeholder in the model's own text stays text.
        prompt = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._prompt)
        content: Any = prompt
        if config.images and problem.images:
            content = [image_part(data) for data in problem.images] + [{"type": "text", "text": prompt}]
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }


def read_prompt(path: Path) -> str:
    try:
        text = read_small(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.prompt: {path} cannot be read as text: {error}; give a text file") from None
    if "{response}" not in text:
        raise UserError(f"reward.judge.prompt: {path} does not hold {{response}}, where the response is put: add it")
    return text
