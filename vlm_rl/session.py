"""Everything a training run holds, built once: model, learner, sampler, grader, data, run directory.

vlm_rl.train is the algorithm and uses these parts; how they are made, saved, restored and stopped
stands here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import MUTABLE_KEYS, Config, changed_keys
from vlm_rl.data.model_folder import check_model_folder
from vlm_rl.data.order import Ledger, PromptOrder
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import (
    check_patch_size,
    contaminated_sources,
    load_eval_sets,
    load_training_sets,
    refuse_contaminated,
)
from vlm_rl.distributed import all_gather, barrier, from_main, init_ranks, rank, share, world_size
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.evaluation.resume import Settings, answer_settings, changed_settings, evaluate_into
from vlm_rl.grading.grader import GRADER_VERSION, Grader
from vlm_rl.hadw import Belief
from vlm_rl.learner.learner import Learner, Reference
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.recorder import Recorder
from vlm_rl.rewards import RewardFunction
from vlm_rl.run.checkpoint import commit, prune, recover, saving
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import resume_command
from vlm_rl.samplers.base import FingerprintBuilder, SamplingParams, check_fresh
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt


class Session:
    """The parts of one run. Use as a context manager: it closes engines and workers."""

    def __init__(self, config: Config, *, resume: bool = False) -> None:
        """Raises UserError for anything wrong with configuration, data, model or run directory.

        Cheap checks come first, and nothing is written before all of them have passed.
        """
        self.config = config
        self.algorithm = resolve_algorithm(config.algorithm)
        self.device = init_ranks()
        self.problems = load_training_sets(config.data)
        self.eval_sets = load_eval_sets(config.data) if config.eval.every else {}
        for name, problems in self.eval_sets.items():
            refuse_contaminated(name, problems, contaminated_sources(self.problems))
        self.run = RunDirectory(config.out)
        found = from_main(lambda: self._open_run(resume))  # one rank looks: others may see the files later
        model_path = found[0] if found else Path(config.model.path)
        check_model_folder(model_path)
        self.builder = PromptBuilder(
            model_path,
            template=TEMPLATES[config.data.template],
            min_pixels=config.data.min_pixels,
            max_pixels=config.data.max_pixels,
        )
        self.builder.check_template()
        check_patch_size([*config.data.train, *config.data.eval], self.builder.patch_size)
        self._prompts: dict[str, Prompt] = {}
        self.prompt_lengths: dict[str, int] = {}  # tokens of the prompts of the step, known on every rank
        self._check_prompts()
        self.grader = Grader(workers=config.reward.grader_workers, timeout=config.reward.grader_timeout)
        self.reward = RewardFunction(
            config.reward, template=self.builder.template, max_tokens=config.rollout.max_tokens, grader=self.grader
        )
        dtype = self._dtype()
        self.policy = Policy(
            load_model(model_path, dtype=dtype),
            banned_ids=self.builder.banned_ids,
            temperature=config.rollout.temperature,
        )
        self._check_context()
        if config.model.freeze_vision:
            self.policy.freeze_vision()
        if (offload := config.model.offload_activations) or config.model.gradient_checkpointing:
            self.policy.enable_checkpointing(offload=offload)
        mini_batches = -(-config.rollout.prompts_per_step // config.train.mini_batch_prompts)
        self.learner = Learner(self.policy, config.train, total_optimizer_steps=config.train.steps * mini_batches)
        self.reference = self._load_reference(dtype) if config.algorithm.kl_coef else None
        self.sampler = make_sampler(
            config.rollout.sampler,
            model_path=str(model_path),
            builder=self.builder,
            max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
            batch_size=config.rollout.batch_size,
            dtype=dtype,
            vllm_options=config.rollout.vllm,
            seed=config.seed,
        )
        self.sampling = SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            responses=config.rollout.responses_per_prompt,
        )
        self.order = PromptOrder(len(self.problems), config.seed)
        self.ledger = Ledger()
        self.belief = Belief()
        self.step = 0  # rollout steps finished
        self.weights = ""  # a checksum of those that the sampler has
        self.difficulty: dict[str, float] = {}  # HA-DW's weights of the last batch, as metrics
        if found:
            self._restore(*found)
        self.recorder = self._start_run(resume)
        if resume:
            self.recorder.line.note(self._going_on(found[0] if found else None))
        self.stop_requested = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.grader.start()

    # --- opening ------------------------------------------------------------------------------

    def _open_run(self, resume: bool) -> tuple[Path, Mapping[str, Any]] | None:
        """The checkpoint to continue from, or None for a start from the model."""
        if not resume:
            self.run.refuse_existing()  # before the model is loaded, which may take minutes
            return None
        previous = self.run.open().config()
        changed = changed_keys(previous.model_dump(), self.config.model_dump())
        forbidden = [key for key in changed if not key.startswith(MUTABLE_KEYS)]
        if forbidden:
            raise UserError(
                f"{self.run.path}: cannot resume with another {forbidden[0]}: the run has "
                f"{_lookup(previous.model_dump(), forbidden[0])!r}; give it that value, or start anew in another out"
            )
        found = recover(self.run.path / "checkpoints")
        return (found[0], found[1].info) if found else None

    def _start_run(self, resume: bool) -> Recorder:
        if rank() == 0 and resume:
            self.run.remove_leftovers()
        elif rank() == 0:
            self.run.create(self.config)
        barrier()
        attempts = [int(record["attempt"]) for record in self.run.metrics()]
        if rank() == 0 and (contaminated := contaminated_sources(self.problems)):
            self.run.stamp_contaminated(contaminated)
        return Recorder(self.run, self.config, attempt=1 + max(attempts, default=0), start=self.step)

    def _going_on(self, checkpoint: Path | None) -> str:
        """One line for whoever asked to resume: from where, and what is next."""
        steps = self.config.train.steps
        if checkpoint is None:
            return f"{self.run.path} has no checkpoint to continue from: starting again at step 1 of {steps}"
        if self.step >= steps:
            return f"{self.run.path} is finished: {checkpoint.name} is there; a larger train.steps would go on"
        return (
            f"continuing {self.run.path} from checkpoint {checkpoint.name} (step {self.step + 1} of {steps} is next)"
        )

    def _dtype(self) -> torch.dtype:
        name = self.config.model.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else "bfloat16"
        return getattr(torch, name)

    def _load_reference(self, dtype: torch.dtype) -> Reference:
        """The model that the run began with: on a resume too, where the policy comes from a checkpoint."""
        check_model_folder(Path(self.config.model.path))
        policy = Policy(
            load_model(self.config.model.path, dtype=dtype),
            banned_ids=self.builder.banned_ids,
            temperature=self.config.rollout.temperature,
        )
        return Reference(policy, zero_stage=self.config.train.zero_stage)

    def _check_context(self) -> None:
        context = self.policy.model.config.get_text_config().max_position_embeddings
        wanted = self.config.data.max_prompt_tokens + self.config.rollout.max_tokens
        if wanted > context:
            raise UserError(
                f"data.max_prompt_tokens + rollout.max_tokens is {wanted}, above the model's context of {context}: "
                "lower one of them"
            )

    def _check_prompts(self) -> None:
        """At least one training prompt must fit, or drawing prompts would not end."""
        limit = self.config.data.max_prompt_tokens
        if any(len(self.prompt(problem).ids) <= limit for problem in self.problems):
            self.forget_prompts()
            return
        shortest = min(self._prompts.values(), key=lambda prompt: len(prompt.ids))
        raise UserError(
            f"no prompt of {', '.join(self.config.data.train)} fits data.max_prompt_tokens {limit}: the shortest, "
            f"{shortest.problem_id!r}, has {len(shortest.ids)} tokens; raise it, or lower data.max_pixels and "
            "prepare again"
        )

    # --- the state that a checkpoint carries --------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a resume needs besides weights and optimizer, as JSON."""
        return {
            "step": self.step,
            "cursor": self.order.cursor,
            "ledger": self.ledger.state(),
            "belief": asdict(self.belief),
            "learner": self.learner.state(),
            "world_size": world_size(),
            "seed": self.config.seed,
            "config_sha256": sha256(self.config.model_dump_json().encode()).hexdigest(),
            "algorithm": self.config.algorithm.name,
            "grader_version": GRADER_VERSION,
            "contaminated": contaminated_sources(self.problems),
        }

    def _restore(self, folder: Path, info: Mapping[str, Any]) -> None:
        if info["world_size"] != world_size():
            raise UserError(
                f"{folder} was written by {info['world_size']} ranks and this run has {world_size()}: "
                "start it with the same number of ranks"
            )
        self.learner.load(folder)
        self.learner.restore(info["learner"])
        self.step = info["step"]
        self.order.cursor = info["cursor"]
        self.ledger = Ledger.restored(info["ledger"])
        belief = dict(info["belief"])
        belief.update(history=tuple(belief["history"]), accuracies=tuple(belief["accuracies"]))
        self.belief = Belief(**belief)

    def save_if_due(self) -> None:
        if self.step % self.config.checkpoint.every == 0 or self.step == self.config.train.steps:
            begun = time.perf_counter()
            self.save()
            self.recorder.addition(self.step, {"timing/save": time.perf_counter() - begun})

    def save(self, state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of the present weights, with this state (the present one if None)."""
        state = self.state() if state is None else state
        root = self.run.path / "checkpoints"
        with saving(root, step=state["step"]) if rank() == 0 else nullcontext() as own:
            work = Path(all_gather(str(own))[0])
            self.learner.save(work)
            if rank() == 0:
                (self.builder.processor or self.builder.tokenizer).save_pretrained(work)
                commit(work, root, step=state["step"], info=state)
        if rank() == 0:
            c = self.config.checkpoint
            prune(root, keep_last=c.keep_last, keep_every=c.keep_every, best=self._best_step())
        barrier()
        return root / f"step-{state['step']:06d}"

    def _best_step(self) -> int | None:
        """The saved step with the highest accuracy on the first set of data.eval."""
        if not self.eval_sets:
            return None
        saved = {step for step, _ in self.run.checkpoints()}
        results = [result for result in self.run.evals(next(iter(self.eval_sets))) if result.step in saved]
        return max(results, key=lambda r: (r.summary["accuracy"], r.step)).step if results else None

    # --- weights to the sampler ---------------------------------------------------------------

    def sync_weights(self) -> None:
        """Stream the policy into the sampler and prove that it arrived."""
        fingerprint = FingerprintBuilder(dtype=self.sampler.dtype)
        self.sampler.load_weights(fingerprint.watch(self.learner.stream_weights()), version=self.learner.num_updates)
        check_fresh(self.sampler, fingerprint.result())
        self.weights = f"{fingerprint.result().checksum:016x}"

    # --- settings of the pure functions -------------------------------------------------------

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Keyword arguments of losses.policy_loss."""
        a = self.algorithm
        return {
            "ratio": a.ratio,
            "surrogate": a.surrogate,
            "clip_low": a.clip_low,
            "clip_high": a.clip_high,
            "cap": self.config.algorithm.correction_cap,
            "kl_coef": self.config.algorithm.kl_coef,
            "entropy_coef": self.config.algorithm.entropy_coef,
        }

    @property
    def belief_settings(self) -> dict[str, Any]:
        """Keyword arguments of difficulty.update_belief."""
        hadw = self.config.algorithm.hadw
        return {"eta": hadw.eta, "window": hadw.window, "variant": hadw.variant}

    def counters(self) -> dict[str, float]:
        """The run's running totals, as metrics."""
        belief = {} if self.belief.ability is None else {"hadw/belief": self.belief.ability}
        skipped = float(self.learner.guard.num_skipped)
        return {"epoch": self.order.epoch, "steps/skipped": skipped, **dict(self.ledger.metrics()), **belief}

    # --- prompts ------------------------------------------------------------------------------

    def prompt(self, problem: Problem) -> Prompt:
        """The problem's prompt, built once per step."""
        if problem.id not in self._prompts:
            self._prompts[problem.id] = self.builder.build(problem)
        return self._prompts[problem.id]

    def forget_prompts(self) -> None:
        """Drop the prompts of the last step; pixels of a whole epoch would fill the memory."""
        self._prompts.clear()
        self.prompt_lengths.clear()

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate_if_due(self) -> None:
        """Measure the policy on data.eval every eval.every steps, step 0 and the last one included.

        After a kill in the middle what is answered stays: neither answered nor graded again.
        """
        every = self.config.eval.every
        if not every or (self.step % every and self.step != self.config.train.steps):
            return
        params = SamplingParams(
            temperature=self.config.eval.temperature,
            max_tokens=self.config.eval.max_tokens or self.config.rollout.max_tokens,
            responses=self.config.eval.samples,
        )
        for name, problems in self.eval_sets.items():
            how = {"builder": self.builder, "sampler": self.sampler, "params": params, "seed": self.config.seed}
            settings = {"weights": self.weights, **answer_settings(problems, **how, step=self.step)}
            if from_main(partial(self._is_evaluated, name, settings)):
                continue
            with self.recorder.progress(name, total=len(share(problems))) as advance:
                summary = evaluate_into(
                    self.run,
                    name,
                    problems,
                    settings=settings,
                    step=self.step,
                    grader=self.grader,
                    advance=advance,
                    **how,
                )
            self.recorder.evaluation(name, self.step, summary)
        self.stop_if_asked(self.state())

    def _is_evaluated(self, name: str, settings: Settings) -> bool:
        """Whether a run that was stopped behind its evaluation has left the result of these very weights."""
        results = (result for result in self.run.evals(name) if result.step == self.step)
        return any(not changed_settings(result.summary, settings) for result in results)

    # --- stopping -----------------------------------------------------------------------------

    def _on_sigterm(self, *_: object) -> None:
        self.stop_requested = True

    def stop_if_asked(self, state: Mapping[str, Any]) -> None:
        """Where any rank was told to stop: save the state, if its step is not saved yet, and leave."""
        if not any(all_gather(self.stop_requested)):
            return
        if from_main(lambda: state["step"] not in [step for step, _ in self.run.checkpoints()]):
            self.save(state)
        if rank() == 0:
            command = resume_command(self.run.path)
            print(f"stopped by SIGTERM after step {state['step']}; continue with: {command}", flush=True)
        raise StoppedError

    # --- context manager ----------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()
        self.grader.close()
        self.recorder.close()


class Timings:
    """Seconds per phase of a step, as metrics timing/<phase>."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.show(name)
        begun = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        parts = {f"timing/{name}": seconds for name, seconds in self.seconds.items()}
        return parts | {"step_time": time.perf_counter() - self.start}


def _lookup(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
