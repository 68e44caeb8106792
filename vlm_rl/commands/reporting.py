"""Commands that show, track or export a run: report, demo, track, export."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_rl.commands.shared import EXPERIMENTAL, Commands, port
from vlm_rl.errors import UserError


def add_report(commands: Commands) -> None:
    report = commands.add_parser("report", help="write one self-contained HTML page about runs")
    report.add_argument("runs", type=Path, nargs="+", help="run directories")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    report.add_argument("--figure", type=Path, help="also write a wide PNG of the first run")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> None:
    from vlm_rl.report.readme_figure import write_readme_figure
    from vlm_rl.report.run_report import write_report
    from vlm_rl.run.directory import RunDirectory

    runs = [RunDirectory(path).open() for path in options.runs]
    print(write_report(runs, options.out))
    if options.figure:
        print(write_readme_figure(runs[0], options.figure))


def add_demo(commands: Commands) -> None:
    demo = commands.add_parser("demo", help="compare checkpoints' reasoning in the browser")
    demo.add_argument(
        "runs",
        type=Path,
        nargs="*",
        help="run directories, results of eval, folders of study (default: runs/quickstart, else recorded runs)",
    )
    demo.add_argument(
        "--bundle", type=Path, metavar="DIR", help="write the comparison as static files to DIR, and serve nothing"
    )
    demo.add_argument(
        "--view", default="", metavar="QUERY", help="what --bundle holds: the demo's address from its ? on"
    )
    demo.add_argument("--host", default="127.0.0.1", help="address to serve on")
    demo.add_argument("--port", type=port, default=7860, help="port to serve on")
    demo.add_argument("--open-wider", action="store_true", help="allow a host that other machines can reach")
    demo.add_argument("--token-file", type=Path, help="file with the token that visitors must know")
    demo.add_argument("--public-url", default="", metavar="URL", help="address of a reverse proxy before the demo")
    demo.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL[,MODEL]",
        help="an OpenAI-compatible server that the live panel may ask, e.g. remote=http://127.0.0.1:8000/v1",
    )
    demo.add_argument(
        "--endpoint-key",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="the environment variable that holds an endpoint's key",
    )
    demo.add_argument(
        "--live-engine",
        choices=["auto", "vllm", "transformers"],
        default="transformers",
        help=f"engine that answers in the live panel; {EXPERIMENTAL}",
    )
    demo.add_argument("--live-models", type=int, default=2, help="checkpoints that the live panel may keep in memory")
    demo.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> None:
    from vlm_rl.demo.numbers.library import find_runs

    for folder in options.runs:
        find_runs(folder)
    from vlm_rl.demo.default_runs import default_folders, first_view

    if options.bundle is not None:
        from vlm_rl.demo.files.bundle import write_bundle

        folders = options.runs or default_folders()
        view = options.view or first_view(folders)
        size = write_bundle(folders, options.bundle, view=view)
        print(f"{options.bundle / 'index.html'}: {size}")
        return
    if options.view:
        raise UserError("--view says what --bundle holds: give --bundle DIR too")
    from vlm_rl.demo.live.endpoints import parse_endpoints

    if options.live_models < 1:
        raise UserError(f"--live-models is {options.live_models}; it must be at least 1")
    endpoints = parse_endpoints(options.endpoint, options.endpoint_key)
    from vlm_rl.demo.live.panel import LiveOptions
    from vlm_rl.demo.server import launch

    live = LiveOptions(endpoints, engine=options.live_engine, max_loaded=options.live_models)
    folders = options.runs or default_folders()
    launch(
        folders,
        host=options.host,
        port=options.port,
        open_wider=options.open_wider,
        public_url=options.public_url,
        token_file=options.token_file,
        live=live,
        first_view=first_view(folders),
    )


def add_track(commands: Commands) -> None:
    track = commands.add_parser("track", help="send the trackers what they still lack of a run")
    track.add_argument("run", type=Path, help="a run directory")
    track.add_argument("overrides", nargs="*", metavar="log.KEY=VALUE", help="e.g. log.trackers=[wandb]")
    track.set_defaults(command=_track)


def _track(options: argparse.Namespace) -> None:
    from vlm_rl.run.directory import RunDirectory
    from vlm_rl.run.tracking import Tracking

    run = RunDirectory.of_any_kind(options.run)
    log = run.any_config(options.overrides).log
    samples_every = getattr(log, "samples_every", 0)  # a supervised run has no samples
    if not log.trackers:
        raise UserError(
            f"{run.path / run.config_file}: log.trackers is empty: name some, e.g. vlm-rl track {options.run} "
            "log.trackers=[wandb]"
        )
    print("\n".join(Tracking(options.run, log, samples_every=samples_every).close(None)))


def add_export(commands: Commands) -> None:
    export = commands.add_parser("export", help="write a checkpoint as a model folder to use or publish")
    export.add_argument("checkpoint", type=Path, help="RUN/STEP, a checkpoint's folder, or RUN for its last one")
    export.add_argument("--out", type=Path, required=True, help="the folder to make")
    export.add_argument("--merge", action="store_true", help="merge a LoRA adapter with its base model")
    export.add_argument(
        "--push", metavar="USER/NAME", default="", help="also upload it to the hub; a new repository is private"
    )
    export.add_argument("--public", action="store_true", help="with --push: let a new repository be public")
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from vlm_rl.run.export import export

    export(options)
