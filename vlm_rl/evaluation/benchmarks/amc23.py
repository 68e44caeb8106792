"""AMC 2023 (math-ai/amc23): competition problems, whose golds some files hold as 27.0."""

from dataclasses import replace

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import SAMPLED, TEXT, Stated
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "amc23",
    files=BenchmarkFiles(
        hub="math-ai/amc23",
        tables=("**/t*-*.parquet", "amc23*.jsonl", "amc*.parquet", "*.jsonl"),
        num_rows=(40, 83),
    ),
    protocol=replace(TEXT, **SAMPLED, samples=Stated(32, "ours: forty problems, as AIME's thirty")),
)
