"""`vlm-rl export`: a checkpoint as a folder to use or publish, without the optimizer's state.

    vlm-rl export runs/x/60 --out my-model            # the weights, or the adapter, as the checkpoint has them
    vlm-rl export runs/x/60 --out my-model --merge    # an adapter merged with its base model
    vlm-rl export runs/x/60 --out my-model --push me/my-model    # and uploaded to the hub, private unless --public

The folder holds weights, tokenizer, the base model's generation_config.json, and a model card (README.md).
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_rl.config import Config, SftConfig
from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_MODEL, base_of, load_merged
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.model_files.weights import check_weights
from vlm_rl.run.checkpoint import verify_model
from vlm_rl.run.checkpoint_names import find_checkpoint
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.manifest import MANIFEST, Manifest, read_manifest
from vlm_rl.run.run_files import place_of
from vlm_rl.run.writing import writing
from vlm_rl.untrusted.json_object import read_object

_NOT_EXPORTED = {MANIFEST, "config.json", "generation_config.json"}  # written again, or of no use outside the run
_OF_ADAPTERS = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_MODEL}


def export(options: argparse.Namespace) -> Path:
    """Write the checkpoint `options.checkpoint` to the new folder `options.out`, and return it.

    With `options.push`, a name on the hub, it is uploaded too.

    Raises UserError for what is not a checkpoint of a run, for a damaged one, for a folder that exists, and if the
    hub cannot be reached; in that case the folder has been written.
    """
    if options.push:
        _check_repo(options.push)
    run, folder = find_checkpoint(options.checkpoint)
    out: Path = options.out
    if (out.exists() or out.is_symlink()) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose a different --out")
    check_model_folder(folder)
    verify_model(folder)
    merges = options.merge and base_of(folder) is not None
    if merges:
        check_weights(folder)
    place = place_of(out)
    with writing(out):
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        work.chmod(0o755)
        try:
            _write_model(folder, work, run.any_config(), merges=merges)
            card = model_card(run, read_manifest(folder), is_adapter=base_of(work) is not None)
            (work / "README.md").write_text(card, encoding="utf-8")
            work.rename(place)  # replaces an empty folder
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    print(f"{out}: step {read_manifest(folder).step} of {run.path}{', merged with its base model' if merges else ''}")
    if options.push:
        print(push(out, options.push, private=not options.public))
    return out


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a model folder to the hub with the login of huggingface_hub, and return the address.

    A repository that exists keeps its visibility, and gets a commit. Raises UserError, with the command that uploads
    the folder later, for whatever the client raises: no login, no network, no permission.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Export of vlm-rl")
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        later = f"hf upload {repo} {shlex.quote(str(folder))} . {'--private' if private else '--no-private'}"
        raise UserError(
            f"{folder} is written, but was not uploaded to {repo}: {reason}; after `hf auth login`, where there is a "
            f"network: {later}"
        ) from None
    return str(address)


def _check_repo(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: {error}; give USER/NAME") from None


def _write_model(folder: Path, work: Path, config: Config | SftConfig, *, merges: bool) -> None:
    """Write all but the model card."""
    skipped = _NOT_EXPORTED | (_OF_ADAPTERS if merges else set())
    if merges:
        load_merged(folder).save_pretrained(work)
    else:
        settings = read_object((folder / "config.json").read_bytes())
        settings.pop("use_cache", None)  # off in training; a model that is used wants it
        (work / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in skipped:
            shutil.copyfile(file, work / file.name)
    for owner in (Path(config.model.path), folder):
        if (source := owner / "generation_config.json").is_file():
            shutil.copyfile(source, work / source.name)
            break


# -- the model card --------------------------------------------------------------------------------


def model_card(run: RunDirectory, manifest: Manifest, *, is_adapter: bool) -> str:
    """Return the model card as Markdown: data, recipe, scores, and whether a benchmark was trained on.

    Args:
        run: the run of the checkpoint.
        manifest: of the checkpoint.
        is_adapter: whether the folder holds only an adapter.
    """
    return "\n".join(_card_lines(run, manifest, is_adapter=is_adapter)) + "\n"


def _card_lines(run: RunDirectory, manifest: Manifest, *, is_adapter: bool) -> Iterator[str]:
    config = run.any_config()
    base = short_name(config.model.path)
    library, tags = ("peft", "[vlm-rl, lora]") if is_adapter else ("transformers", "[vlm-rl]")
    yield from (
        "---",
        f"library_name: {library}",
        f"tags: {tags}",
        "---",
        "",
        f"# {run.name}, step {manifest.step}",
        "",
    )
    what = "A LoRA adapter for" if is_adapter else "A fine-tuned"
    how = (
        "supervised fine-tuning"
        if run.config_file == SFT_CONFIG
        else "reinforcement learning with verifiable rewards"
    )
    yield f"{what} {base}, trained by {how}."
    if contaminated := sorted({*run.contaminated(), *manifest.info.get("contaminated", ())}):
        yield f"\n**CONTAMINATED: trained on rows of {', '.join(contaminated)}; its scores there mean nothing.**"
    yield from ("", "## Data", "", *(f"- {Path(name).name}" for name in config.data.train))
    yield from ("", "## Recipe", "", "| setting | value |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in _recipe(config, manifest).items())
    yield from ("", "## Scores", "")
    results = [result for result in run.evals() if result.step in (0, manifest.step)]
    if not results:
        yield "None were measured during training."
        return
    yield from ("| set | step | problems | accuracy | 95 % interval | sampling |", "|---|---|---|---|---|---|")
    yield from map(_score, results)


def _score(result: EvalResult) -> str:
    """Return an evaluation's row. Raises UserError for a summary that lacks one of its cells."""
    summary = result.summary
    try:
        low, high = summary["interval"]
        temperature = summary["sampling"]["temperature"]
        how = f"T {temperature}, avg@{summary['k']}" if temperature else "greedy"
        return (
            f"| {result.benchmark} | {result.step} | {summary['num_problems']} | {result.accuracy:.3f} "
            f"| {low:.3f} to {high:.3f} | {how} |"
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{result.path.with_suffix('.json')} is no summary of vlm-rl eval ({error}): delete it, or evaluate again"
        ) from None


def _recipe(config: Config | SftConfig, manifest: Manifest) -> dict[str, Any]:
    train, lora = config.train, config.model.lora
    trained = "all weights" if lora is None else f"LoRA, rank {lora.ranks}, alpha {lora.alpha}, {lora.targets}"
    if lora is None and config.model.freeze:
        trained = f"all weights but {', '.join(config.model.freeze)}"
    if isinstance(config, SftConfig):
        algorithm, kl = "supervised", {}
        batch, longest = f"{train.mini_batch_prompts} responses", config.data.max_response_tokens
    else:
        rollout, longest = config.rollout, config.rollout.max_tokens
        algorithm, kl = config.algorithm.name, {"KL coefficient": config.algorithm.kl_coef}
        batch = f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses"
    return {
        "algorithm": algorithm,
        "trained": trained,
        "steps": f"{manifest.step} of {train.steps}",
        "batch": batch,
        "longest response": f"{longest} tokens",
        "learning rate": f"{train.lr:g} ({train.optimizer}, {train.schedule})",
        **kl,
        "prompt template": config.data.prompt_template.name,
        "seed": config.seed,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
