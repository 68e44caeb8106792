"""`vlm-rl eval --endpoint URL`: measure a served or closed model, as a row to compare with.

    vlm-rl eval --endpoint https://api.example.com/v1 --endpoint-model NAME --endpoint-key-env API_KEY \
        --data data/mathvista --out results/NAME

The server has the OpenAI protocol, as vLLM's has. It gets the template's words and the images of the prepared set, as
they are stored; nothing is written at the beginning of its response, since few servers continue one. What it sends as
reasoning apart from its text is put in front, between <think> and </think>. A length is the server's own count of
tokens, 0 where it does not say; there are no log-probs. A request that fails ends the command: an answer that never
came is no wrong one. Finished problems are kept, and the same command continues with the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.chat_endpoint.batch import BatchClient
from vlm_rl.chat_endpoint.client import ChatEndpoint, Completion, Timeouts, check_address, question_content, read_key
from vlm_rl.config import parse_config
from vlm_rl.data.images import TEST_LIMITS, decode_image
from vlm_rl.distributed import world_size
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.score_command import judge_lines
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.results_folder import ENDPOINT_CACHE, results_folder
from vlm_rl.evaluation.resume import AnswerSettings, answer_settings
from vlm_rl.evaluation.scores import score_line
from vlm_rl.evaluation.sets import EvalSet, Origin, answer_set, open_judge_of, open_sets, stopping, unanswered
from vlm_rl.evaluation.settings import check_options
from vlm_rl.grading.grader import Grader
from vlm_rl.rewards.accuracy import check_boxes
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import make_console
from vlm_rl.samplers.base import OnGroup, SampleRequest, SamplingParams
from vlm_rl.templates import END_THINK, THINK, Template
from vlm_rl.types import Problem, Prompt, Rollout
from vlm_rl.untrusted.json_object import read_object

_NOTHING = np.zeros(0, np.int32)
_MOST_TOKENS = 1_000_000  # of a response: what a server counts is its own word
_ORIGIN = Origin(step=0, contaminated=(), run=None)  # what it was trained on is not known


@dataclass(frozen=True, slots=True, eq=False)
class ServedPrompt(Prompt):
    """A problem as the messages that a server gets; it has no tokens here."""

    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class ServedBuilder:
    """Writes the messages of problems, in the place of a vlm_rl.data.prompts.PromptBuilder."""

    template: Template
    min_pixels: int  # of the set's images
    max_pixels: int

    def build(self, problem: Problem) -> ServedPrompt:
        """Return the prompt of a problem. Raises UserError for one with a video, and for a broken image."""
        if problem.videos:
            raise UserError(f"problem {problem.id!r} has a video, and --endpoint sends images alone")
        user = question_content(problem, suffix=self.template.suffix)
        system = "\n\n".join(filter(None, [self.template.system, str(problem.meta.get("system", ""))]))
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}]
        images = tuple(
            decode_image(data, where=f"problem {problem.id!r} image {number}", limits=TEST_LIMITS)
            for number, data in enumerate(problem.images)
        )
        question = problem.question + self.template.suffix
        shown = "\n\n".join(f"{role}: {text}" for role, text in (("system", system), ("user", question)) if text)
        return ServedPrompt(problem.id, shown, "", _NOTHING, _NOTHING, images, {}, messages=messages)


class ServedModel:
    """A model behind an endpoint, in the place of a vlm_rl.samplers.base.Sampler.

    Attributes:
        model: its name there.
        settings: what its answers depend on beside the sampling, as plain JSON.
    """

    name, dtype, policy_version = "endpoint", "not known", 0

    def __init__(
        self, url: str, *, model: str, key_env: str, extra: str, cache: Path, timeout: float, concurrency: int
    ) -> None:
        """Ask the server for its models.

        Args:
            url: of the server, up to and including /v1.
            model: the name; "" takes the only one that it has.
            key_env: the environment variable that holds the API key; "" sends none.
            extra: a JSON object whose entries every request gets; null takes one of ours out.
            cache: folder of replies that are not asked for again.
            timeout: seconds of a request.
            concurrency: requests at the same time.

        Raises UserError for an address, key or JSON that cannot be used, a server that does not answer, and a model
        that it does not have.
        """
        check_address(url, setting="--endpoint", key_setting="--endpoint-key-env")
        key = read_key(key_env, setting="--endpoint-key-env")
        endpoint = ChatEndpoint(url, key=key, called="the endpoint", timeouts=Timeouts(timeout))
        self.model = endpoint.model_named(model, setting="--endpoint-model")
        self._extra = _read_extra(extra)
        self.settings = {"endpoint": url, "endpoint_extra": self._extra}
        self._batch = BatchClient(
            endpoint, cache=cache, concurrency=concurrency, tokens_setting="--max-tokens", takes_cut=True
        )

    def generate(self, request: SampleRequest, *, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        """Return the responses to each prompt, which is a ServedPrompt. Raises UserError if one does not come."""
        del on_group
        count = request.params.responses
        asked = [(index, g) for index in range(len(request.prompts)) for g in range(count)]

        def body_of(place: tuple[int, int]) -> dict[str, Any]:
            index, g = place
            prompt = request.prompts[index]
            assert isinstance(prompt, ServedPrompt)
            return self._body(prompt, request.params, seed=request.seed_of(index, g))

        def apart_of(place: tuple[int, int]) -> str:
            return str(request.seed_of(*place)) if "seed" in self._extra else ""

        replies = self._batch.ask(asked, body_of=body_of, apart_of=apart_of)
        groups: list[list[Rollout]] = [[] for _ in request.prompts]
        for (index, g), reply in zip(asked, replies, strict=True):
            name = request.prompts[index].problem_id
            if reply.completion is None:
                raise UserError(
                    f"problem {name!r}: {reply.failure or 'no reply'}. What was answered before is kept: the same "
                    "command continues with the others"
                )
            groups[index].append(_rollout(name, g, reply.completion))
        return groups

    def close(self) -> None:
        """Ask no further."""
        self._batch.abort()

    def _body(self, prompt: ServedPrompt, params: SamplingParams, *, seed: int) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": seed % 2**31,  # equal requests are sent once: this tells several responses to a problem apart
        }
        return {key: value for key, value in (body | self._extra).items() if value is not None}


def evaluate_served(options: argparse.Namespace) -> RunDirectory:
    """Answer every set by the endpoint of `options` and write the results as `vlm-rl eval` does.

    Raises UserError before anything is written, for wrong options, sets, endpoint or results folder, and later for a
    request that failed; StoppedError after SIGTERM.
    """
    check_options(options)
    _check_options_of_endpoints(options)
    sets = open_sets(options, _ORIGIN)
    judge_model = open_judge_of(options, sets)
    for item in sets:
        check_boxes(item.problems, None, remedy="a set of boxes needs a reward, which --endpoint does not take")
    served = ServedModel(
        options.endpoint,
        model=options.endpoint_model,
        key_env=options.endpoint_key_env,
        extra=options.endpoint_extra,
        cache=options.out / ENDPOINT_CACHE,
        timeout=options.endpoint_timeout,
        concurrency=options.batch_size,
    )
    _refuse_another_model(options.out, served)
    paths = [str(path) for path in options.data]
    tree = {"model": {"path": served.model}, "data": {"train": paths, "eval": paths}, "eval": {"every": 0}}
    folder = results_folder(parse_config({"out": str(options.out), **tree}, where="eval"), contaminated=())
    num_problems = {item.name: len(item.problems) for item in sets}
    stopped = stopping(options.out, num_problems, step=_ORIGIN.step)
    with folder as results, Grader() as grader, stopped, closing(served):
        judging = {item.name: Judging(grader, item.how.mode, judge_model) for item in sets}
        asked = {item.name: _asking(item, options, served) for item in sets}
        settings = [_settings(item, options, served, asked[item.name], judging[item.name]) for item in sets]
        for item, of_set in unanswered(results, sets, settings, _ORIGIN):
            make_console().print(item.how.line(item.name))
            summary = answer_set(item, asked[item.name], judging[item.name], options, results, of_set)
            make_console().print(score_line(item.name, summary))
            for line in judge_lines(summary):
                make_console().print(line)
    make_console().print(f"records: {results.path / 'eval'}   page: vlm-rl report {results.path}")
    return results


def _asking(item: EvalSet, options: argparse.Namespace, served: ServedModel) -> Asking:
    builder = ServedBuilder(item.how.template, item.min_pixels, item.max_pixels)
    return Asking(
        builder, served, item.how.params, seed=options.seed, step=0, images=options.images, prompt=item.how.prompt
    )


def _settings(
    item: EvalSet, options: argparse.Namespace, served: ServedModel, asking: Asking, judging: Judging
) -> AnswerSettings:
    """Return everything that decides the answers, for the summary and for a resume."""
    how = item.how
    return {
        "model": served.model,
        **served.settings,
        "set": str(item.path),
        "images": options.images,
        "mode": how.mode,
        "template_words": asdict(how.prompt) if how.prompt else None,
        "judge_model": judging.judge_model.name if judging.judge_model else None,
    } | answer_settings(item.problems, asking, judging)


def _check_options_of_endpoints(options: argparse.Namespace) -> None:
    """Raise UserError for a limit of no time, and for what needs the model's own files or a process for each card."""
    given = {
        "--model": options.model is not None,
        "--environment": options.environment not in (None, "none"),
        "--reward": options.reward is not None,
        "--tensor-parallel": options.tensor_parallel > 1,
        "--sampler": options.sampler != "auto",
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(f"{name} is for a model of files, and --endpoint asks a served one: leave one of them out")
    if not 0 < options.endpoint_timeout < float("inf"):
        raise UserError(f"--endpoint-timeout is {options.endpoint_timeout:g}; it must be above 0 seconds")
    if world_size() > 1:
        raise UserError("--endpoint needs one process, which sends --batch-size requests at once: use no torchrun")


def _refuse_another_model(out: Path, served: ServedModel) -> None:
    """Raise UserError if `out` has results of a different model: pages show one model."""
    for result in RunDirectory(out).evals():
        theirs = result.summary.get("model"), result.summary.get("endpoint")
        if theirs != (served.model, served.settings["endpoint"]):
            raise UserError(f"{out} has results of {theirs[0]}; choose a different --out for {served.model}")


def _read_extra(text: str) -> dict[str, Any]:
    try:
        return read_object(text or "{}")
    except ValueError as error:
        example = '{"top_k": 20}'
        raise UserError(f"--endpoint-extra is {text:.100}: {error}; write an object such as '{example}'") from None


def _rollout(problem_id: str, g: int, completion: Completion) -> Rollout:
    text, tokens = completion.text, min(completion.completion_tokens, _MOST_TOKENS)
    if completion.reasoning:
        end = "" if completion.finish == "length" and not text else END_THINK
        text = f"{THINK}{completion.reasoning}{end}{text}"
    stop = "length" if completion.finish == "length" else "stop"
    return Rollout(problem_id, g, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), text, stop, 0)
