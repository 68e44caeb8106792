"""A run from its lock to its last checkpoint, the same for `vlm-rl train` and `vlm-rl sft`.

with Run(config, resume=resume) as run:
    device = run.join_ranks()
    run.find_checkpoint()
    ...                          # load a policy from run.model_path
    run.check_disk(policy, device)
    ...                          # build a learner: nothing is written yet
    run.start(contaminated)
    run.keep_checkpoints(learner, builder, SaveLines(print, print))
    run.listen(print)
    ...                          # after each step: run.step += 1, save where run.is_save_due, stop_if_asked
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from vlm_rl.config import Config, SftConfig, with_values
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import set_digests
from vlm_rl.distributed import alive, all_gather, from_main, init_ranks, rank, signs_of_life, world_size
from vlm_rl.errors import StoppedError
from vlm_rl.learner.architectures import check_architecture, check_parts, is_padded
from vlm_rl.learner.checkpoint_size import DiskRoom, disk_room
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.learning_rate import moved_cosine
from vlm_rl.learner.loading import make_prompt_builder
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.quantization import check_quantization
from vlm_rl.learner.save_progress import SaveLines
from vlm_rl.learner.saving import (
    CheckpointWriter,
    ResumePoint,
    checkpoint_to_resume,
    restore_learner,
    start_learner,
    where_it_resumes,
)
from vlm_rl.learner.sequence_parallel import check_heads, check_ranks
from vlm_rl.model_files.weights import check_base_weights
from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder
from vlm_rl.run.configurations import check_alike, keep_changes
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.interrupts import Interrupts
from vlm_rl.run.lock import RunLock
from vlm_rl.run.run_log import LOG
from vlm_rl.run.terminal import resume_command
from vlm_rl.run.tracking import Tracking
from vlm_rl.session.preflight import check_resumable
from vlm_rl.session.start_from import check_start
from vlm_rl.session.watch import Watch
from vlm_rl.types import Problem


class Run:
    """The parts of a run that `train` and `sft` share. Use as a context manager, which releases the folder's lock.

    Attributes:
        directory: its folder.
        step: how many steps are finished.
        attempt: which start of the run this is, from 1 on.
        checkpoints: writes them.
        tracking: its trackers; None on all ranks but 0.
        contaminated: benchmarks that its first weights were trained on.
    """

    checkpoints: CheckpointWriter
    _room: DiskRoom
    attempt: int

    def __init__(self, config: Config | SftConfig, *, resume: bool) -> None:
        """Remember the configuration; nothing is read yet."""
        self._config, self._is_resumed = config, resume
        self._command = "sft" if isinstance(config, SftConfig) else "train"
        config_file = SFT_CONFIG if isinstance(config, SftConfig) else "config.yaml"
        self.directory = RunDirectory(config.out, config_file=config_file)
        self.step = 0
        self.tracking: Tracking | None = None
        self.contaminated: list[str] = []
        self._lock = RunLock(self.directory.path)
        self._checkpoint: ResumePoint | None = None  # that the run continues from
        self._start: ResumePoint | None = None  # of another run, that this one begins with
        self._saved_step: int | None = None  # the last one that this process has saved, or begun with
        self._saved_at = time.monotonic()
        self._interrupts = Interrupts(self._on_ctrl_c)
        self._watch = Watch()
        self._is_stop_requested, self._stop_reason = False, "stopped by SIGTERM"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = None if error is None or isinstance(error, SystemExit) else self._watch.tell(error)
        self._watch.close()
        for line in self.close_trackers():  # of a start that failed before anything else closes them
            print(line, file=sys.stderr, flush=True)
        self._lock.release()
        if isinstance(error, KeyboardInterrupt) and rank() == 0 and self._has_folder:
            error.args = (f"stopped at once: {self._what_is_lost()}",)  # it is said: cli.main prints no other line
            print(error.args[0], file=sys.stderr, flush=True)
        self._interrupts.close()
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if first is not None:
            raise first from error

    # -- before anything is written ------------------------------------------------------------------

    def join_ranks(self) -> torch.device:
        """Join the other ranks, and return this rank's device.

        Raises UserError if a rank has a different configuration, if 4-bit loading is not available here, and if ranks
        do not form the groups that compute rows together.
        """
        check_quantization(self._config.model)
        device = init_ranks()
        check_ranks(self._config.train.sequence_parallel, world_size())
        self._watch.join(self.directory.path)
        check_alike(all_gather(self._config))
        return device

    def find_checkpoint(self) -> None:
        """Find what a resume continues from, and acquire its lock; or refuse a new run if there is one already.

        Rank 0 looks and tells the others: a shared file system may show them the files later. This is quick, and
        comes before the model is loaded, which may take minutes.
        """
        self._checkpoint = from_main(self._newest_checkpoint if self._is_resumed else self.directory.refuse_existing)
        if self._checkpoint is not None:
            self.step = self._saved_step = self._checkpoint[1]["step"]
        elif self._config.train.start_from is not None:
            self._start = from_main(lambda: check_start(self._config))
        if (begins := self._checkpoint or self._start) is not None:
            self.contaminated = list(begins[1].get("contaminated", ()))

    def _newest_checkpoint(self) -> ResumePoint | None:
        check_resumable(self.directory, self._config)
        return checkpoint_to_resume(self.directory, self._lock, self._config.data.train)

    @property
    def model_path(self) -> Path:
        """Return the folder of the model: the checkpoint's, unless that holds only adapters."""
        begins = self._checkpoint or self._start
        if begins is None or self._config.model.lora is not None:
            return Path(self._config.model.path)
        return begins[0]

    def open_builder(self, problems: Sequence[Problem]) -> PromptBuilder:
        """Return the prompt builder of the model. Raises UserError for a model that the learner cannot train.

        Args:
            problems: all that are to be built; some may have videos.
        """
        config, path = self._config, self.model_path
        builder = make_prompt_builder(config.data, path)
        builder.allow_videos(problems)
        if (begins := self._checkpoint or self._start) is not None:
            folder, _ = begins
            builder.spell_tags_as(folder)
            if config.model.lora is not None:
                from_main(lambda: check_base_weights(folder, path))
        check_architecture(builder.config, path=path, rows=config.model.rows)
        check_parts(builder.config, config.model, lr_by_part=config.train.lr_by_part)
        padded = is_padded(builder.config, config.model.rows)
        check_heads(builder.config, config.train.sequence_parallel, is_padded=padded)
        return builder

    def check_disk(self, policy: Policy, device: torch.device) -> None:
        """Raise UserError if the disk has no room for the checkpoints of this policy."""
        self._room = from_main(lambda: disk_room(self._config, policy, on_gpu=device.type == "cuda"))

    # -- from here on the folder is written ----------------------------------------------------------

    def keep_checkpoints(
        self,
        learner: Learner,
        builder: PromptBuilder,
        lines: SaveLines,
        *,
        best_step: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Let `checkpoints` write those of this learner.

        Args:
            learner: has the weights and the optimizer.
            builder: has the tokenizer.
            lines: where saves are announced.
            best_step: gives a step that is kept too.
        """
        self.checkpoints = CheckpointWriter(
            self.directory.path / "checkpoints",
            learner,
            builder,
            self._config.checkpoint,
            lock=self._lock,
            best_step=best_step,
            newest=self._saved_step,
            size=self._room.size,
            lines=lines,
        )

    @property
    def is_at_checkpoint(self) -> bool:
        """Tell whether the run begins with a checkpoint, its own or another run's."""
        return self._checkpoint is not None or self._start is not None

    def restore(self, learner: Learner, order: PromptOrder, ledger: Ledger) -> ResumePoint | None:
        """Load the parts of a checkpoint that every run has. Return the checkpoint; None if the run begins at step 0.

        From another run's checkpoint, load only weights and optimizer.
        """
        if self._checkpoint is not None:
            folder, state = self._checkpoint
            restore_learner(learner, folder, state)
            order.cursor = state["cursor"]
            ledger.restore(state["ledger"])
        elif self._start is not None:
            start_learner(learner, self._start[0])
        return self._checkpoint

    def start(self, contaminated: Sequence[str]) -> None:
        """Make the folder, or clean that of a resume, count the attempt, and start the trackers.

        Args:
            contaminated: benchmarks that are trained on, with which the folder is stamped.
        """
        from_main(self.directory.remove_leftovers if self._is_resumed else self._create)
        self.attempt = 1 + max((int(record["attempt"]) for record in self.directory.metrics()), default=0)
        if rank() != 0:
            return
        if every := sorted({*contaminated, *self.contaminated}):
            self.directory.stamp_contaminated(every)
        log = self._config.log
        samples_every = self._config.log.samples_every if isinstance(self._config, Config) else 0
        self.tracking = Tracking(self.directory.path, log, samples_every=samples_every)

    def _create(self) -> None:
        self.directory.create(self._config)
        self._lock.acquire()

    def listen(self, note: Callable[[str], None]) -> None:
        """Note SIGTERM and Ctrl-C from now on. Say first where a resume continues, and what checkpoints take."""
        if self._is_resumed:
            for line in from_main(self._keep_changes):
                note(line)
            note(where_it_resumes(self.directory, self._checkpoint, self._config.train.steps))
        if self._start is not None:
            note(
                f"starting from {self._start[0]}: its weights and its optimizer; steps, belief and order of prompts "
                "start from the beginning"
            )
        for line in self._room.lines():
            note(line)
        self._watch.arm(self.directory.path / LOG, minutes=self._config.log.stall_minutes)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._interrupts.listen()

    def _keep_changes(self) -> list[str]:
        """Make this configuration the run's, and return a line for each change and for what follows from it."""
        own, now = self.directory.any_config().train, self._config
        lines = keep_changes(self.directory, now)
        prompts = now.rollout.prompts_per_step if isinstance(now, Config) else now.train.mini_batch_prompts
        updates = -(-prompts // now.train.mini_batch_prompts)
        moved = moved_cosine(own, now.train, step=self.step, updates_per_step=updates)
        return [*lines, moved] if moved else lines

    def keep_shorter_rows(self, tokens: int) -> None:
        """Write into the run's configuration how many tokens a row has since memory ended (RowBudget)."""
        own = self.directory.any_config()
        self.directory.replace_config(with_values(own, {"train.micro_batch_tokens": tokens}))

    def _on_sigterm(self, *_: object) -> None:
        self._is_stop_requested = True

    def _on_ctrl_c(self) -> None:
        """Stop as after SIGTERM. A signal handler may not print: what it interrupts may be printing."""
        self.ask_to_stop("stopped by Ctrl-C")
        if rank() == 0:
            lost = self.step - (self.checkpoints.step_after_error or 0)
            text = (
                f"\nCtrl-C: waiting for what is in progress ({signs_of_life()[1]}); then the run is "
                f"saved and stops. Ctrl-C again stops at once{f' and loses {_steps(lost)}' if lost else ''}.\n"
            )
            os.write(2, text.encode())

    # -- trackers ------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Return a line for each tracker that has failed since the last call."""
        return self.tracking.complaints() if self.tracking else []

    def close_trackers(self) -> list[str]:
        """Let the trackers send what is left, and return a line for each."""
        return self.tracking.close() if self.tracking else []

    # -- saving and stopping -------------------------------------------------------------------------

    def info(
        self, learner: Learner, order: PromptOrder, ledger: Ledger, contaminated: Sequence[str]
    ) -> dict[str, Any]:
        """Return, as JSON, the part of a checkpoint's manifest that every run has."""
        return {
            "step": self.step,
            "cursor": order.cursor,
            "ledger": ledger.state(),
            "learner": learner.state(),
            "world_size": world_size(),
            "seed": self._config.seed,
            "config_sha256": sha256(self._config.model_dump_json().encode()).hexdigest(),
            "data": set_digests(self._config.data.train),
            "contaminated": sorted({*contaminated, *self.contaminated}),
        }

    @property
    def is_save_due(self) -> bool:
        """Tell whether a checkpoint is due: every checkpoint.every steps, after checkpoint.minutes, at the end."""
        every, minutes = self._config.checkpoint.every, self._config.checkpoint.minutes
        if self.step % every == 0 or self.step == self._config.train.steps:
            return True
        return minutes > 0 and from_main(lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    def save(self, info: Mapping[str, Any], *, add_files: Callable[[Path], None] = lambda _: None) -> None:
        """Write a checkpoint of the current weights. See CheckpointWriter.save."""
        self.checkpoints.save(info, add_files=add_files)
        self._saved_step, self._saved_at = info["step"], time.monotonic()

    @property
    def is_saved(self) -> bool:
        """Tell whether this process has saved the current step, or begun with it."""
        return self.step == self._saved_step

    def ask_to_stop(self, reason: str) -> None:
        """Let the next `stop_if_asked` save and stop, and say why: the first reason, which others may follow from."""
        if not self._is_stop_requested:
            self._stop_reason, self._is_stop_requested = reason, True

    def is_stopped(self) -> bool:
        """Tell whether waiting code should give up. It marks this rank as alive, since callers have a time limit."""
        alive()
        return self._is_stop_requested or self._interrupts.is_raised

    def stop_if_asked(self, step: int, save: Callable[[], None]) -> None:
        """Save, unless this step is saved already, and raise StoppedError if any rank is asked to stop.

        Otherwise commit an asynchronous save that all ranks have written.

        Args:
            step: that `save` writes a checkpoint of.
            save: writes it.

        Raises UserError if another machine has taken the folder over, and KeyboardInterrupt after a
        second Ctrl-C.
        """
        self._interrupts.check()
        from_main(self._lock.check)
        stops = any(all_gather(self._is_stop_requested))
        self.checkpoints.finish(wait=stops)
        if not stops:
            return
        if step != self._saved_step:  # a folder of this step may be a damaged one that was passed over
            save()
            self.checkpoints.finish()
        if rank() == 0:
            command = resume_command(self.directory.path, command=self._command)
            print(f"{self._stop_reason} after step {step}; resume with: {command}", flush=True)
        raise StoppedError

    @property
    def _has_folder(self) -> bool:
        return (self.directory.path / self.directory.config_file).is_file()

    def _what_is_lost(self) -> str:
        """Say how many steps an end at this moment loses, and how to continue."""
        command = resume_command(self.directory.path, command=self._command)
        saved = self.checkpoints.step_after_error if hasattr(self, "checkpoints") else self._saved_step
        lost = self.step - (saved or 0)
        if saved is None:
            what = f"{_steps(lost)} lost, since no checkpoint was written" if lost else "no step was done"
            return f"{what}; to begin again at step 1: {command}"
        what = f"{_steps(lost)} lost" if lost else "nothing lost but the step in progress"
        return f"{what}; to resume from step {saved}: {command}"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
