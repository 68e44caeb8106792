"""A training run's parts, built once: data, prompts, grader, policy, learner, sampler, source of rollouts.

vlm_rl.train holds the training loop and uses these parts. vlm_rl.session.run holds what a supervised run has as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType, TracebackType
from typing import Any

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.batch_advantages import RewardHistory
from vlm_rl.config import Config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import contaminated_sources, refuse_contaminated
from vlm_rl.devices import model_dtype
from vlm_rl.distributed import alive, from_main, rank, world_size
from vlm_rl.environments.host import EpisodeHost, open_host
from vlm_rl.grading.grader import GRADER_VERSION, Grader
from vlm_rl.hadw import Belief, first_belief
from vlm_rl.learner.architectures import check_routing
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.loading import check_a_prompt_fits, load_policy, prompts_to_check
from vlm_rl.learner.reference import BaseReference, Reference
from vlm_rl.learner.row_budget import RowBudget
from vlm_rl.model_files.fp8 import check_fp8
from vlm_rl.model_files.model_folder import check_context, check_divides
from vlm_rl.rewards.accuracy import BOX_REMEDY, AccuracyPart, check_boxes
from vlm_rl.rewards.reward import RewardFunction, open_accuracy
from vlm_rl.rollouts.collect import Collecting, TooManyUndecidedError
from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder
from vlm_rl.rollouts.sampling import GroupSampling, SourceState
from vlm_rl.rollouts.source import make_source
from vlm_rl.run.best import best_result
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.terminal import Stages
from vlm_rl.samplers.base import Sampler, SamplingParams
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.samplers.tags import settle_tags
from vlm_rl.samplers.vllm.options import check_media_limits
from vlm_rl.session.parts import engine_adapter, load_problems, load_reference, load_sampler, max_gap
from vlm_rl.session.recomputation import settled
from vlm_rl.session.recorder import Recorder
from vlm_rl.session.run import Run
from vlm_rl.session.speed import Speed
from vlm_rl.session.teacher import Teacher, load_teacher
from vlm_rl.session.weight_sync import WeightSync, other_setting
from vlm_rl.types import Problem


@dataclass(frozen=True, slots=True, eq=False)
class SessionState:
    """What a checkpoint holds besides weights and optimizer."""

    info: Mapping[str, Any]  # JSON, for its manifest
    source: SourceState


class Session:
    """The parts of one run. Use as a context manager: it closes engines and workers."""

    def __init__(
        self, config: Config, run: Run, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> None:
        """Build everything, cheap checks first; nothing is written before all of them have passed.

        Args:
            config: of the run.
            run: has its folder.
            functions: reward functions of this process, by the name behind cell: in their paths.

        Raises UserError for a mistake in configuration, data, model or run directory, and if another process
        writes into that directory.
        """
        stages = Stages()
        self.config, self.run, self._functions = config, run, functions
        self.algorithm = resolve_algorithm(config.algorithm)
        self.device = run.join_ranks()
        self._opened = ExitStack()
        with ExitStack() as recording, self._opened:  # close what they have if the start fails
            self.problems, self.eval_sets = self._load_sets(stages)
            self.grader = self._open_grader()
            self.builder, self.host = self._open_builder()
            self.reward = self._open_rewards()
            self.accuracy = self._open_accuracy()
            stages.done("checks", "prompts, rewards, golds")
            self.learner = self._load_learner(stages)
            self.reference, self.teacher = self._load_frozen()
            stages.done("learner", f"DeepSpeed, ZeRO {config.train.zero_stage}, ranks: {world_size()}")
            self.sampler = self._start_engine()
            stages.done("engine", self.sampler.name)
            self.rows = RowBudget(config, self.learner, self._note, run.keep_shorter_rows)
            self._sync = self._make_sync()
            self._build_rollouts()
            self._restore()
            run.start(contaminated_sources(self.problems))
            self.recorder = self._open_recorder(stages, recording)
            run.keep_checkpoints(self.learner, self.builder, self.recorder.save_lines(), best_step=self._best_step)
            run.listen(self.recorder.note)
            self.grader.start()
            self._opened = self._opened.pop_all()
            recording.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._opened.__exit__(kind, error, trace)
        finally:
            self.recorder.close(error)

    # -- building ------------------------------------------------------------------------------------

    def _load_sets(self, stages: Stages) -> tuple[list[Problem], dict[str, list[Problem]]]:
        """Load the training problems and the evaluation sets by name, and look for the checkpoint to resume from."""
        problems, eval_sets = load_problems(self.config)
        evaluated = sum(map(len, eval_sets.values()))
        stages.done("data", f"{len(problems):,} problems to train on, {evaluated:,} to evaluate on")
        self.run.find_checkpoint()
        for name, held_out in eval_sets.items():
            refuse_contaminated(name, held_out, self.run.contaminated)
        return problems, eval_sets

    def _open_grader(self) -> Grader:
        reward = self.config.reward
        grader = Grader(workers=reward.grader_workers, timeout=reward.grader_timeout, waits=alive)
        self._opened.callback(grader.close)
        return grader

    def _open_builder(self) -> tuple[PromptBuilder, EpisodeHost | None]:
        """Open the model's prompt builder and the environment. Refuse a model or prompts that this run cannot use."""
        config = self.config
        problems = [*self.problems, *chain.from_iterable(self.eval_sets.values())]
        builder = self.run.open_builder(problems)
        host = open_host(config.environment, builder, self.grader)
        if host is not None:
            self._opened.callback(host.close)
        observed = config.environment.max_images if host is not None else 0
        check_media_limits(config.rollout.vllm, problems, more_images=observed)
        check_divides(builder.config, config.rollout)
        check_fp8(builder.config, config.rollout, dtype=model_dtype(self.device, config.model.dtype))
        check_routing(builder.config, replay=config.rollout.replay_routing)
        self._build = builder.build if host is None else partial(host.build, seed=config.seed)
        check_a_prompt_fits(self._build, self.problems, config.data)
        return builder, host

    def _open_rewards(self) -> RewardFunction:
        config = self.config
        reward = RewardFunction(
            config.reward,
            template=self.builder.template,
            max_tokens=config.rollout.max_tokens,
            grader=self.grader,
            is_stopped=self.run.is_stopped,
            model_type=self.builder.config.model_type,
            judge_cache=self.run.directory.path / "judge_cache",
            functions=self._functions,
        )
        self._opened.callback(reward.close)
        reward.check_golds(self.problems)
        reward.check_names(config.algorithm.gdpo_weights, key="algorithm.gdpo_weights")
        return reward

    def _open_accuracy(self) -> AccuracyPart | None:
        """Open a second accuracy part, for the sets of data.eval. A stop cuts the reward's short, never this one."""
        if not self.config.eval.every:
            return None
        part = open_accuracy(
            self.config.reward,
            template=self.builder.template,
            model_type=self.builder.config.model_type,
            judge_cache=self.run.directory.path / "judge_cache",
            functions=self._functions,
        )
        if part is not None:
            self._opened.callback(part.close)
        for problems in self.eval_sets.values():
            check_boxes(problems, part, remedy=BOX_REMEDY)
        return part

    def _load_learner(self, stages: Stages) -> Learner:
        """Load the policy, compare it with the unmodified model, and put it into DeepSpeed."""
        config = self.config
        check_context(
            self.builder.config,
            prompt_tokens=config.data.max_prompt_tokens,
            response_tokens=config.response_tokens,
            settings="data.max_prompt_tokens + rollout.max_tokens (or eval.max_tokens)",
        )
        prompts = prompts_to_check(self._build, self.problems, config.data)
        distribution = {"banned_ids": self.builder.banned_ids, "temperature": config.rollout.temperature}
        decided = settled(config)
        self.policy, check = load_policy(self.run.model_path, decided, self.device, prompts, **distribution)
        self.speed = Speed(self.policy, decided)
        # The prompt with the most videos or, where none has any, the most images.
        self.probe_prompt = max(prompts, key=lambda prompt: (len(prompt.videos), len(prompt.images)))
        self.rounding = check.limit
        stages.done("model", f"{self.builder.config.model_type}, compared with the unmodified model")
        self.run.check_disk(self.policy, self.device)
        mini_batches = -(-config.rollout.prompts_per_step // config.train.mini_batch_prompts)
        return Learner(self.policy, config.train, total_optimizer_steps=config.train.steps * mini_batches)

    def _load_frozen(self) -> tuple[Reference | BaseReference | None, Teacher | None]:
        """Load the models that stay as they are: the reference of the KL term, and the teacher."""
        config, learner, builder = self.config, self.learner, self.builder
        reference = load_reference(config, learner, builder) if config.algorithm.kl_coef > 0 else None
        is_stopped = self.run.is_stopped
        return reference, load_teacher(config, learner, builder, is_stopped=is_stopped, note=self._note)

    def _start_engine(self) -> Sampler:
        self.give_card_to_sampler()
        sampler = load_sampler(
            self.config,
            self.run.model_path,
            builder=self.builder,
            learner=self.learner,
            is_stopped=self.run.is_stopped,
            note=lambda text: self.recorder.note(text),
        )
        self._opened.callback(sampler.close)
        return sampler

    def _make_sync(self) -> WeightSync:
        rollout = self.config.rollout
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            responses=rollout.responses_per_prompt,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        self.max_gap = max_gap(self.config, self.device)
        return WeightSync(
            self.learner,
            self.sampler,
            adapter_alone=engine_adapter(self.config) is not None,
            probe=self.probe_prompt,
            params=self.sampling,
            seed=self.config.seed,
            # The probe has few tokens, so its limit is at least a batch's.
            limit=max(self.rounding, self.max_gap),
        )

    def _build_rollouts(self) -> None:
        """Build the source of each step's groups, as at the beginning of a run."""
        config = self.config
        self.order, self.ledger = PromptOrder(len(self.problems), config.seed), Ledger()
        hadw = config.algorithm.hadw
        self.history = RewardHistory()
        self.belief = first_belief(variant=hadw.variant, threshold=hadw.threshold)
        parts = self.problems, self.builder, self.reward, self.order, self.ledger
        is_shown = rank() == 0 and not config.rollout.ahead  # sampling during an update is no phase
        show = (lambda text: self.recorder.inside(text)) if is_shown else None
        sampling = GroupSampling(config, self.sampling, *parts, self.host, show, self._note)
        self.source = make_source(sampling, self.sampler)
        self.collecting = Collecting(
            config, self.algorithm, self.source, self.ledger, note=lambda text: self.recorder.note(text)
        )

    def _open_recorder(self, stages: Stages, recording: ExitStack) -> Recorder:
        """Open the run's files, which `recording` closes, and write down how the start went."""
        recorder = Recorder(self.run, self.config)

        def close(_kind: Any, error: BaseException | None, _trace: Any) -> None:
            recorder.close(error)

        recording.push(close)
        for line in stages.lines:
            recorder.log_line(line)
        if self.builder.tags_note:
            recorder.note(self.builder.tags_note)
        return recorder

    def _note(self, text: str) -> None:
        self.recorder.note(f"step {self.step + 1}: {text}")

    def _restore(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.run.is_at_checkpoint:
            self.give_card_to_learner()
        if (checkpoint := self.run.restore(self.learner, self.order, self.ledger)) is not None:
            folder, state = checkpoint
            self.belief = Belief.restored(state["belief"])
            if "reward_history" in state:  # checkpoints of version 0.1 have none, nor a rule that needs it
                self.history = RewardHistory.restored(state["reward_history"])
            self.source.restore(folder, state)

    # -- saving and stopping -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return how many rollout steps are finished."""
        return self.run.step

    def state(self) -> SessionState:
        """Return all that a resume at this moment needs besides weights and optimizer."""
        contaminated, source = contaminated_sources(self.problems), self.source.state()
        info = self.run.info(self.learner, self.order, self.ledger, contaminated) | {
            "belief": asdict(self.belief),
            "reward_history": asdict(self.history),
            "algorithm": self.config.algorithm.name,
            "grader_version": GRADER_VERSION,
            **source.info,
        }
        return SessionState(info, source)

    def save_if_due(self) -> None:
        """Write a checkpoint where one is due (`Run.is_save_due`)."""
        if self.run.is_save_due:
            begun = time.perf_counter()
            self.save(self.state())
            self.recorder.add_metrics(self.step, {"timing/save": time.perf_counter() - begun})

    def save(self, state: SessionState) -> None:
        """Write a checkpoint of the current weights with this state (`CheckpointWriter.save`)."""
        self.run.save(state.info, add_files=state.source.files())

    def stop_if_asked(self, state: SessionState) -> None:
        """Save this state and raise StoppedError if any rank is asked to stop. See Run.stop_if_asked."""
        self.run.stop_if_asked(state.info["step"], lambda: self.save(state))

    def ask_to_stop(self, reason: ServersGoneError | TooManyUndecidedError) -> None:
        """Let the next `stop_if_asked` save and stop, and say why."""
        self.run.ask_to_stop(f"{reason}: stopped")

    @contextmanager
    def abandoning(self, before: SessionState) -> Iterator[None]:
        """Save a step's beginning and stop if servers are gone, or too many responses could not be judged.

        That must be raised before the step's first update, on all ranks.
        """
        try:
            yield
        except (ServersGoneError, TooManyUndecidedError) as error:
            self.ask_to_stop(error)
            self.stop_if_asked(before)
            raise

    def _best_step(self) -> int | None:
        """Return the saved step with the highest accuracy on the first set of data.eval."""
        if not self.eval_sets:
            return None
        saved = {step for step, _ in self.run.directory.checkpoints() if step <= self.step}  # later ones are damaged
        best = best_result(result for result in self._evaluations() if result.step in saved)
        return None if best is None else best.step

    def _evaluations(self) -> list[EvalResult]:
        """Return the evaluations on data.eval's first set up to this step; an earlier attempt may have later ones."""
        results = self.run.directory.evals(next(iter(self.eval_sets)))
        return [result for result in results if result.step <= self.step]

    def save_if_best(self) -> None:
        """Save a step whose evaluation is the best so far, unless it is saved already (checkpoint.keep_best)."""
        keeps = self.config.checkpoint.keep_best and self.eval_sets and self.step
        if keeps and not self.run.is_saved and from_main(self._is_best):
            self.save(self.state())

    def _is_best(self) -> bool:
        best = best_result(self._evaluations())
        return best is not None and best.step == self.step

    # -- what a step asks of the session -------------------------------------------------------------

    def end_step(self) -> None:
        """Count a step whose new weights the sampler has."""
        self.run.step += 1

    def give_card_to_sampler(self) -> None:
        """Make room for an engine that is about to start or wake, if rollout.offload_optimizer asks for it."""
        if self.config.rollout.offload_optimizer:
            self.learner.offload_optimizer()

    def give_card_to_learner(self) -> None:
        """Let the sampler's engine sleep, then bring back what was moved for it. The next sync wakes the engine."""
        self.sampler.sleep()
        if self.config.rollout.offload_optimizer:
            self.learner.reload_optimizer()

    def sync_weights(self) -> None:
        """Stream the policy's weights into the sampler, whose engine wakes.

        Raises StaleWeightsError unless exactly these arrived, and the sampler computes what the learner computes.
        If no rollout server is left, the run is asked to stop: the caller can still finish its step and save.
        """
        self.give_card_to_sampler()
        try:
            self.weights = self._sync()
        except ServersGoneError as error:
            self.ask_to_stop(error)

    def settle_tags(self) -> None:
        """Spell the template's tags as the model knows them, by what it answers; a checkpoint has settled that."""
        try:
            line = settle_tags(self.builder, self.sampler, context=self.config.context_tokens, seed=self.config.seed)
        except ServersGoneError as error:
            self.ask_to_stop(error)
        else:
            if line:
                self.recorder.note(line)

    @property
    def other_setting(self) -> str:
        """Return the setting to compare with if sampler and learner disagree."""
        return other_setting(self.sampler)

    def counters(self) -> dict[str, float]:
        """Return the run's totals so far, as metrics."""
        belief = {} if self.belief.ability is None else {"hadw/belief": self.belief.ability}
        skipped = float(self.learner.guard.num_skipped)
        return {"epoch": self.order.epoch, "steps/skipped": skipped, **dict(self.ledger.metrics()), **belief}
