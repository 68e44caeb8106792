"""The section algorithm.distillation: a teacher of the policy."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveFloat

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.names import is_server_address

MOST_SERVED = 20  # ids of a token that vLLM names, by default


class DistillationConfig(ConfigSection):
    """On-policy distillation: a teacher scores the responses of the policy; see docs/algorithms/distillation.md."""

    teacher: str | None = None
    """The folder of the teacher, a frozen model with the tokenizer of model.path; null: there is none."""
    servers: list[str] = []
    """Addresses of servers of the teacher, which `vlm-rl serve` starts from a configuration whose model.path is the
    teacher's folder, with the token of rollout.server_token. They score in its place; the folder is then read for its
    tokenizer alone. Experimental on GPUs."""
    coef: PositiveFloat = 1.0
    """Weight of the divergence from the teacher, in the advantage or in the loss."""
    top_k: NonNegativeInt = 0
    """0: each token's advantage gains coef times the teacher's log-prob less the policy's. k: the loss has the
    divergence over the teacher's k most likely ids instead, the others as one."""
    rewards: bool = True
    """Train on rewards as well; false: on the teacher alone. Rewards are then measured and not trained on."""
    hint: str = ""
    """What the teacher's prompt has after the question, with {answer} for the right answer: with model.path as its
    own teacher, self-distillation."""
    offload: bool = True
    """Keep the teacher in host memory while it does not score; ZeRO 3 divides it among the ranks instead."""

    def conflicts(self) -> Iterator[str]:
        if self.teacher is None:
            for key in sorted(self.model_fields_set - {"teacher"}):
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield f"{key} is {getattr(self, key)!r}, and there is no teacher: give teacher a model folder"
        yield from (
            f"servers: {url!r} is not an address such as http://127.0.0.1:8000"
            for url in self.servers
            if not is_server_address(url)
        )
        if self.servers and self.top_k > MOST_SERVED:
            yield f"top_k is {self.top_k}, and servers name at most {MOST_SERVED} ids: give less, or no servers"
        if self.hint and "{answer}" not in self.hint:
            yield f"hint is {self.hint!r}, which does not say where the answer goes: write {{answer}} there"
