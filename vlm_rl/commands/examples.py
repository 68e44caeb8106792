"""Two examples of each command, for the end of its help."""

from __future__ import annotations

_EXAMPLES = {
    "prepare": (
        "vlm-rl prepare raw/mine --out data/mine --hold-out 0.1",
        "vlm-rl prepare virl39k --source raw/ViRL39K --out data/virl39k",
    ),
    "init": (
        "vlm-rl init --from easyr1.yaml --out mine.yaml",
        "vlm-rl init --model Qwen/Qwen2.5-VL-7B-Instruct --data data/mine --out mine.yaml",
    ),
    "config": ("vlm-rl config train.lr", "vlm-rl config rollout"),
    "plan": ("vlm-rl plan mine.yaml --gpus 8 16", "vlm-rl plan mine.yaml --run runs/mine --run-gpus 8"),
    "sft": ("vlm-rl sft cold_start.yaml --dry-run", "vlm-rl sft runs/cold_start --resume"),
    "train": ("vlm-rl train mine.yaml out=runs/mine train.lr=1e-6", "vlm-rl train runs/mine --resume"),
    "serve": ("vlm-rl serve mine.yaml", "vlm-rl serve mine.yaml --port 8001"),
    "eval": (
        "vlm-rl eval --model runs/mine/best --data data/mathvista --out runs/mine-eval",
        "vlm-rl eval compare runs/a-eval runs/b-eval",
    ),
    "score": (
        "vlm-rl score --benchmark mathvista --responses answers.json",
        "vlm-rl score --benchmark logicvista --annotations dataset.json --responses answers.json --mode official",
    ),
    "grade": (
        "vlm-rl grade --gold 1/2 --response '\\boxed{0.5}'",
        "vlm-rl grade --gold B --response 'So the answer is \\boxed{B}.'",
    ),
    "study": ("vlm-rl study study.yaml --out runs/study", "vlm-rl study study.yaml --out runs/study --report-only"),
    "paper": ("vlm-rl paper luspo-vl", "vlm-rl paper ba"),
    "report": ("vlm-rl report runs/mine", "vlm-rl report runs/a runs/b --out two.html"),
    "demo": ("vlm-rl demo runs/a runs/b", "vlm-rl demo runs/a runs/b --bundle site"),
    "track": ("vlm-rl track runs/mine", "vlm-rl track runs/mine log.trackers=[tensorboard]"),
    "export": ("vlm-rl export runs/mine/best --out models/mine", "vlm-rl export runs/mine --merge --out models/mine"),
    "quickstart": ("vlm-rl quickstart", "vlm-rl quickstart --tools --out runs/tools"),
    "doctor": ("vlm-rl doctor", "vlm-rl doctor --config mine.yaml"),
}


def examples_of(program: str) -> str:
    """Return the examples of a command, such as "vlm-rl train", a line each; empty if it has none."""
    name = program.removeprefix("vlm-rl ")
    return "\n".join(["examples:", *(f"  {line}" for line in _EXAMPLES[name])]) if name in _EXAMPLES else ""
