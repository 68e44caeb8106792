"""The environments of a run: opened, kept within their limits, and their answers turned into token ids.

    host = EpisodeHost(config.environment, builder, grade=grade)
    prompts = [host.build(problem, seed=0) for problem in problems]
    request = SampleRequest(prompts, params, seed=0, step=0, episodes=host.episodes(problems, seed=0, step=0))

Whatever an environment does, an episode gets an answer: what it raises, an image that cannot be shown, a text that is
too long or an answer that is too late become an observation that says so, and count as errors. What it shows before
the first turn is a part of the prompt, and a problem for which that fails has no prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlm_rl.config import EnvironmentConfig
from vlm_rl.data.prompts import PromptBuilder, StartError
from vlm_rl.data.turns import TurnError, TurnWriter
from vlm_rl.distributed import alive
from vlm_rl.environments.environment import (
    Done,
    Environment,
    EnvironmentSetup,
    Observation,
    StartDiffersError,
    digest_of,
)
from vlm_rl.environments.own import OwnEnvironments
from vlm_rl.environments.registry import ENVIRONMENTS
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.run.cores import allowed_cores
from vlm_rl.samplers.base import TurnAnswer, response_seed
from vlm_rl.types import EpisodeStart, Problem, Prompt

_LONGEST_ERROR = 300  # characters
_MOST_THREADS = 32  # for quick answers: as many as asyncio keeps, so that none waits there
_WAIT_SECONDS = 1.0  # between two signs of life while a reset is waited for
_CHARACTERS = 16  # of a token: more are not encoded to find out that they are too many


class EpisodeHost:
    """Opens an environment for each response, and answers in a thread of its own.

    Attribute `instructions`: what the system's message says about the environment.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        builder: PromptBuilder,
        *,
        grade: Callable[[Problem, str], bool],
    ) -> None:
        """Open the environment once, to see that it can be. The builder's prompts then have its instructions.

        Args:
            config: the section environment, with a name.
            builder: the prompt builder of the model.
            grade: whether a text, with the prompt's prefill, answers a problem rightly.

        Raises UserError for options that it does not have, a class that cannot be imported, a machine without the
        sandbox that it needs, and a chat template without a place for its answers.
        """
        assert config.name is not None
        self.config, self._builder = config, builder
        self.writer = TurnWriter(builder, min_pixels=config.min_pixels, max_pixels=config.max_pixels)
        self._own: OwnEnvironments | None = None
        self._setup = EnvironmentSetup(
            config.options,
            calls=self.writer.calls,
            model_type=builder.config.model_type,
            workers=config.workers,
            timeout=config.timeout,
            max_turns=config.max_turns,
            grade=lambda problem, text: grade(problem, builder.prefill + text),
            shown=lambda problem: [],
        )
        if config.is_own:
            assert config.allow_class, config.name  # as the configuration has checked
            self._own = OwnEnvironments(config.name, config.options, timeout=config.timeout, workers=config.workers)
            self.instructions = self._own.instructions
        else:
            factory, options = ENVIRONMENTS[config.name]
            self._setup.check_options(options)
            self.instructions = factory(self._setup).instructions
        if config.instructions is not None:
            self.instructions = config.instructions
        builder.instructions = self.instructions
        # Waiting for a place is not waiting for an answer.
        self.places = asyncio.Semaphore(config.workers)
        self.quick_places = asyncio.Semaphore(min(_MOST_THREADS, allowed_cores()))
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="environments"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings that an evaluation's numbers depend on, as plain JSON."""
        return self.config.model_dump(exclude={"allow_class", "workers"})

    def build(self, problem: Problem, *, seed: int, asked_as: Problem | None = None) -> Prompt:
        """Return the prompt of a problem, with what the environment shows before the first turn.

        Args:
            problem: what the environment is reset with.
            seed: of the run, as it is given to `episodes`.
            asked_as: the problem in other words, as the model reads it; None: as it is.

        Raises:
            UserError: as PromptBuilder.build does.
            StartError: its reset fails or is late, or what it shows cannot be shown or is too much for an episode.
        """
        config = self.config
        try:
            start = self._start(problem, seed)
            prompt = self._builder.build(asked_as or problem, start=start)
            if prompt.start_tokens > config.max_observed_tokens:
                raise StartError(
                    f"shows {prompt.start_tokens} tokens, more than environment.max_observed_tokens "
                    f"({config.max_observed_tokens})"
                )
        except StartError as error:
            raise StartError(f"environment {config.name}: reset of problem {problem.id!r} {error}") from None
        return prompt

    def _start(self, problem: Problem, seed: int) -> EpisodeStart | None:
        """Return the observation before the first turn, if any. Raises StartError, whose message ends a sentence."""
        config = self.config
        asked = self.run(self._reset(problem, start_seed(seed, problem)))
        while wait_for([asked], timeout=_WAIT_SECONDS).not_done:
            alive()
        try:
            shown: Observation | None = asked.result()
            if not (digest := digest_of(shown)) or shown is None:
                return None
            if shown.error:
                raise StartError(f"failed: {written(shown.error)}"[:_LONGEST_ERROR])
            if len(shown.images) > config.max_images:
                raise StartError(
                    f"shows {len(shown.images)} images, more than environment.max_images ({config.max_images})"
                )
            if len(shown.text) > _CHARACTERS * config.max_observed_tokens:
                raise StartError(
                    f"shows {len(shown.text):,} characters, more than environment.max_observed_tokens "
                    f"({config.max_observed_tokens}) can be"
                )
            return EpisodeStart(written(shown.text), self.writer.fit(shown.images).packed, digest)
        except (StartError, TurnError) as error:
            raise StartError(str(error)) from None
        except TimeoutError:
            raise StartError(f"failed: no answer within {config.timeout:g} s") from None
        except Exception as error:
            kind = "" if self._own is not None else f"{type(error).__name__}: "  # an own class's is in the message
            raise StartError(f"failed: {kind}{written(str(error))}"[:_LONGEST_ERROR]) from None

    async def _reset(self, problem: Problem, seed: int) -> Observation | None:
        if self._own is not None:
            return await self._own.start(problem, seed)  # it has a limit in its own process
        factory, _ = ENVIRONMENTS[str(self.config.name)]
        async with asyncio.timeout(self.config.timeout):
            return await factory(self._setup).reset(problem, seed)

    def episodes(self, problems: Sequence[Problem], *, seed: int, step: int) -> HostedEpisodes:
        """Return the episodes of one request, whose prompts are those of these problems, in order."""
        return HostedEpisodes(self, problems, seed=seed, step=step)

    def close(self) -> None:
        """End the thread, and the processes of the environment."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._own is not None:
            self._own.close()
        for resource in self._setup.resources.values():
            resource.close()

    def make(self, prompt: Prompt, *, number: int, key: str) -> Environment:
        """Return the environment of one episode."""
        if self._own is not None:
            return self._own.open(number, key, prompt.start.digest if prompt.start is not None else "")
        sizes = [image.size for image in prompt.images]
        factory, _ = ENVIRONMENTS[str(self.config.name)]
        return factory(replace(self._setup, shown=lambda problem: sizes))

    def run(self, work: Any) -> Future[Any]:
        """Run a coroutine in the thread of the environments."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class HostedEpisodes:
    """The episodes of one request; see vlm_rl.samplers.base.Episodes."""

    def __init__(self, host: EpisodeHost, problems: Sequence[Problem], *, seed: int, step: int) -> None:
        self.max_turns = host.config.max_turns
        self._host, self._problems, self._seed, self._step = host, problems, seed, step

    def open(self, index: int, g: int, prompt: Prompt) -> HostedEpisode:
        """Begin the episode of response g to a prompt."""
        key = f"{self._seed}/{self._step}/{prompt.epoch}/{prompt.problem_id}/{g}"
        environment = self._host.make(prompt, number=index + g, key=key)
        problem, start = self._problems[index], prompt.start
        if start is None:
            seed = response_seed(self._seed, self._step, prompt, g, sampled=-1)  # no turn has this one
            return HostedEpisode(self._host, environment, problem, seed)
        seed, used = start_seed(self._seed, problem), (prompt.start_tokens, len(start.images))
        return HostedEpisode(self._host, environment, problem, seed, start.digest, False, *used)


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """One episode. Its turns are answered one after the other."""

    host: EpisodeHost
    environment: Environment
    problem: Problem
    seed: int
    start: str = ""  # the digest of what reset must return
    has_begun: bool = False
    num_observed: int = 0  # tokens
    num_images: int = 0

    @property
    def is_quick(self) -> bool:
        """See vlm_rl.samplers.base.Episode."""
        return bool(getattr(self.environment, "is_quick", False))

    def answer(self, text: str, ids: np.ndarray) -> Future[TurnAnswer]:
        """Answer a turn; see vlm_rl.samplers.base.Episode."""
        return self.host.run(self._answer(text, ids))

    async def _answer(self, text: str, ids: np.ndarray) -> TurnAnswer:
        reply = await self._step(text)
        if isinstance(reply, Done):
            return written(reply.reason)
        try:
            answer = await self._written(cleaned(reply), ids)
        except Exception as error:
            answer = await self._written(failed(f"{type(error).__name__}: {error}"), ids)
        if answer is None:
            answer = await self._written(failed("the response is too long to be shown"), ids)
        return answer or "observed_tokens"

    async def _step(self, text: str) -> Observation | Done:
        """Return the environment's answer, or an observation that says why it gave none."""
        host, timeout = self.host, self.host.config.timeout
        try:
            # An own class has a limit in its own process, which begins once it is its turn there.
            if host.config.is_own:
                return await self._stepped(text)
            async with host.quick_places if self.is_quick else host.places, asyncio.timeout(timeout):
                return await self._stepped(text)
        except StartDiffersError:
            raise StartDiffersError(
                f"environment {host.config.name}: reset of problem {self.problem.id!r} shows something else for a "
                "response than in the prompt that it shares: reset must be a function of problem and seed, and show "
                "something for every seed or for none"
            ) from None
        except TimeoutError as error:
            return failed(str(error) or f"no answer within {timeout:g} s")
        except Exception as error:
            return failed(f"{type(error).__name__}: {error}"[:300])

    async def _stepped(self, text: str) -> Observation | Done:
        if not self.has_begun:
            shown = await self.environment.reset(self.problem, self.seed)
            is_compared_elsewhere = self.host.config.is_own  # where the class runs
            if not is_compared_elsewhere and digest_of(shown) != self.start:
                raise StartDiffersError
            self.has_begun = True
        return await self.environment.step(text)

    async def _written(self, observation: Observation, ids: np.ndarray) -> TurnAnswer | None:
        """Return an observation with its tokens; None if they are more than are left.

        Images are decoded, fitted and packed in threads, and the tokenizer is used in this one alone.
        """
        config, writer = self.host.config, self.host.writer
        left = config.max_observed_tokens - self.num_observed
        if observation.images and self.num_images + len(observation.images) > config.max_images:
            observation = failed(f"no more than {config.max_images} images are shown")
        if len(observation.text) > _CHARACTERS * left:
            return None
        try:
            shown = await asyncio.to_thread(writer.fit, observation.images)
            observed = writer.encode(observation.text, shown, after=ids)
        except TurnError as error:
            observation, shown = failed(f"the response {error}"), writer.fit(())
            observed = writer.encode(observation.text, shown, after=ids)
        if len(observed.ids) > left:
            return None
        self.num_observed += len(observed.ids)
        self.num_images += len(observed.images)
        # What the environment gave may be large, as a crop of a photograph is: the model's own pixels are kept.
        return replace(observation, images=observed.images), observed, shown.images


def open_host(config: EnvironmentConfig, builder: PromptBuilder, grader: Grader) -> EpisodeHost | None:
    """Return the host of a run's environment, None if it has none. Raises UserError as EpisodeHost does."""
    if config.name is None:
        return None

    def grade(problem: Problem, text: str) -> bool:
        return grader.grade_many([task_of(problem, text, builder.template)])[0].correct

    return EpisodeHost(config, builder, grade=grade)


def start_seed(seed: int, problem: Problem) -> int:
    """Return the seed of what is shown before the first turn: of a run's seed and a problem, whenever it is taken."""
    key = json.dumps([seed, problem.id]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def failed(why: str) -> Observation:
    """Return the observation that tells the policy why there is no other."""
    return Observation(f"Error: {written(why)}"[:_LONGEST_ERROR], error=written(why)[:_LONGEST_ERROR])


def cleaned(observation: Observation) -> Observation:
    """Return an observation whose texts can be encoded and stored, whatever is in them."""
    texts = {name: written(getattr(observation, name)) for name in ("text", "error", "tool")}
    return replace(observation, **texts)


def written(text: str) -> str:
    """Return the text with a question mark for each half of a character, which JSON may hold and no file may."""
    return text.encode(errors="replace").decode()
