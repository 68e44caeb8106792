"""A model behind an OpenAI-compatible endpoint, in the place of the judge model of a published rule.

    judge = JudgeModel("http://127.0.0.1:8000/v1", cache=Path("judge_cache"))
    judgements = judge.judgements(BENCHMARKS["mathvista"], answered)

Equal requests are sent once, and replies are kept on the disk by server, model, words and settings.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.chat_endpoint.batch import COSTS, BatchClient
from vlm_rl.chat_endpoint.client import ChatEndpoint, Timeouts, check_address, read_key
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    Judgement,
    PublishedJudge,
    Response,
    UnreadableReplyError,
)
from vlm_rl.types import Problem

_TIMEOUTS = Timeouts(60.0)


class JudgeModel:
    """A judge to ask.

    Attributes:
        name: of the model, as its server calls it.
        cost: what all requests so far have taken, by chat_endpoint.batch.COSTS.
    """

    def __init__(self, url: str, *, name: str = "", cache: Path, key_env: str = "") -> None:
        """Ask the server for its models.

        Args:
            url: of the server, up to and including /v1.
            name: of the model; "" takes the only one that the server has.
            cache: folder of replies that are not asked for again.
            key_env: the environment variable that holds the API key; "" sends none.

        Raises UserError for an address that is not plain http(s), a server that does not answer, and a model that
        the server does not have.
        """
        check_address(url, setting="--judge", key_setting="--judge-key-env")
        key = read_key(key_env, setting="--judge-key-env")
        self._endpoint = ChatEndpoint(url, key=key, called="the judge", timeouts=_TIMEOUTS)
        self._batch = BatchClient(self._endpoint, cache=cache)
        self.cost = dict.fromkeys(COSTS, 0)
        self.name = self._endpoint.model_named(name, setting="--judge-model")

    def judgements(self, benchmark: Benchmark, answered: Sequence[tuple[Problem, Response]]) -> list[Judgement]:
        """Return the verdicts on responses, in their order; one that the judge gives no verdict on is an error.

        Args:
            benchmark: one with a published judge.
            answered: problems with a response to each.
        """
        judge = benchmark.rule.judge
        assert judge is not None
        verdicts: dict[int, Judgement] = {}
        dialogues = {place: judge.dialogue(*pair) for place, pair in enumerate(answered)}
        replies: dict[int, str | None] = dict.fromkeys(dialogues)
        while dialogues:
            asked = _next_requests(dialogues, replies, verdicts)
            dialogues = {place: dialogues[place] for place in asked}
            replies = self._replies(judge, asked, verdicts)
            dialogues = {place: dialogue for place, dialogue in dialogues.items() if place in replies}
        return [verdicts[place] for place in range(len(answered))]

    def _replies(
        self, judge: PublishedJudge, asked: dict[int, str], verdicts: dict[int, Judgement]
    ) -> dict[int, str | None]:
        """Return place -> reply; a request that failed gets its verdict instead."""

        def body_of(text: str) -> dict[str, Any]:
            return {
                "model": self.name,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": judge.max_tokens,
                "temperature": judge.temperature,
            }

        replies: dict[int, str | None] = {}
        for place, reply in zip(asked, self._batch.ask([*asked.values()], body_of=body_of), strict=True):
            for name, number in reply.cost.items():
                self.cost[name] += number
            if reply.text is None:
                verdicts[place] = Judgement("error", None, f"no reply of the judge: {reply.failure}")
            else:
                replies[place] = reply.text
        return replies


def _next_requests(
    dialogues: dict[int, Generator[str, str, Judgement]],
    replies: dict[int, str | None],
    verdicts: dict[int, Judgement],
) -> dict[int, str]:
    """Bring each dialogue to its next request and return place -> request; those that end leave their verdict."""
    asked: dict[int, str] = {}
    for place, dialogue in dialogues.items():
        reply = replies[place]
        try:
            asked[place] = next(dialogue) if reply is None else dialogue.send(reply)
        except StopIteration as end:
            verdicts[place] = end.value
        except UnreadableReplyError as error:
            shown = " ".join((reply or "").split())[-200:]
            verdicts[place] = Judgement("error", None, f"the judge's reply {shown!r} is {error}")
    return asked


def open_judge(
    url: str | None, *, name: str, key_env: str, cache: Path, mode: str, benchmarks: Sequence[Benchmark]
) -> JudgeModel | None:
    """Return the judge of --judge, or None without one.

    Args:
        url: of the server; None if no judge is asked for.
        name: of the model; "" takes the only one that the server has.
        key_env: the environment variable that holds the API key; "" sends none.
        cache: folder of replies that are not asked for again.
        mode: of the scoring; only official has a judge.
        benchmarks: those that are scored.

    Raises UserError if a benchmark's published rule asks no model, or its authors' words are not known here.
    """
    if url is None:
        return None
    if mode != "official":
        raise UserError("--judge is for --mode official: the strict rule asks no model; leave one of them out")
    for benchmark in benchmarks:
        if not benchmark.rule.needs_judge_model:
            raise UserError(f"--judge: {benchmark.name}'s published rule asks no model; leave --judge out")
        if benchmark.rule.judge is None:
            raise UserError(
                f"--judge: no published request to a judge model is known for {benchmark.name}; leave --judge out "
                "for an emulation of its rule"
            )
    return JudgeModel(url, name=name, cache=cache, key_env=key_env)
