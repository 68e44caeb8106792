"""Importing this imports what an engine of a toy model takes most of its start for; processes are then forked."""

from __future__ import annotations

import gc
import importlib

from vlm_rl.samplers.vllm.engine import import_vllm

gc.disable()
import_vllm()
for name in (
    "entrypoints.llm",
    "v1.executor.uniproc_executor",
    "v1.worker.cpu_worker",
    "model_executor.models.qwen2_5_vl",
):
    importlib.import_module(f"vllm.{name}")
importlib.import_module("compressed_tensors")
gc.freeze()  # no collection of a fork looks through what was imported
gc.enable()
