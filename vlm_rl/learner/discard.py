"""Forget gradients that no step shall apply."""

from __future__ import annotations

from typing import Any


def discard_gradients(engine: Any) -> None:
    """Let a DeepSpeed engine forget the gradients since its last step, those of a failed backward pass too.

    DeepSpeed clears them in its step only, so the parts are named here: gradients, sums over rows, filled buckets
    that are not reduced, and the hooks' counters. Under ZeRO 3 parameters may be gathered; they are sharded again.
    """
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    engine.zero_grad()
    engine._unmanaged_backward_count = 0
    if stage == 0:
        return
    zero.zero_grad(set_to_none=True)
    while zero._backward_hook_state.backward_active_depth:
        zero.exit_backward()
    zero.clear_backward_seen_flag()
    if not hasattr(zero, "ipg_buckets"):  # ZeRO 1 in bfloat16, whose sums are cleared by now
        return
    zero.averaged_gradients.clear()
    for number in range(len(zero.params_already_reduced)):
        zero.params_already_reduced[number] = False
    for bucket in zero.ipg_buckets.values():
        (bucket.clear_params if stage == 3 else bucket.clear)()
    if stage == 3:
        zero.zero_grad(set_to_none=True)  # the flag above has counted a row
        coordinator = zero.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        zero.checkpoint_event_prologue()
        zero.checkpoint_event_epilogue()
        return
    zero._release_ipg_buffers()
    zero.extra_large_param_to_reduce.clear()  # one that is larger than a bucket
    zero.all_grad_tensors.clear()
    zero.micro_step_id = -1
    if zero.cpu_offload:
        zero._wait_for_offload_copies()
        zero._offload_accumulated_param_ids = set()
