"""`vlm-rl sft CONFIG`: supervised fine-tuning on prepared sets whose rows hold a response.

    responses -> batches, in the order of (seed, epoch) -> optimizer steps -> checkpoints that training starts from

Its folder holds sft.yaml, metrics.jsonl and checkpoints/. The policy is the model as it is: no id is banned and the
temperature is 1, so that the loss is transformers' own for labels on the response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain, compress
from typing import Any

from vlm_rl.config import SftConfig
from vlm_rl.data.prompts import PromptBuilder, PromptCache
from vlm_rl.data.sets import contaminated_sources, load_eval_sets, load_training_sets
from vlm_rl.distributed import alive, gather_shares, rank, share
from vlm_rl.errors import UserError
from vlm_rl.learner.learner import Learner, UpdateResult
from vlm_rl.learner.loading import load_policy, prompts_to_check
from vlm_rl.learner.row_budget import RowBudget
from vlm_rl.learner.save_progress import SaveLines
from vlm_rl.learner.sft import Example, mean_loss, take_step
from vlm_rl.model_files.model_folder import check_context
from vlm_rl.rollouts.prompt_order import Ledger, PromptOrder
from vlm_rl.run.terminal import make_console, progress
from vlm_rl.session.recomputation import settled
from vlm_rl.session.run import Run
from vlm_rl.types import Problem


def sft(config: SftConfig, *, resume: bool = False) -> None:
    """Train until config.train.steps optimizer steps are done.

    Raises:
        UserError: for a mistake in configuration, data or model, before anything is written.
        StoppedError: after SIGTERM, once the state is saved; exits with errors.EXIT_STOPPED.
        NonFiniteError: where a weight is NaN or infinite when a checkpoint is due; none is written.
    """
    with Run(config, resume=resume) as run:
        training = SupervisedTraining(config, run)
        try:
            left = max(config.train.steps - run.step, 0)
            with run.checkpoints, progress("sft", total=left, console=training.console) as advance:
                training.show_save = lambda text: advance(0, note=text or " ")
                if not run.step:
                    training.measure()
                while run.step < config.train.steps:
                    loss = training.train_step()
                    advance(note=f"loss {loss:.3f}")
        finally:
            for line in run.close_trackers():
                training.say(line)


def examples_of(problems: list[Problem]) -> list[Example]:
    """Return the problems with their responses. Raises UserError for one without."""
    for problem in problems:
        if "response" not in problem.meta:
            raise UserError(
                f"problem {problem.id!r} has no response to learn: prepare its set again and name the column with "
                "vlm-rl prepare PATH --response COLUMN"
            )
    return [Example(problem, problem.meta["response"]) for problem in problems]


class SupervisedTraining:
    """The parts of one run, built once, cheap checks first; nothing is written before all of them have passed."""

    def __init__(self, config: SftConfig, run: Run) -> None:
        self.config, self.run = config, run
        self.console = make_console()
        self.show_save: Callable[[str], None] = lambda _: None
        device = run.join_ranks()
        problems = load_training_sets(config.data)
        self.examples = examples_of(problems)
        self.contaminated = contaminated_sources(problems)
        run.find_checkpoint()
        held_out = load_eval_sets(config.data) if config.eval.every else {}
        self.builder = self._open_builder([*problems, *chain(*held_out.values())])
        self._check_responses()
        self._check_that_one_fits()
        self.held_out = {name: self._fitting(name, examples_of(of_set)) for name, of_set in held_out.items()}
        prompts = prompts_to_check(self.builder.build, problems, config.data)
        policy, _ = load_policy(run.model_path, settled(config), device, prompts, banned_ids=(), temperature=1.0)
        run.check_disk(policy, device)
        self.learner = Learner(policy, config.train, total_optimizer_steps=config.train.steps)
        self.rows = RowBudget(
            config, self.learner, lambda text: self.say(f"step {run.step + 1}: {text}"), run.keep_shorter_rows
        )
        self.order, self.ledger = PromptOrder(len(problems), config.seed), Ledger()
        run.restore(self.learner, self.order, self.ledger)
        run.start(self.contaminated)
        run.keep_checkpoints(self.learner, self.builder, self._save_lines())
        run.listen(self.say)

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(text, soft_wrap=True)

    def _save_lines(self) -> SaveLines:
        """Announce saves: a log gets a line when one begins and ends, the bar of a terminal the bytes meanwhile."""
        if self.console.is_terminal:
            return SaveLines(lambda _: None, self.say, show=lambda text: self.show_save(text))
        return SaveLines(self.say, self.say)

    def _open_builder(self, problems: list[Problem]) -> PromptBuilder:
        builder, data = self.run.open_builder(problems), self.config.data
        if builder.tags_note:
            self.say(builder.tags_note)
        check_context(
            builder.config,
            prompt_tokens=data.max_prompt_tokens,
            response_tokens=data.max_response_tokens,
            settings="data.max_prompt_tokens + data.max_response_tokens",
        )
        return builder

    def _check_that_one_fits(self) -> None:
        """Raise UserError if every example is too long: taking them would never end."""
        data = self.config.data
        if any(map(self._fits, self.examples)):
            return
        raise UserError(
            f"no row of {', '.join(data.train)} fits data.max_prompt_tokens {data.max_prompt_tokens} and "
            f"data.max_response_tokens {data.max_response_tokens}: raise them, or lower data.max_pixels and prepare "
            "again"
        )

    def _fitting(self, name: str, examples: list[Example]) -> list[Example]:
        """Return the held-out examples that are short enough. Raises UserError if none is."""
        fitting = [example for example in examples if self._fits(example)]
        if not fitting:
            raise UserError(
                f"no row of {name}, a set of data.eval, fits data.max_prompt_tokens and data.max_response_tokens: "
                "raise them, or leave the set out"
            )
        trained = {example.problem.id for example in self.examples}
        if shared := sum(example.problem.id in trained for example in fitting):
            self.say(f"note: {shared} of {len(examples)} rows of {name} have the id of a row that is trained on")
        if len(fitting) < len(examples):
            self.say(
                f"note: {len(examples) - len(fitting)} of {len(examples)} rows of {name} are too long to measure"
            )
        return fitting

    def _fits(self, example: Example) -> bool:
        data = self.config.data
        is_short = len(self.builder.encode_response(example.response)) <= data.max_response_tokens
        return is_short and len(self.builder.build(example.problem).ids) <= data.max_prompt_tokens

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
        if wrong and template.has_form:
            self.say(
                f"note: {len(wrong)} of {len(self.examples)} responses lack the form of data.template="
                f"{template.name}, which vlm-rl train rewards; the first is that of {wrong[0]!r}"
            )

    # -- steps ---------------------------------------------------------------------------------------

    def train_step(self) -> float:
        """Take an optimizer step, record it, and save where that is due. Returns the loss."""
        begun = time.perf_counter()
        alive("update")
        prompts = PromptCache(self.builder)
        examples = self._take(self.config.train.mini_batch_prompts, prompts)
        result = self.rows.run(lambda tokens: take_step(self.learner, examples, self.builder, prompts, tokens=tokens))
        self.run.step += 1
        seconds = time.perf_counter() - begun
        every, is_last = self.config.eval.every, self.run.step == self.config.train.steps
        measured = self.measure() if every and (is_last or self.run.step % every == 0) else {}
        self._record(result, measured, seconds=seconds)
        if self.run.is_save_due:
            self.run.save(self._info())
        self.run.stop_if_asked(self.run.step, lambda: self.run.save(self._info()))
        return result.loss

    def measure(self) -> dict[str, float]:
        """Return the loss on each set of data.eval at the current weights, by the name of its metric, and say it."""
        measured: dict[str, float] = {}
        for name, examples in self.held_out.items():
            alive("evaluation")
            sizes = {"batch_size": self.config.train.mini_batch_prompts, "tokens": self.rows.tokens}
            measured[f"heldout_loss/{name}"] = loss = mean_loss(self.learner, examples, self.builder, **sizes)
            self.say(f"step {self.run.step}: loss {loss:.4f} on {name}, {len(examples):,} held-out responses")
        return measured

    def _info(self) -> Mapping[str, Any]:
        return self.run.info(self.learner, self.order, self.ledger, self.contaminated)

    def _take(self, count: int, prompts: PromptCache) -> list[Example]:
        """Return the next examples in order; those that are too long are left out and counted."""
        data = self.config.data
        fitting: list[Example] = []
        while len(fitting) < count:
            taken = [self.examples[index] for index in self.order.take(count - len(fitting))]
            lengths = gather_shares(
                [
                    (len(prompts[example.problem].ids), len(self.builder.encode_response(example.response)))
                    for example in share(taken)
                ]
            )
            fits = [p <= data.max_prompt_tokens and r <= data.max_response_tokens for p, r in lengths]
            fitting += compress(taken, fits)
            self.ledger.taken += len(taken)
            self.ledger.trained += sum(fits)
            if not all(fits):
                self.ledger.skipped["too_long"] += fits.count(False)
        self.ledger.check()
        return fitting

    def _record(self, result: UpdateResult, measured: Mapping[str, float], *, seconds: float) -> None:
        if rank() != 0:
            return
        metrics = {
            "loss": result.loss,
            **measured,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "epoch": self.order.epoch,
            "entropy": result.sums["entropy"] / result.sums["tokens"],
            "tokens": result.sums["tokens"],
            "steps/skipped": float(self.learner.guard.num_skipped),
            **dict(self.ledger.metrics()),
            "step_time": seconds,
        }
        self.run.directory.append_metrics(self.run.step, self.run.attempt, metrics)
        for complaint in self.run.complaints():
            self.say(complaint)
