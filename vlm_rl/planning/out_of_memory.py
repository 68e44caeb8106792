"""Say what to change where a run does not fit into memory."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from vlm_rl.config import MUTABLE_KEYS, Config, SftConfig, with_values
from vlm_rl.devices import OutOfMemoryError, has_gpu, is_out_of_memory
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, Fit, engine_share, fits, gib
from vlm_rl.planning.remedies import SHARE, Remedy, fitting_remedies, is_resumable, remedies, with_remedies
from vlm_rl.run.configurations import changes
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.terminal import resume_command

_CPU_ALLOCATOR = "DefaultCPUAllocator"
_ROWS = "train.micro_batch_tokens"


@contextmanager
def advised(advice: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn a failed allocation of torch into a UserError with this advice."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(advice(error)) from error
        raise


def eval_memory_advice(error: BaseException) -> str:
    """Say what failed in an evaluation, and what makes it smaller."""
    return (
        f"out of memory: {_first_sentence(error)} To take less: a smaller --max-tokens or --max-prompt-tokens; on "
        "GPUs --tensor-parallel N under torchrun; or end what else holds the memory"
    )


def memory_advice(config: Config | SftConfig, error: BaseException) -> str:
    """Say what failed, what the plan had foreseen for each part, the settings that make it smaller, and a command."""
    if isinstance(error, OutOfMemoryError) and error.row_tokens != config.train.micro_batch_tokens:
        config = with_values(config, {_ROWS: error.row_tokens})  # what ran out of memory last
    dry = dry_run(config, on_gpu=has_gpu())
    fit = fits(dry, Card.here(dry.num_ranks, emptied=True))
    planned = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in dry.memory.parts().items())
    found = None if fit.ok else fitting_remedies(fit)
    if found is None:
        lines = [_line(remedy, saved) for remedy, saved in _smaller(fit)]
        advice = "To take less:"
    else:
        lines = [_line(remedy, "") for remedy in found]
        advice = f"That does not fit on {fit.card}: {fit.faults}. What would:"
    return "\n".join(
        [
            f"out of memory: {_first_sentence(error)}",
            f"planned for the update on each of {dry.num_ranks} ranks, GiB: {planned}; in all "
            f"{dry.memory.update / 2**30:.1f} (`--dry-run` shows the rest). {advice}",
            *lines,
            *_more_ranks(dry),
            *_command(config, fit),
        ]
    )


def _line(remedy: Remedy, saved: str) -> str:
    takes = "" if all(map(is_resumable, remedy.values)) else "; in a new run"
    return f"  {remedy}  # {remedy.effect}{saved}{takes}"


def _command(config: Config | SftConfig, fit: Fit) -> Iterator[str]:
    """Yield what continues the run in less memory, or starts it again where nothing was written yet."""
    shorter = config.shorter_rows(config.train.micro_batch_tokens)
    chosen = [] if fit.ok else fitting_remedies(fit, is_resumable) or []
    if not chosen and shorter is not None:
        chosen = [Remedy({_ROWS: shorter}, "shorter rows")]
    chosen = chosen or [remedy for remedy, _ in _smaller(fit) if all(map(is_resumable, remedy.values))][:1]
    if not chosen:
        return
    command, file = ("sft", SFT_CONFIG) if isinstance(config, SftConfig) else ("train", "config.yaml")
    settings = " ".join(map(str, chosen))
    run = RunDirectory(config.out, config_file=file)
    if (run.path / file).is_file():
        named = {key for remedy in chosen for key in remedy.values}
        settings = " ".join([*_unwritten(run, config, named), settings])
        yield f"To continue from the newest checkpoint: {resume_command(config.out, command=command)} {settings}"
    else:
        yield f"Nothing is written yet. Start again with {settings}"


def _unwritten(run: RunDirectory, config: Config | SftConfig, named: Collection[str]) -> Iterator[str]:
    """Yield what the run's own file does not hold: changes of a resume that did not begin, and rows made shorter."""
    try:
        own = run.any_config()
    except UserError:  # what is wrong with the file says the resume
        return
    for key, _, value in changes(own, config):
        if key.startswith(MUTABLE_KEYS) and key not in named:
            yield shlex.quote(f"{key}={value if isinstance(value, str) else json.dumps(value)}")


def _smaller(fit: Fit) -> Iterator[tuple[Remedy, str]]:
    """For each set of keys, yield the remedy that saves most, and what it saves in each phase."""
    if fit.shares is not None and (least := math.ceil(100 * fit.shares[0]) / 100) < (
        share := engine_share(fit.dry.config)
    ):
        saved = (share - least) * fit.card.total
        yield Remedy({SHARE: least}, "the engine's least share"), f": saves {gib(saved)} in rollouts"
    last = {tuple(remedy.values): remedy for remedy in remedies(fit)}
    for remedy in last.values():
        changed = with_remedies(fit, [remedy])
        if changed is None or (fit.ok and not changed.ok):
            continue
        before, after = fit.dry.memory, changed.dry.memory
        saved = {"the update": before.update - after.update, "rollouts": before.rollout - after.rollout}
        if words := " and ".join(f"{gib(size)} in {phase}" for phase, size in saved.items() if size > 0):
            yield remedy, f": saves {words}"


def _more_ranks(dry: DryRun) -> Iterator[str]:
    """Yield a line about the ranks that take less."""
    more = {ranks: other.memory.update for ranks, other in dry.by_ranks().items() if ranks > dry.num_ranks}
    if less := [f"{ranks}: {size / 2**30:.1f}" for ranks, size in more.items() if size < dry.memory.update]:
        yield f"More ranks take less, also in a resumed run; the update by ranks, GiB: {', '.join(less)}"


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text[text.find(_CPU_ALLOCATOR) :] if _CPU_ALLOCATOR in text else text
    return f"{text.split('. ')[0].rstrip('.')}."
