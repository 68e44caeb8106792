"""AIME 2025 (math-ai/aime25): thirty competition problems, each with a whole number as its answer."""

from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "aime25",
    hub="math-ai/aime25",
    hub_files=("*.jsonl", "*.parquet", "**/*.parquet"),
    tables=("aime2025*.jsonl", "test.jsonl", "**/*.parquet", "aime25*.jsonl", "*.jsonl"),
    num_rows=(30, 15),
)
