"""AMC 2023 (math-ai/amc23): competition problems, whose golds some files hold as 27.0."""

from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "amc23",
    hub="math-ai/amc23",
    tables=("**/t*-*.parquet", "amc23*.jsonl", "amc*.parquet", "*.jsonl"),
    num_rows=(40, 83),
)
