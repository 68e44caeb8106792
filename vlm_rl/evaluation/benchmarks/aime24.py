"""AIME 2024 (HuggingFaceH4/aime_2024): thirty competition problems, each with a whole number as its answer."""

from dataclasses import replace

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import LUSPO, SAMPLED, TEXT, Stated
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "aime24",
    files=BenchmarkFiles(
        hub="HuggingFaceH4/aime_2024",
        tables=("**/train-*.parquet", "aime24*.jsonl", "aime_2024*.parquet", "*.jsonl"),
        num_rows=(30,),
    ),
    protocol=replace(TEXT, **SAMPLED, samples=Stated(32, f"{LUSPO}, states avg@32")),
)
