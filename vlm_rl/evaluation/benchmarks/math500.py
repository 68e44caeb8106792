"""MATH-500 (HuggingFaceH4/MATH-500): 500 problems of MATH, by level and subject."""

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import TEXT
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "math500",
    category="subject",
    difficulties={"1": "easy", "2": "mid", "3": "mid", "4": "hard", "5": "hard"},  # arXiv 2601.08521, figure 1c
    files=BenchmarkFiles(
        hub="HuggingFaceH4/MATH-500",
        hub_files=("*.jsonl", "*.parquet", "**/*.parquet"),
        tables=("test.jsonl", "**/test-*.parquet", "math500*.jsonl", "*.parquet"),
        num_rows=(500,),
    ),
    protocol=TEXT,
)
