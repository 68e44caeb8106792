"""`vlm-rl sft CONFIG`: supervised fine-tuning on prepared sets whose rows hold a response.

    responses -> batches, in the order of (seed, epoch) -> optimizer steps -> checkpoints that training starts from

Its folder holds sft.yaml, metrics.jsonl and checkpoints/. The policy is the model as it is: no id is banned and the
temperature is 1, so that the loss is transformers' own for labels on the response.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any

from vlm_rl.config import SftConfig
from vlm_rl.data.order import Ledger, PromptOrder
from vlm_rl.data.prompts import PromptCache
from vlm_rl.data.sets import contaminated_sources, load_training_sets, set_digests
from vlm_rl.distributed import all_gather, from_main, gather_shares, init_ranks, rank, share, world_size
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.learner.architectures import check_architecture, check_parts
from vlm_rl.learner.checkpoint_size import disk_room
from vlm_rl.learner.learner import Learner, UpdateResult
from vlm_rl.learner.loading import load_policy, make_prompt_builder, prompts_to_check
from vlm_rl.learner.quantization import check_quantization
from vlm_rl.learner.save_progress import SaveLines
from vlm_rl.learner.saving import (
    CheckpointWriter,
    ResumePoint,
    checkpoint_to_resume,
    restore_learner,
    where_it_resumes,
)
from vlm_rl.learner.sft import Example, take_step
from vlm_rl.model_files.model_folder import check_base_weights, check_context
from vlm_rl.run.configurations import check_alike, check_unchanged, keep_changes
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.lock import RunLock
from vlm_rl.run.terminal import make_console, progress, resume_command
from vlm_rl.run.tracking import Tracking
from vlm_rl.types import Problem


def sft(config: SftConfig, *, resume: bool = False) -> None:
    """Train until config.train.steps optimizer steps are done.

    Raises:
        UserError: for a mistake in configuration, data or model, before anything is written.
        StoppedError: after SIGTERM, once the state is saved; exits with errors.EXIT_STOPPED.
        NonFiniteError: where a weight is NaN or infinite when a checkpoint is due; none is written.
    """
    with RunLock(Path(config.out)) as lock:
        run = _SftRun(config, lock=lock, resume=resume)
        left = config.train.steps - run.step
        try:
            with run.checkpoints, progress("sft", total=max(left, 0), console=run.console) as advance:
                run.show_save = lambda text: advance(0, note=text or " ")
                while run.step < config.train.steps:
                    loss = run.train_step()
                    advance(note=f"loss {loss:.3f}")
        finally:
            for line in run.tracking.close() if run.tracking else ():
                run.say(line)


def examples_of(problems: list[Problem]) -> list[Example]:
    """Return the problems with their responses. Raises UserError for one without."""
    for problem in problems:
        if "response" not in problem.meta:
            raise UserError(
                f"problem {problem.id!r} has no response to learn: prepare its set again and name the column with "
                "vlm-rl prepare PATH --response COLUMN"
            )
    return [Example(problem, problem.meta["response"]) for problem in problems]


class _SftRun:
    """The parts of one run, built once, cheap checks first; nothing is written before all of them have passed."""

    def __init__(self, config: SftConfig, *, lock: RunLock, resume: bool) -> None:
        self.config = config
        self.console = make_console()
        check_quantization(config.model)
        self.device = init_ranks()
        check_alike(all_gather(config))
        problems = load_training_sets(config.data)
        self.examples = examples_of(problems)
        self.contaminated = contaminated_sources(problems)
        self.run = RunDirectory(config.out, config_file=SFT_CONFIG)
        self.lock = lock
        checkpoint = from_main(self._checkpoint if resume else self.run.refuse_existing)
        model_path = Path(config.model.path)
        if checkpoint and config.model.lora is None:  # otherwise it holds the adapters alone
            model_path = checkpoint[0]
        self.builder = make_prompt_builder(config.data, model_path)
        self.builder.allow_videos(problems)
        if checkpoint and config.model.lora is not None:
            from_main(lambda: check_base_weights(checkpoint[0], model_path))
        self._check_model(model_path)
        self._check_responses()
        self._check_that_one_fits()
        prompts = prompts_to_check(self.builder, problems, config.data)
        policy, _ = load_policy(model_path, config, self.device, prompts, banned_ids=(), temperature=1.0)
        room = from_main(lambda: disk_room(config, policy, on_gpu=self.device.type == "cuda"))
        self.learner = Learner(policy, config.train, total_optimizer_steps=config.train.steps)
        self.show_save: Callable[[str], None] = lambda _: None
        self.checkpoints = CheckpointWriter(
            self.run.path / "checkpoints",
            self.learner,
            self.builder,
            config.checkpoint,
            lock=lock,
            size=room.size,
            lines=self._save_lines(),
        )

        self.step = 0
        self.order = PromptOrder(len(problems), config.seed)
        self.ledger = Ledger()
        if checkpoint:
            self._restore(*checkpoint)
        self._start(resume)
        if resume:
            for line in from_main(lambda: keep_changes(self.run, self.config)):
                self.say(line)
            self.say(where_it_resumes(self.run, checkpoint, self.config.train.steps))
        for line in room.lines():
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(text, soft_wrap=True)

    def _save_lines(self) -> SaveLines:
        """Announce saves: a log gets a line when one begins and ends, the bar of a terminal the bytes meanwhile."""
        if self.console.is_terminal:
            return SaveLines(lambda _: None, self.say, show=lambda text: self.show_save(text))
        return SaveLines(self.say, self.say)

    def _checkpoint(self) -> ResumePoint | None:
        check_unchanged(self.run.path, self.run.open().any_config(), self.config)
        return checkpoint_to_resume(self.run, self.lock, self.config.data.train)

    def _check_model(self, path: Path) -> None:
        config = self.config
        check_architecture(self.builder.config, path=path, rows=config.model.rows)
        check_parts(self.builder.config, config.model, lr_by_part=config.train.lr_by_part)
        check_context(
            self.builder.config,
            prompt_tokens=config.data.max_prompt_tokens,
            response_tokens=config.data.max_response_tokens,
            settings="data.max_prompt_tokens + data.max_response_tokens",
        )

    def _check_that_one_fits(self) -> None:
        """Raise UserError where every example is too long: drawing them would never end."""
        data, build = self.config.data, self.builder.build
        for example in self.examples:
            is_short = len(self.builder.encode_response(example.response)) <= data.max_response_tokens
            if is_short and len(build(example.problem).ids) <= data.max_prompt_tokens:
                return
        raise UserError(
            f"no row of {', '.join(data.train)} fits data.max_prompt_tokens {data.max_prompt_tokens} and "
            f"data.max_response_tokens {data.max_response_tokens}: raise them, or lower data.max_pixels and prepare "
            "again"
        )

    def _check_responses(self) -> None:
        """Say how many responses lack the form that reinforcement rewards.

        Raises UserError for one that does not start as the prompt makes every response start.
        """
        template, prefill = self.builder.template, self.builder.prefill
        for example in self.examples:
            if not example.response.startswith(prefill.rstrip()):
                raise UserError(
                    f"problem {example.problem.id!r}: {self.builder.model_path} starts every response with "
                    f"{prefill!r}, but this one is {example.response[:80]!r}; drop the row or correct its response, "
                    "and prepare again"
                )
        wrong = [e.problem.id for e in self.examples if not template.is_well_formed(e.response)]
        if wrong and template.has_reasoning:
            self.say(
                f"note: {len(wrong)} of {len(self.examples)} responses lack the form of data.template="
                f"{template.name}, which vlm-rl train rewards; the first is that of {wrong[0]!r}"
            )

    # -- steps ---------------------------------------------------------------------------------------

    def train_step(self) -> float:
        """Take an optimizer step, record it, and save where that is due. Returns the loss."""
        begun = time.perf_counter()
        prompts = PromptCache(self.builder)
        examples = self._draw(self.config.train.mini_batch_prompts, prompts)
        result = take_step(self.learner, examples, self.builder, prompts)
        self.step += 1
        self._record(result, seconds=time.perf_counter() - begun)
        is_due = self.step % self.config.checkpoint.every == 0 or self.step == self.config.train.steps
        from_main(self.lock.check)
        stops = any(all_gather(self.stop_requested))
        if is_due or stops:
            self.checkpoints.save(self._state())
        self.checkpoints.finish(wait=stops)
        if stops:
            if rank() == 0:
                command = resume_command(self.run.path, command="sft")
                print(f"stopped by SIGTERM after step {self.step}; resume with: {command}", flush=True)
            raise StoppedError
        return result.loss

    def _draw(self, count: int, prompts: PromptCache) -> list[Example]:
        """Return the next examples in order; those that are too long are left out and counted."""
        data = self.config.data
        fitting: list[Example] = []
        while len(fitting) < count:
            drawn = [self.examples[index] for index in self.order.draw(count - len(fitting))]
            lengths = gather_shares(
                [
                    (len(prompts[example.problem].ids), len(self.builder.encode_response(example.response)))
                    for example in share(drawn)
                ]
            )
            fits = [p <= data.max_prompt_tokens and r <= data.max_response_tokens for p, r in lengths]
            fitting += compress(drawn, fits)
            self.ledger.drawn += len(drawn)
            self.ledger.trained += sum(fits)
            if not all(fits):
                self.ledger.skipped["too_long"] += fits.count(False)
        self.ledger.check()
        return fitting

    def _record(self, result: UpdateResult, *, seconds: float) -> None:
        if rank() != 0:
            return
        metrics = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "epoch": self.order.epoch,
            "entropy": result.sums["entropy"] / result.sums["tokens"],
            "tokens": result.sums["tokens"],
            "steps/skipped": float(self.learner.guard.num_skipped),
            **dict(self.ledger.metrics()),
            "step_time": seconds,
        }
        self.run.append_metrics(self.step, self.attempt, metrics)
        for complaint in self.tracking.complaints() if self.tracking else ():
            self.say(complaint)

    # -- the run directory ---------------------------------------------------------------------------

    def _start(self, resume: bool) -> None:
        from_main(self.run.remove_leftovers if resume else self._create)
        self.attempt = 1 + max((int(record["attempt"]) for record in self.run.metrics()), default=0)
        if rank() == 0 and self.contaminated:
            self.run.stamp_contaminated(self.contaminated)
        self.tracking = Tracking(self.run.path, self.config.log) if rank() == 0 else None
        self.stop_requested = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _create(self) -> None:
        self.run.create(self.config)
        self.lock.acquire()

    def _state(self) -> dict[str, Any]:
        """Return, as JSON, all that a resume needs besides weights and optimizer."""
        return {
            "step": self.step,
            "cursor": self.order.cursor,
            "ledger": self.ledger.state(),
            "learner": self.learner.state(),
            "world_size": world_size(),
            "seed": self.config.seed,
            "config_sha256": sha256(self.config.model_dump_json().encode()).hexdigest(),
            "contaminated": self.contaminated,
            "data": set_digests(self.config.data.train),
        }

    def _restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        restore_learner(self.learner, folder, state)
        self.step = state["step"]
        self.order.cursor = state["cursor"]
        self.ledger.restore(state["ledger"])

    def _on_sigterm(self, *_: object) -> None:
        self.stop_requested = True
