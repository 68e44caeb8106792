"""The teacher of a distillation: a frozen model that scores the policy's own responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_rl.config import Config
from vlm_rl.data.prompts import PromptBuilder, PromptCache
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import check_architecture
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.reference import BaseReference, Reference
from vlm_rl.model_files.model_folder import (
    check_context,
    check_model_folder,
    is_same_folder,
    open_config,
    open_tokenizer,
)
from vlm_rl.samplers.remote.client import ResponseScores
from vlm_rl.samplers.remote.scoring import ScoreRequest, ScoringServers
from vlm_rl.samplers.remote.server_token import token_path
from vlm_rl.samplers.remote.servers import all_served
from vlm_rl.session.parts import load_frozen
from vlm_rl.types import IMAGE_MARKER, VIDEO_MARKER, Group, Problem

KEY = "algorithm.distillation.teacher"


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What scores the responses, and what it reads before them: a model here, or servers."""

    model: Reference | BaseReference | None
    top_k: int
    hint: str
    servers: ScoringServers | None = None

    def shown(self, problem: Problem) -> Problem:
        """Return the problem with the hint after its question, where it has an answer to tell."""
        if not self.hint or not problem.answer:
            return problem
        answer = problem.answer
        for marker in (IMAGE_MARKER, VIDEO_MARKER):  # there is no further image
            answer = answer.replace(marker, marker.strip("<>"))
        return replace(problem, question=problem.question + self.hint.replace("{answer}", answer))

    def scored(self, learner: Learner, rows: Sequence[PackedRow], shown: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows with the teacher's log-probs; `shown` has the same responses as the teacher reads them."""
        assert self.model is not None
        return learner.with_teacher_log_probs(rows, shown, self.model, top_k=self.top_k)

    def asked(
        self, mini_batches: Sequence[tuple[Sequence[Group], list[PackedRow]]], builder: PromptBuilder
    ) -> list[list[PackedRow]]:
        """Return the rows of the mini-batches with the log-probs that the servers give, on all ranks together.

        Args:
            mini_batches: the groups of each on all ranks, and this rank's rows.
            builder: of the policy, for the prompts as the teacher reads them.

        Raises ServersGoneError on all ranks where one of them gets no answer.
        """
        assert self.servers is not None
        prompts, requests, places = PromptCache(builder), list[ScoreRequest](), list[tuple[int, int, list[int]]]()
        for number, (groups, rows) in enumerate(mini_batches):
            wanted: dict[int, set[int]] = {}
            for group, index in (member for row in rows for member in row.members):
                wanted.setdefault(group, set()).add(index)
            for group, indices in wanted.items():
                places.append((number, group, sorted(indices)))
                responses = [groups[group].rollouts[index].ids for index in sorted(indices)]
                requests.append(ScoreRequest(prompts[self.shown(groups[group].problem)], responses))
        with all_served():
            answers = self.servers.scores(requests, top_k=self.top_k)
        found = {
            (number, group, index): scores
            for (number, group, indices), of_group in zip(places, answers, strict=True)
            for index, scores in zip(indices, of_group, strict=True)
        }
        return [
            [
                _with_scores(row, [found[number, *member] for member in row.members], self.top_k, builder)
                for row in rows
            ]
            for number, (_, rows) in enumerate(mini_batches)
        ]


def _with_scores(row: PackedRow, scores: Sequence[ResponseScores], top_k: int, builder: PromptBuilder) -> PackedRow:
    """Return the row with the scores of its responses. Ids beyond the policy's head are like banned ones."""
    joined = (np.concatenate([getattr(s, name) for s in scores]) for name in ("logprobs", "top_ids", "top_logprobs"))
    logp_K, ids_Kk, top_Kk = map(torch.from_numpy, joined)
    if top_k:
        is_known_Kk = ids_Kk < builder.config.get_text_config().vocab_size
        ids_Kk = torch.where(is_known_Kk, ids_Kk, builder.banned_ids[0] if builder.banned_ids else 0)
    extra = {"teacher_ids_Kk": ids_Kk, "teacher_top_Kk": top_Kk} if top_k else {}
    return replace(row, loss=replace(row.loss, teacher_logp_K=logp_K, **extra))


def load_teacher(
    config: Config,
    learner: Learner,
    builder: PromptBuilder,
    *,
    is_stopped: Callable[[], bool],
    note: Callable[[str], None],
) -> Teacher | None:
    """Load the teacher that the configuration names, on all ranks together; None if it names none.

    With adapters the model that the run began with is in memory already, and servers score with their own.

    Args:
        config: of the run.
        learner: of the policy.
        builder: its prompt builder.
        is_stopped: tells whether the run is to end.
        note: prints a line.

    Raises UserError for a folder that is damaged, and for a model whose tokens are not the policy's.
    """
    options = config.algorithm.distillation
    if options.teacher is None:
        return None
    path = Path(options.teacher)
    if not options.servers and config.model.lora is not None and is_same_folder(path, config.model.path):
        return Teacher(BaseReference(learner.engine), options.top_k, options.hint)
    with _named():
        check_model_folder(path)
        teacher = open_config(str(path))
        check_architecture(teacher, path=str(path), rows=config.model.rows)
        check_context(
            teacher,
            prompt_tokens=config.data.max_prompt_tokens,
            response_tokens=config.trained_tokens,
            settings="data.max_prompt_tokens + rollout.max_tokens",
        )
        check_reads_the_same(config, teacher, path, top_k=options.top_k, num_banned=len(builder.banned_ids))
        if options.servers:
            servers = ScoringServers(
                options.servers,
                token_file=token_path(config.rollout.server_token),
                timeout=config.rollout.server_timeout,
                model_sha256=sha256((path / "config.json").read_bytes()).hexdigest(),
                builder=builder,
                max_model_len=config.data.max_prompt_tokens + config.trained_tokens + 1,
                is_stopped=is_stopped,
                note=note,
            )
            return Teacher(None, options.top_k, options.hint, servers)
        size, known = (each.get_text_config().vocab_size for each in (teacher, builder.config))
        model = load_frozen(
            config, learner, path, banned_ids=[*builder.banned_ids, *range(known, size)], stays=not options.offload
        )
    return Teacher(model, options.top_k, options.hint)


def check_reads_the_same(config: Config, teacher: Any, path: Path, *, top_k: int, num_banned: int) -> None:
    """Raise UserError unless ids and pixels mean the same to the teacher as to the policy.

    Args:
        config: of the run.
        teacher: the transformers configuration of the teacher.
        path: its folder.
        top_k: how many of its most likely ids are asked for.
        num_banned: ids that no response contains.
    """
    student = open_config(config.model.path)
    is_vision = hasattr(student, "vision_config")
    if (is_vision or hasattr(teacher, "vision_config")) and student.model_type != teacher.model_type:
        raise UserError(
            f"{path} is of type {teacher.model_type}, and model.path of type {student.model_type}: images enter them "
            "in different ways; use a teacher of the policy's family"
        )
    ours, theirs = (open_tokenizer(str(each), is_vision=is_vision) for each in (config.model.path, path))
    differing = {*ours[1].get_vocab().items()} ^ {*theirs[1].get_vocab().items()}
    if differing:
        token, index = min(differing, key=lambda item: (item[1], item[0]))
        where = "model.path" if ours[1].get_vocab().get(token) == index else "the teacher"
        raise UserError(
            f"{path} has a different tokenizer than model.path: only in that of {where} is id {index} the token "
            f"{token!r}. Log-probs of ids compare only within one vocabulary; use a teacher of the same family"
        )
    if ours[0] is not None:
        settings = [_pixel_settings(processor) for processor in (ours[0], theirs[0])]
        if different := [key for key in settings[0] if settings[0][key] != settings[1].get(key)]:
            key = different[0]
            raise UserError(
                f"{path} has {key} {settings[1].get(key)!r} in its image processor, and model.path "
                f"{settings[0][key]!r}: it would see other pixels; use a teacher of the same family"
            )
    size, known = (each.get_text_config().vocab_size for each in (teacher, student))
    if size < known:
        raise UserError(
            f"{path} has {size} entries in its vocabulary, and model.path {known}: a response may hold an id that "
            "the teacher lacks; use a teacher whose vocabulary is as large"
        )
    if top_k > known - num_banned - 1:
        raise UserError(
            f"algorithm.distillation.top_k is {top_k}, and responses have {known - num_banned} ids: give less"
        )


def _pixel_settings(processor: Any) -> dict[str, Any]:
    names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor")
    values = processor.image_processor.to_dict()
    return {name: values[name] for name in names if name in values}


@contextmanager
def _named() -> Iterator[None]:
    """Let messages about a model folder name the teacher's key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{KEY}: {str(error).removeprefix('model.path: ')}") from None
