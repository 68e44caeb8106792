"""Evaluate into a run directory, resuming where a stopped evaluation was: in training and in `vlm-rl eval`.

Until the result is written, finished problems are in a journal beside the results (vlm_rl.evaluation.journal): one
per set, step and rank, for one set of settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_rl.distributed import barrier, rank, world_size
from vlm_rl.evaluation.benchmarks.registry import benchmark_of, eval_template
from vlm_rl.evaluation.evaluate import Asking, Judging, evaluate
from vlm_rl.evaluation.journal import Journal
from vlm_rl.grading.grader import GRADER_VERSION
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.factory import vllm_version
from vlm_rl.types import Problem

AnswerSettings = dict[str, Any]  # everything that decides the answers

_LIBRARIES = ("vlm-rl", "torch", "transformers", "pillow", "math-verify")


def answer_settings(problems: Sequence[Problem], asking: Asking, judging: Judging) -> AnswerSettings:
    """Return everything that decides the answers to these problems and their verdicts, except the policy itself."""
    builder, sampler = asking.builder, asking.sampler
    accuracy = judging.of_set(benchmark_of(problems)).accuracy
    return {
        "data_sha256": data_digest(problems),
        "num_ranks": world_size(),
        "sampling": asdict(asking.params),
        "seed": asking.seed,
        "step": asking.step,
        "sampler": sampler.name,
        "dtype": str(sampler.dtype).removeprefix("torch."),
        "template": builder.template.name,
        "template_system": builder.template.system,
        "template_prefill": builder.template.prefill,
        **({"template_record": asdict(builder.template)} if eval_template(builder.template.name) is None else {}),
        "min_pixels": builder.min_pixels,
        "max_pixels": builder.max_pixels,
        "grader_version": GRADER_VERSION,
        "accuracy_part": accuracy.settings if accuracy else None,
        "versions": _versions(sampler.name),
        **({} if asking.host is None else {"environment": asking.host.facts}),
    }


def evaluate_into(
    run: RunDirectory,
    name: str,
    problems: Sequence[Problem],
    asking: Asking,
    judging: Judging,
    *,
    settings: AnswerSettings,
    about: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Answer the set, write eval/NAME/step-N and return its summary.

    All ranks call it. Problems that a stopped call with these settings has answered are not answered or graded again.

    Args:
        run: the run directory or results folder.
        name: of the set.
        problems: the set.
        asking: how the problems are asked, at a checkpoint's step.
        judging: how the responses are judged.
        settings: everything that decides the answers, from answer_settings at least.
        about: more for the summary, that no answer depends on.
        more: further arguments of `evaluate`.
    """
    with Journal.open(journal_path(run, name, asking.step), settings) as journal:
        evaluation = evaluate(problems, asking, judging, journal=journal, **more)
        summary = {**evaluation.summary, **(about or {}), **settings}
        if rank() == 0:
            run.write_eval(name, asking.step, evaluation.records, summary)
        barrier()  # no rank deletes its journal before the result is written
        journal.remove()
    return summary


def changed_settings(summary: Mapping[str, Any], settings: AnswerSettings) -> list[str]:
    """Return the settings that changed since the finished result."""
    now = json.loads(json.dumps(settings))
    return [key for key, value in now.items() if summary.get(key) != value]


def journal_path(run: RunDirectory, name: str, step: int) -> Path:
    """Return the place of this rank's journal."""
    return run.path / "eval" / f".{name}-{step:06d}-{rank()}.jsonl"


def data_digest(problems: Sequence[Problem]) -> str:
    """Return a hash of questions, golds, images, times of frames and all that is known of a problem, in any order.

    What is known decides verdicts too: a tolerance, further golds, a program's tests.
    """
    facts = [[p.id, p.question, p.answer, p.answer_type, *p.choices, *p.videos, dict(p.meta)] for p in problems]
    texts = [json.dumps(about, sort_keys=True).encode() for about in facts]
    rows = [digest(text, *p.images) for text, p in zip(texts, problems, strict=True)]
    return digest(*(row.encode() for row in sorted(rows)))


def _versions(sampler: str) -> dict[str, str]:
    engine = {"vllm": vllm_version()} if sampler == "vllm" else {}
    return {name: version(name) for name in _LIBRARIES} | engine


def digest(*parts: bytes) -> str:
    """Return the SHA-256 of the parts, one after the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()
