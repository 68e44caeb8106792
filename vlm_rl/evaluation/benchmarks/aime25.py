"""AIME 2025 (math-ai/aime25): thirty competition problems, each with a whole number as its answer."""

from dataclasses import replace

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import SAMPLED, TEXT, Stated
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "aime25",
    data_license="Apache-2.0",
    files=BenchmarkFiles(
        hub="math-ai/aime25",
        hub_files=("*.jsonl", "*.parquet", "**/*.parquet"),
        tables=("aime2025*.jsonl", "test.jsonl", "**/*.parquet", "aime25*.jsonl", "*.jsonl"),
        num_rows=(30, 15),
    ),
    protocol=replace(TEXT, **SAMPLED, samples=Stated(32, "ours: as AIME 2024")),
)
