"""DeepSpeed: how it is imported, what it is told, and what it cannot train. The only file that imports it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from vlm_rl.config import TrainConfig, explain
from vlm_rl.devices import has_gpu, tell_deepspeed_of_the_cpu
from vlm_rl.errors import UserError, near
from vlm_rl.learner.regroup import (
    SavedGroup,
    parameter_groups,
    regrouped,
    saved_groups,
    stage_of,
    whole_groups,
    write_weights,
)

_WHOLE = "mp_rank_00_model_states.pt"  # the weights, and in ZeRO 0 the optimizer's state; ZeRO 3 writes none


def start_engine(model: nn.Module, config: TrainConfig, *, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Wrap the model in a DeepSpeed engine, which moves it to the rank's device.

    Args:
        model: all of its parameters have one dtype.
        config: the ZeRO stage, and train.deepspeed.
        optimizer: over the trainable parameters; None for a model that is not trained.
    """
    dtype = next(model.parameters()).dtype
    trainable = None if optimizer is None else [p for p in model.parameters() if p.requires_grad]
    # Any: DeepSpeed's annotations name every optimizer it knows and none of what they share
    initialize: Any = import_deepspeed().initialize
    return initialize(
        model=model, optimizer=optimizer, model_parameters=trainable, config=deepspeed_block(config, dtype)
    )[0]


def save_checkpoint(
    engine: Any, folder: Path, *, tag: str, write: Callable[[Any, str], object], whole: bool = True
) -> None:
    """Save the engine's state.

    DeepSpeed's own asynchronous engine (`decoupled`) does not fit: it waits before the next optimizer step, since it
    copies nothing; it says nothing where its process has died; and it hashes no file.

    Args:
        engine: a DeepSpeed engine.
        folder: where to write; shared by all ranks.
        tag: the name of the folder in it.
        write: gets each file's content and path.
        whole: save the frozen parameters too.
    """
    engine.checkpoint_engine.save = lambda state_dict, path: write(state_dict, path)
    engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=not whole)


def load_checkpoint(engine: Any, folder: Path, *, tag: str, strict: bool = True, same_run: bool = True) -> bool:
    """Restore what `engine.save_checkpoint(folder, tag)` wrote, and run no code; return False where there is nothing.

    The number of ranks and the ZeRO stage may differ from those of the run that wrote it. The caller has then loaded
    the frozen weights, as under ZeRO 3.

    DeepSpeed's files are pickles, and a pickle may name any function to be called. torch is told to build nothing but
    tensors, plain values and the three classes that DeepSpeed stores.

    Args:
        engine: of DeepSpeed; all ranks call this together.
        folder: that it was saved to.
        tag: the name of the folder in it.
        strict: every parameter must be there; otherwise those that are not keep their values.
        same_run: whether the run that wrote it had the same parameters and options; otherwise that is checked.

    Raises UserError, which names the file, for anything else in a file.
    """
    import_deepspeed()
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    engine.checkpoint_engine.load = partial(_read_safely, engine.checkpoint_engine.load)
    files, whole = folder / tag, folder / tag / _WHOLE
    paths = sorted(files.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank_of)
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]), _weights_only():
        if not paths and not whole.is_file():
            return False
        shards = [_read_mapped(path)["optimizer_state_dict"] for path in paths]
        is_alike = stage_of(shards) == engine.zero_optimization_stage()
        if same_run and is_alike and len(shards) in (0, torch.distributed.get_world_size()):
            return engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)[0] is not None
        try:
            _check_order(engine)
            _load_groups(engine, _groups(engine, shards, whole))
        except ValueError as error:
            here = f"ZeRO {engine.zero_optimization_stage()} on {torch.distributed.get_world_size()} ranks"
            raise UserError(
                f"{files}: what ZeRO {stage_of(shards)} saved cannot be cut for {here}: {error}: resume with the "
                "stage and the number of ranks that it was saved with"
            ) from None
        return True


def _rank_of(shard: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)_", shard.name)
    assert match, shard
    return int(match[1])


def _read_safely(read: Callable[..., Any], path: str, map_location: Any = None) -> Any:
    try:
        return read(path, map_location=map_location)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {named[1]}" if named else type(error).__name__
        raise UserError(
            f"{path} is not a file that DeepSpeed wrote ({reason}), and nothing in it was run: "
            "move this checkpoint away, and do not trust where it comes from"
        ) from None


def _read_mapped(path: Path) -> Any:
    """Read a file of DeepSpeed's, of whose tensors only those are read that are used."""
    return _read_safely(partial(torch.load, mmap=True), str(path), "cpu")


def _check_order(engine: Any) -> None:
    """Raise ValueError if the order of a row's parameters depends on the number of ranks."""
    if engine._config.zero_config.round_robin_gradients:
        raise ValueError("train.deepspeed.zero_optimization.round_robin_gradients is set, which orders by ranks")


def _groups(engine: Any, shards: Sequence[Mapping[str, Any]], whole: Path) -> list[SavedGroup]:
    """Return the masters and moments of shards, or where there are none, those that ZeRO 0 wrote into one file."""
    parameters = parameter_groups(engine.optimizer)
    if shards:
        return saved_groups(shards, parameters)
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    saved = _read_mapped(whole)
    return whole_groups(
        saved["optimizer"], saved["module"], [[name_of[id(parameter)] for parameter in group] for group in parameters]
    )


def _load_groups(engine: Any, groups: Sequence[SavedGroup]) -> None:
    """Load masters and moments that different ranks or a different stage wrote, and the weights that follow."""
    optimizer, stage, rank = engine.optimizer, engine.zero_optimization_stage(), torch.distributed.get_rank()
    mine = regrouped(optimizer, groups, zero_stage=stage, rank=rank)
    if stage < 3:
        write_weights(optimizer, groups)
    if stage == 0:
        optimizer.load_state_dict(mine)
        return
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    # DeepSpeed looks up its rank in a list of all states.
    optimizer.load_state_dict([None] * rank + [mine], load_from_fp32_weights=True)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let every torch.load be one with weights_only=True, whatever its caller asks for; DeepSpeed asks for False."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    previous = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if previous is not None:
            os.environ[name] = previous


def gathered(parameters: Sequence[torch.Tensor], *, zero_stage: int) -> AbstractContextManager[Any]:
    """Hold the parameters whole on every rank for the length of a `with` block; ZeRO 3 shards them otherwise."""
    return import_deepspeed().zero.GatheredParameters(parameters) if zero_stage == 3 else nullcontext()


@contextmanager
def sharded_loading(config: TrainConfig | None, dtype: torch.dtype) -> Iterator[None]:
    """Let transformers shard the models that it loads in a `with` block over the ranks, where the stage is ZeRO 3.

    No rank then holds more than its share and one module. None, or a different stage, changes nothing. Collective.
    """
    if config is None or config.zero_stage != 3:
        yield
        return
    zero = import_deepspeed().zero
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    settings = HfDeepSpeedConfig(deepspeed_block(config, dtype))  # in force for as long as it is referenced
    init = zero.Init
    # By default it rounds the constants that modules make too: rotary frequencies in bfloat16 are off by up to .4 %.
    zero.Init = partial(init, tensor_overrides=[])
    try:
        yield
    finally:
        zero.Init = init
        del settings
        unset_hf_deepspeed_config()  # an exception's traceback may still reference it


_READ_PARTS = {"VisionEmbeddings": "position_embedding", "GatedDeltaNet": "conv1d"}
"""Ends of the names of classes whose forward reads a part's weight without calling the part: GLM-4V's embeddings, and
linear attention."""


def register_reads(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Have sharded parameters of a module's parts whole during its own forward and backward pass, too."""
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            import_deepspeed().zero.register_external_parameter(module, parameter)


@contextmanager
def gathered_where_used(model: nn.Module) -> Iterator[None]:
    """Let a model that was loaded in shards compute without an engine: each module gathers the parameters it reads.

    Collective: all ranks call the same modules in the same order. A model that is not sharded stays as it is.
    """
    hooks = []
    parts = {module: [*_read_of_parts(module)] for module in model.modules()}
    held = {id(parameter) for read in parts.values() for parameter in read}  # by whoever calls the part, if anybody
    for module, more in parts.items():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in held]
        if read := [parameter for parameter in (*own, *more) if hasattr(parameter, "ds_id")]:
            whole = gathered(read, zero_stage=3)
            hooks.append(module.register_forward_pre_hook(lambda *_, whole=whole: whole.__enter__()))
            hooks.append(module.register_forward_hook(lambda *_, whole=whole: whole.__exit__(None, None, None)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _read_of_parts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of its parts that a module's forward reads."""
    yield from getattr(module, "_external_params", {}).values()  # of register_reads
    for end, part in _READ_PARTS.items():
        if type(module).__name__.endswith(end) and hasattr(module, part):
            yield from module.get_submodule(part).parameters()


def offload_optimizer(engine: Any) -> None:
    """Move masters and moments to host memory, until `reload_optimizer`. The engine is of ZeRO 2 or 3.

    ZeRO 1 in bfloat16 is a class of DeepSpeed's that cannot move them.
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    moved = {State.optim_states, State.hp_params}
    if engine.zero_optimization_stage() < 3:
        engine.offload_states(include=moved, pin_memory=engine.device.type == "cuda")
    elif not engine.optimizer.offloaded_states:
        _move_shards(engine, torch.device("cpu"))
        engine.optimizer.offloaded_states |= moved


def reload_optimizer(engine: Any) -> None:
    """Move masters and moments back to the engine's device, if they are in host memory."""
    if engine.zero_optimization_stage() < 3:
        engine.reload_states()
    elif engine.optimizer.offloaded_states:
        _move_shards(engine, engine.device)
        engine.optimizer.offloaded_states.clear()


def _move_shards(engine: Any, device: torch.device) -> None:
    """Copy ZeRO 3's masters and moments to the device. DeepSpeed's own `offload_states` takes only its own Adam.

    Float32 weights are their own masters: parameters point into them, so they stay where they are.
    """
    zero = engine.optimizer
    weights = {id(shard) for shard in zero.fp16_partitioned_groups_flat}
    masters = [shard for shard in zero.fp32_partitioned_groups_flat if id(shard) not in weights]
    moments = [
        state[key] for state in zero.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq") if key in state
    ]
    is_pinned = engine.device.type == "cuda" and device.type == "cpu"
    for tensor in (*masters, *moments):
        tensor.data = torch.empty_like(tensor, device=device, pin_memory=is_pinned).copy_(tensor.detach())
    if engine.device.type == "cuda" and device.type == "cpu":
        torch.cuda.empty_cache()  # so that the engine finds the room


def least_zero_stage(dtype: torch.dtype) -> Literal[0, 2]:
    """Return the stage that costs a small model least: 0 without masters in float32, 2 with them."""
    return 0 if dtype == torch.float32 else 2


def check_zero_stage(zero_stage: int, dtype: torch.dtype) -> None:
    """Raise UserError for weights that this ZeRO stage cannot train."""
    if dtype == torch.bfloat16 and zero_stage == 0:
        raise UserError(
            "train.zero_stage is 0 with bfloat16 weights: only stages 1 to 3 keep float32 master weights; "
            "set train.zero_stage=2, or model.dtype=float32"
        )


def check_deepspeed_options(config: TrainConfig) -> None:
    """Raise UserError with a line for each key of train.deepspeed that DeepSpeed does not know, or refuses."""
    if not (options := config.deepspeed):
        return
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    where = "train.deepspeed"
    block = _Asked(deepspeed_block(config, torch.float32))
    try:
        DeepSpeedZeroConfig(**{**options.get("zero_optimization", {}), "stage": config.zero_stage})
        DeepSpeedConfig(block)
    except ValidationError as error:
        details = error.errors()
        if error.title == DeepSpeedZeroConfig.__name__:
            of_zero = partial(explain, f"{where}.zero_optimization", kind=DeepSpeedZeroConfig, overrides=[])
            lines = [line for detail in details for line in of_zero(detail)]
        else:  # of the class of another block
            keys = [".".join(map(str, detail["loc"])) for detail in details]
            lines = [
                f"{where} ({error.title}): {key} is {detail['input']!r}: {detail['msg']}"
                for key, detail in zip(keys, details, strict=True)
            ]
        raise UserError("\n".join(lines)) from None
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        # for keys that are no names, values of another form, and what does not go together
        raise UserError(f"{where}: DeepSpeed refuses it: {error}") from None
    if unknown := [key for key in options if key not in block.asked]:
        hint = partial(near, known=sorted(block.asked), otherwise="DeepSpeed would ignore it; remove it")
        raise UserError("\n".join(f"{where}: unknown key {key}: {hint(key)}" for key in unknown))


class _Asked(dict[str, Any]):
    """DeepSpeed's configuration, which remembers the keys that it is asked for: DeepSpeed ignores all others."""

    def __init__(self, block: dict[str, Any]) -> None:
        super().__init__(block)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:  # whose `in` asks here
        return KeysView(self)


def deepspeed_block(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run: ours, with train.deepspeed merged over it.

    Clipping is the gradient guard's, so that it is the same in every stage.
    """
    block: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the optimizer behind the guard works on the host too
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": config.zero_stage},
    }
    if dtype == torch.bfloat16 and config.zero_stage >= 1:
        block["data_types"] = {"grad_accum_dtype": "fp32"}  # a bfloat16 sum over many rows loses the small ones
    for key, value in config.deepspeed.items():
        is_nested = isinstance(value, dict) and isinstance(block.get(key), dict)
        block[key] = {**block[key], **value} if is_nested else value
    return block


def import_deepspeed() -> ModuleType:
    """Return deepspeed, told which device it has, compiling nothing, and without the notices of every start.

    On a CPU it would build a shared-memory all-reduce behind a lock file. A process that is killed meanwhile
    leaves the lock behind, and every later start waits for it forever. torch's own gloo does the same work.
    """
    tell_deepspeed_of_the_cpu()
    if not has_gpu():
        os.environ.setdefault("LOCAL_SIZE", "1")  # ZeRO 3 would start numactl at each reduction to count devices
    level = logging.INFO if os.environ.get("VLM_RL_OUTPUT") == "verbose" else logging.ERROR
    for name in ("DeepSpeed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(level)
    import deepspeed

    deepspeed.ops.__dict__["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(level)  # the import sets it back
    return deepspeed
