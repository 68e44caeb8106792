"""Minerva (math-ai/minervamath), by type.

The gold is a text, the last box of a solution, or a list of alternatives.
"""

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import TEXT
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "minerva",
    category="type",
    files=BenchmarkFiles(
        hub="math-ai/minervamath",
        hub_files=("*.jsonl", "*.parquet", "**/*.parquet"),
        tables=("**/test-*.parquet", "minerva*.jsonl", "minerva*.parquet", "*.jsonl"),
        num_rows=(272,),
    ),
    protocol=TEXT,
)
