"""The models and data sets that the papers' tables need: hub id, size, licence, revision and folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS

NOT_AT_HAND = "see its page"


@dataclass(frozen=True, slots=True)
class Download:
    """A repository of the hub."""

    hub: str
    folder: str  # where the commands look for it
    license: str
    size: str
    is_data: bool = False
    revision: str = "newest"  # no commit has been tried by us: pin the one that you download

    @property
    def command(self) -> str:
        """Return the command that downloads it."""
        kind = " --repo-type dataset" if self.is_data else ""
        return f"hf download {self.hub}{kind} --local-dir {self.folder}"

    def is_there(self) -> bool:
        """Tell whether its folder holds something."""
        folder = Path(self.folder)
        return folder.is_dir() and any(folder.iterdir())


def _model(hub: str, parameters: int, license_name: str) -> Download:
    """Return a model's download; `parameters` in millions, of two bytes each."""
    return Download(hub, f"models/{hub.rpartition('/')[2]}", license_name, f"{parameters * 2e-3:.1f} GB")


MODELS: dict[str, Download] = {
    download.hub.rpartition("/")[2]: download
    for download in (
        _model("Qwen/Qwen2.5-VL-7B-Instruct", 8292, "Apache-2.0"),
        _model("Qwen/Qwen2.5-7B", 7616, "Apache-2.0"),
        _model("Qwen/Qwen3-30B-A3B-Instruct-2507", 30532, "Apache-2.0"),
        _model("Qwen/Qwen2.5-Math-7B", 7616, "Apache-2.0"),
        _model("Qwen/Qwen3-1.7B", 1721, "Apache-2.0"),
        _model("Qwen/Qwen3-4B-Base", 4022, "Apache-2.0"),
        _model("Qwen/Qwen3-8B-Base", 8191, "Apache-2.0"),
        _model("meta-llama/Llama-3.2-3B-Instruct", 3213, "Llama 3.2 Community License, gated"),
    )
}

# By the folder of the prepared set; its value: the name that `vlm-rl prepare` knows, and the download.
TRAINING_SETS: dict[str, tuple[str, Download]] = {
    "virl39k": ("virl39k", Download("TIGER-Lab/ViRL39K", "raw/ViRL39K", "MIT", NOT_AT_HAND, is_data=True)),
    "dapo_math": (
        "dapo",
        Download("BytedTsinghua-SIA/DAPO-Math-17k", "raw/DAPO-Math-17k", "Apache-2.0", "0.3 GB", is_data=True),
    ),
    "polaris": (
        "polaris",
        Download("POLARIS-Project/Polaris-Dataset-53K", "raw/Polaris", "Apache-2.0", NOT_AT_HAND, is_data=True),
    ),
    "math": (
        "math",
        Download("DigitalLearningGmbH/MATH-lighteval", "raw/MATH", NOT_AT_HAND, NOT_AT_HAND, is_data=True),
    ),
}


def benchmark_download(name: str) -> Download:
    """Return the download of a benchmark."""
    benchmark = BENCHMARKS[name]
    folder = f"raw/{benchmark.hub.rpartition('/')[2]}"
    return Download(benchmark.hub, folder, benchmark.license or NOT_AT_HAND, NOT_AT_HAND, is_data=True)
