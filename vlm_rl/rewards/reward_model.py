"""Let a reward model on a server of vLLM score responses: a model with a head that classifies a chat.

    vllm serve Skywork/Skywork-VL-Reward-7B --runner pooling --port 8001    # beside the run, on a card of its own

The chat is the problem, with its images where they are on, and the response. The value is the probability of one
label: of a model with a single label, vLLM gives the sigmoid of its score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.chat_endpoint.batch import BatchClient, BatchReply
from vlm_rl.chat_endpoint.client import ChatEndpoint, Timeouts, question_content, read_key
from vlm_rl.config import RewardModelConfig
from vlm_rl.rewards.part import Part, PartVerdict, RewardSetup
from vlm_rl.types import IMAGE_MARKER, Call, Outcome, name_videos


def open_reward_model(name: str, setup: RewardSetup) -> Iterator[Part]:
    """Yield the reward model, if there is one. Raises UserError as RewardModel does."""
    if section := setup.config.reward_model:
        model = RewardModel(section, cache=setup.judge_cache)
        yield Part(
            name,
            section,
            lambda responses: model.verdicts([r.call for r in responses], is_stopped=setup.is_stopped),
            may_fail=True,
            abort=model.abort,
        )


class RewardModel:
    """Asks for probabilities."""

    def __init__(self, config: RewardModelConfig, *, cache: Path) -> None:
        """Read the API key. Raises UserError if it cannot be used."""
        self._config = config
        key = read_key(config.api_key_env, setting="reward.reward_model.api_key_env")
        endpoint = ChatEndpoint(config.url, key=key, called="the reward model", timeouts=Timeouts(config.timeout))
        self._batch = BatchClient(
            endpoint,
            cache=Path(config.cache) if config.cache else cache,
            concurrency=config.concurrency,
            retries=config.retries,
            send=endpoint.classify,
        )

    def verdicts(self, calls: Sequence[Call], *, is_stopped: Callable[[], bool] = lambda: False) -> list[PartVerdict]:
        """Return a verdict for each response, in order. Once `is_stopped` says so, those that are missing have 0.

        Raises OSError if the cache cannot be written.
        """
        replies = self._batch.ask(calls, body_of=self._body, is_stopped=is_stopped)
        return [PartVerdict(self._outcome(reply)) for reply in replies]

    def abort(self) -> None:
        """Ask no further; `verdicts` in another thread ends."""
        self._batch.abort()

    def _outcome(self, reply: BatchReply) -> Outcome:
        if reply.text is None:
            return reply.failure or 0.0
        values = [float(value) for value in reply.text.split()]
        if self._config.label >= len(values):
            return f"the reward model has {len(values)} labels, and reward.reward_model.label is {self._config.label}"
        return values[self._config.label]

    def _body(self, call: Call) -> dict[str, Any]:
        problem, response, _, _ = call
        content: Any = name_videos(problem.question, problem.videos).replace(IMAGE_MARKER, "").strip()
        if self._config.images and problem.images:
            content = question_content(problem)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": response}]
        return {"model": self._config.model, "messages": messages}
