"""A training run's parts, built once: data, prompts, grader, policy, learner, sampler, run directory.

vlm_rl.train holds the training loop and uses these parts. This module builds, saves, restores and stops them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config
from vlm_rl.data.order import Ledger, PromptOrder
from vlm_rl.data.sets import contaminated_sources, set_digests
from vlm_rl.distributed import all_gather, from_main, init_ranks, rank, world_size
from vlm_rl.errors import StoppedError
from vlm_rl.grading.grader import GRADER_VERSION, Grader
from vlm_rl.hadw import Belief, first_belief
from vlm_rl.learner.architectures import check_architecture, check_parts, check_routing
from vlm_rl.learner.checkpoint_size import disk_room
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.loading import check_a_prompt_fits, load_policy, make_prompt_builder, prompts_to_check
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.quantization import check_quantization
from vlm_rl.learner.saving import (
    CheckpointWriter,
    ResumePoint,
    checkpoint_to_resume,
    restore_learner,
    where_it_resumes,
)
from vlm_rl.model_files.model_folder import check_base_weights, check_context, check_divides
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.rollouts.collect import Collecting
from vlm_rl.rollouts.sampling import GroupSampling, SourceState
from vlm_rl.rollouts.source import make_source
from vlm_rl.run.configurations import check_alike, keep_changes
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.interrupts import Interrupts
from vlm_rl.run.lock import RunLock
from vlm_rl.run.terminal import Stages, resume_command
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.session.parts import engine_adapter, load_problems, load_reference, load_sampler, max_gap
from vlm_rl.session.preflight import check_resumable
from vlm_rl.session.recorder import Recorder
from vlm_rl.session.weight_sync import WeightSync, other_setting


@dataclass(frozen=True, slots=True, eq=False)
class SessionState:
    """What a checkpoint holds besides weights and optimizer."""

    info: Mapping[str, Any]  # JSON, for its manifest
    source: SourceState


class Session:
    """The parts of one run. Use as a context manager: it closes engines and workers."""

    def __init__(self, config: Config, *, lock: RunLock, resume: bool = False) -> None:
        """Build everything, cheap checks first; nothing is written before all of them have passed.

        Rank 0 acquires the lock of the run directory; the caller releases it. Raises UserError for a mistake in
        configuration, data, model or run directory, and where another process writes into that directory.
        """
        stages = Stages()
        self.config = config
        self.stop_requested, self.stop_reason = False, "stopped by SIGTERM"
        self.interrupts = Interrupts()
        self.algorithm = resolve_algorithm(config.algorithm)
        check_quantization(config.model)
        self.device = init_ranks()
        check_alike(all_gather(config))
        self.problems, self.eval_sets = load_problems(config)
        evaluated = sum(map(len, self.eval_sets.values()))
        stages.done("data", f"{len(self.problems):,} problems to train on, {evaluated:,} to evaluate on")
        self.run = RunDirectory(config.out)
        self.lock = lock
        # Rank 0 looks and tells the others: a shared file system may show them the files later.
        # A run that exists already is refused here, before the model is loaded, which may take minutes.
        checkpoint = from_main(lambda: self._checkpoint() if resume else self.run.refuse_existing())
        model_path = Path(config.model.path)
        if checkpoint and config.model.lora is None:  # otherwise it holds the adapters alone
            model_path = checkpoint[0]

        self.builder = make_prompt_builder(config.data, model_path)
        self.builder.allow_videos([*self.problems, *chain.from_iterable(self.eval_sets.values())])
        if checkpoint and config.model.lora is not None:
            from_main(lambda: check_base_weights(checkpoint[0], model_path))
        check_architecture(
            self.builder.config,
            path=model_path,
            rows=config.model.rows,
        )
        check_divides(self.builder.config, config.rollout)
        check_parts(self.builder.config, config.model, lr_by_part=config.train.lr_by_part)
        check_routing(self.builder.config, replay=config.rollout.replay_routing)
        check_a_prompt_fits(self.builder, self.problems, config.data)
        self.grader = Grader(workers=config.reward.grader_workers, timeout=config.reward.grader_timeout)
        self.reward = RewardFunction(
            config.reward,
            template=self.builder.template,
            max_tokens=config.rollout.max_tokens,
            grader=self.grader,
            is_stopped=self._is_stopped,
            model_type=self.builder.config.model_type,
            judge_cache=self.run.path / "judge_cache",
        )
        self.reward.check_golds(self.problems)
        stages.done("checks", "prompts, rewards, golds")
        self.policy = self._load_policy(model_path)
        stages.done("model", f"{self.builder.config.model_type}, compared with the unmodified model")
        room = from_main(lambda: disk_room(config, self.policy, on_gpu=self.device.type == "cuda"))
        self.learner = self._make_learner()
        wants_reference = config.algorithm.kl_coef > 0
        self.reference = load_reference(config, self.learner, self.builder) if wants_reference else None
        stages.done("learner", f"DeepSpeed, ZeRO {config.train.zero_stage}, ranks: {world_size()}")
        self.give_card_to_sampler()
        self.sampler = load_sampler(
            config,
            model_path,
            builder=self.builder,
            learner=self.learner,
            is_stopped=self._is_stopped,
            note=lambda text: self.recorder.note(text),
        )
        stages.done("engine", self.sampler.name)
        self.sampling = SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            responses=config.rollout.responses_per_prompt,
        )

        self.max_gap = max_gap(config, self.device)
        self._sync = WeightSync(
            self.learner,
            self.sampler,
            adapter_alone=engine_adapter(config) is not None,
            probe=self.probe_prompt,
            params=self.sampling,
            seed=config.seed,
            # A few tokens: never below what is accepted of a whole batch.
            limit=max(self.rounding, self.max_gap),
        )
        self.step = 0  # rollout steps finished
        self.saved_step: int | None = None  # the last one that this process has saved, or begun with
        self.order = PromptOrder(len(self.problems), config.seed)
        self.ledger = Ledger()
        hadw = config.algorithm.hadw
        self.belief = first_belief(variant=hadw.variant, threshold=hadw.threshold)
        self.source = make_source(
            GroupSampling(config, self.sampling, self.problems, self.builder, self.reward, self.order, self.ledger),
            self.sampler,
        )
        self.collecting = Collecting(
            config, self.algorithm, self.source, self.ledger, note=lambda text: self.recorder.note(text)
        )
        if checkpoint:
            self._restore(*checkpoint)

        self.recorder = self._start_run(resume, stages)
        if resume:
            for line in from_main(lambda: keep_changes(self.run, self.config)):
                self.recorder.note(line)
            self.recorder.note(where_it_resumes(self.run, checkpoint, self.config.train.steps))
        for line in room.lines():
            self.recorder.note(line)
        self.checkpoints = CheckpointWriter(
            self.run.path / "checkpoints",
            self.learner,
            self.builder,
            config.checkpoint,
            lock=lock,
            best_step=self._best_step,
            size=room.size,
            lines=self.recorder.save_lines(),
        )
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.interrupts.listen()
        self.grader.start()

    def _checkpoint(self) -> ResumePoint | None:
        check_resumable(self.run, self.config)
        return checkpoint_to_resume(self.run, self.lock, self.config.data.train)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sampler.close()
        self.grader.close()
        self.reward.close()
        self.recorder.close(error)

    # -- building ------------------------------------------------------------------------------------

    def _load_policy(self, path: Path) -> Policy:
        check_context(
            self.builder.config,
            prompt_tokens=self.config.data.max_prompt_tokens,
            response_tokens=self.config.response_tokens,
            settings="data.max_prompt_tokens + rollout.max_tokens (or eval.max_tokens)",
        )
        prompts = prompts_to_check(self.builder, self.problems, self.config.data)
        distribution = {"banned_ids": self.builder.banned_ids, "temperature": self.config.rollout.temperature}
        policy, check = load_policy(path, self.config, self.device, prompts, **distribution)
        # Of all of them: with a video, or else an image.
        self.probe_prompt = max(prompts, key=lambda prompt: (len(prompt.videos), len(prompt.images)))
        self.rounding = check.limit
        return policy

    def _make_learner(self) -> Learner:
        mini_batches = -(-self.config.rollout.prompts_per_step // self.config.train.mini_batch_prompts)
        return Learner(self.policy, self.config.train, total_optimizer_steps=self.config.train.steps * mini_batches)

    # -- the run directory ---------------------------------------------------------------------------

    def _start_run(self, resume: bool, stages: Stages) -> Recorder:
        from_main(self.run.remove_leftovers if resume else self._create_run)
        attempts = [int(record["attempt"]) for record in self.run.metrics()]
        if rank() == 0 and (contaminated := contaminated_sources(self.problems)):
            self.run.stamp_contaminated(contaminated)
        recorder = Recorder(self.run, self.config, attempt=1 + max(attempts, default=0), start=self.step)
        for line in stages.lines:
            recorder.log_line(line)
        return recorder

    def _create_run(self) -> None:
        self.run.create(self.config)
        self.lock.acquire()

    # -- saving and restoring ------------------------------------------------------------------------

    def state(self) -> SessionState:
        """Return all that a resume at this moment needs besides weights and optimizer."""
        source = self.source.state()
        info = {
            "step": self.step,
            "cursor": self.order.cursor,
            "ledger": self.ledger.state(),
            "belief": asdict(self.belief),
            "learner": self.learner.state(),
            "world_size": world_size(),
            "seed": self.config.seed,
            "config_sha256": sha256(self.config.model_dump_json().encode()).hexdigest(),
            "algorithm": self.config.algorithm.name,
            "data": set_digests(self.config.data.train),
            "grader_version": GRADER_VERSION,
            "contaminated": contaminated_sources(self.problems),
            **source.info,
        }
        return SessionState(info, source)

    def _restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.give_card_to_learner()
        restore_learner(self.learner, folder, state)
        self.step = self.saved_step = state["step"]
        self.order.cursor = state["cursor"]
        self.ledger.restore(state["ledger"])
        self.belief = Belief.restored(state["belief"])
        self.source.restore(folder, state)

    def save_if_due(self) -> None:
        """Write a checkpoint every checkpoint.every steps and after the last one."""
        if self.step % self.config.checkpoint.every == 0 or self.step == self.config.train.steps:
            begun = time.perf_counter()
            self.save(self.state())
            self.recorder.add_metrics(self.step, {"timing/save": time.perf_counter() - begun})

    def save(self, state: SessionState) -> None:
        """Write a checkpoint of the current weights with this state (`CheckpointWriter.save`)."""
        self.checkpoints.save(state.info, add_files=self.source.files(state.source))
        self.saved_step = state.info["step"]

    def _best_step(self) -> int | None:
        """Return the saved step with the highest accuracy on the first set of data.eval, the latest of equals."""
        if not self.eval_sets:
            return None
        saved = {step for step, _ in self.run.checkpoints() if step <= self.step}  # later ones are damaged
        results = [result for result in self.run.evals(next(iter(self.eval_sets))) if result.step in saved]
        return max(results, key=lambda r: (r.summary["accuracy"], r.step)).step if results else None

    # -- what a step asks of the session -------------------------------------------------------------

    def end_step(self) -> None:
        """Count a step, whose update the sampler has been given."""
        self.source.end_step(self.step)
        self.step += 1

    def give_card_to_sampler(self) -> None:
        """Make room for an engine that is about to start or wake, if rollout.offload_optimizer asks for it."""
        if self.config.rollout.offload_optimizer:
            self.learner.offload_optimizer()

    def give_card_to_learner(self) -> None:
        """Let the sampler's engine sleep, then bring back what made room for it. The next sync wakes the engine."""
        self.sampler.sleep()
        if self.config.rollout.offload_optimizer:
            self.learner.reload_optimizer()

    def sync_weights(self) -> None:
        """Stream the policy's weights into the sampler, whose engine wakes.

        Raises StaleWeightsError unless exactly these arrived, and the sampler computes what the learner computes.
        Where no rollout server is left, the run is asked to stop, so that the caller can finish its step and save.
        """
        self.give_card_to_sampler()
        try:
            self.weights = self._sync()
        except ServersGoneError as error:
            self.ask_to_stop(error)

    def ask_to_stop(self, reason: ServersGoneError) -> None:
        """Let the next `stop_if_asked` save and stop, and say why."""
        self.stop_reason, self.stop_requested = f"{reason}: stopped", True

    @property
    def other_setting(self) -> str:
        """Return the setting to compare with where sampler and learner disagree."""
        return other_setting(self.sampler)

    def counters(self) -> dict[str, float]:
        """Return the run's totals so far, as metrics."""
        belief = {} if self.belief.ability is None else {"hadw/belief": self.belief.ability}
        skipped = float(self.learner.guard.num_skipped)
        return {"epoch": self.order.epoch, "steps/skipped": skipped, **dict(self.ledger.metrics()), **belief}

    def stop_if_asked(self, state: SessionState) -> None:
        """Save this state, unless its step is saved already, and raise StoppedError if any rank received SIGTERM.

        Otherwise commit an asynchronous save that all ranks have written. Raises UserError where another machine has
        taken the run directory over, and KeyboardInterrupt after Ctrl-C.
        """
        self.interrupts.check()
        from_main(self.lock.check)
        stops = any(all_gather(self.stop_requested))
        self.checkpoints.finish(wait=stops)
        if not stops:
            return
        if state.info["step"] != self.saved_step:  # a folder of this step may be a damaged one that was passed over
            self.save(state)
            self.checkpoints.finish()
        if rank() == 0:
            command = resume_command(self.run.path)
            print(f"{self.stop_reason} after step {state.info['step']}; resume with: {command}", flush=True)
        raise StoppedError

    def _is_stopped(self) -> bool:
        """Tell whether what waits should give up."""
        return self.stop_requested or self.interrupts.noted

    def _on_sigterm(self, *_: object) -> None:
        self.stop_requested = True
