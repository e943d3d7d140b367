"""`agentrl`: train, evaluate, report, replay, describe, serve, measure, try. Heavy imports wait for a command."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from agentrl_jax import __version__
from agentrl_jax.cli import bench, environments, plan, serve, triage
from agentrl_jax.errors import UserError

USER_ERROR, DIVERGED, SIGNALLED = 2, 1, 128
_begun: list[Path] = []  # the run directories of this process, for the line that Ctrl-C leaves


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (a replay diverged, a check failed), 2 (the user can put it
    right), 128 + n where signal n stopped it (Ctrl-C: 130)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parse(argv)
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"agentrl: error: {error}", file=sys.stderr)
        return _ended(USER_ERROR)
    except KeyboardInterrupt as error:
        again = f"; continue with: {_resume_line(argv)}" if _begun and (_begun[-1] / "config.json").is_file() else ""
        print(f"agentrl: stopped{again}", file=sys.stderr)
        return _ended(SIGNALLED + getattr(error, "number", signal.SIGINT))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does Python's own last flush complain
            return _ended(SIGNALLED + signal.SIGPIPE)
        if not _together():
            raise
        traceback.print_exc()
        return _ended(1)


def _unread() -> bool:
    """Whether whoever read the output has enough of it, as `head` has; a worker's pipe may break as well."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return any(state & select.POLLERR for _, state in output.poll(0))


def _together() -> bool:
    """Whether other processes train with this one."""
    return (hosts := sys.modules.get("agentrl_jax.runtime.hosts")) is not None and hosts.joined()


def _ended(code: int) -> int:
    """The exit code; a process that others trained with ends here, since it would wait for them."""
    return sys.modules["agentrl_jax.runtime.hosts"].end(code) if _together() else code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="agentrl", description="Trains LLM agents by reinforcement learning on JAX.")
    parser.add_argument("--version", action="version", version=f"agentrl-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Any, text: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run, takes_overrides=overrides, overrides=[])
        if overrides:
            sub.usage = f"agentrl {name} [options] {(name == 'eval' and 'RUN_DIR') or 'CONFIG'} [name=value ...]"
            sub.epilog = "Settings are overridden by dotted names, such as loop.steps=3 name=trial."
        return sub

    train = command("train", _train, "Run a config: train, evaluate, write the report.", overrides=True)
    train.add_argument("config", metavar="CONFIG", help="a Python file that defines config()")
    train.add_argument("--workers", metavar="URL", help="a Ray cluster, as rollout.workers_url=URL (ray://auto)")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the run directory")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and what it would cost; write nothing"
    )
    hosts = train.add_argument_group("one run on several hosts", "the same command on every host, at the same time")
    hosts.add_argument("--multihost", action="store_true", help="join the hosts that a TPU slice, GKE or Slurm names")
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="join by hand, with --processes and --process")
    hosts.add_argument("--processes", type=int, metavar="N")
    hosts.add_argument("--process", type=int, metavar="I", help="which this is, from 0: that one is at HOST:PORT")
    evaluate = command("eval", _evaluate, "Evaluate the newest checkpoint of a run.", overrides=True)
    evaluate.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, such as runs/quickstart")
    report = command("report", _report, "Write report.html of a run directory, finished or not.")
    report.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, such as runs/quickstart")
    replay = command("replay", _replay, "Re-run a receipt and say where it diverges, and why.")
    replay.add_argument(
        "receipt", metavar="RECEIPT", help="a receipt's JSON file, or receipts.jsonl:N for the N-th line"
    )
    triage.add_arguments(command("triage", triage.run, "Say who is answerable for a run's failed episodes."))
    config = command("config", _config, "Describe a config as JSON.", overrides=True)
    config.add_argument("config", metavar="CONFIG", help="a Python file that defines config()")
    plan.add_arguments(command("plan", _plan, "Say whether a config fits a TPU slice, and how fast.", overrides=True))
    export = command("export", _export, "Write a checkpoint of a run as a Hugging Face directory.")
    export.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, such as runs/quickstart")
    export.add_argument("destination", metavar="DST", help="the directory to make")
    export.add_argument("--checkpoint", type=int, metavar="N", help="its number (default: the newest)")
    export.add_argument("--adapter", action="store_true", help="write the adapters alone, as PEFT keeps them")
    _add_models(command("models", None, "Fetch a pretrained policy into the local cache, or convert one."))
    environments.add_arguments(command("env", None, "List environments, check one, or play in it."), _Parser)
    serve.add_arguments(command("serve", _serve, "Serve a checkpoint to clients of the OpenAI API."))
    bench.add_arguments(command("bench", bench.run, "Measure a part of the package, or compile it for a TPU."))

    # argparse cannot mix a list of positionals with options; what it leaves over are the overrides.
    arguments, rest = parser.parse_known_args(argv)
    stray = [word for word in rest if word.startswith("-") or not arguments.takes_overrides]
    if stray:
        raise UserError(f"unrecognised argument {stray[0]!r}; see agentrl {arguments.command} --help")
    arguments.overrides = rest
    return arguments


def _add_models(models: argparse.ArgumentParser) -> None:
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    pull = actions.add_parser("pull", help="fetch a model by name", allow_abbrev=False)
    pull.add_argument("name", metavar="NAME", help="such as smollm2-135m")
    pull.set_defaults(run=_pull)
    convert = actions.add_parser("convert", help="write a Hugging Face directory", allow_abbrev=False)
    convert.add_argument("source", metavar="SRC", help="a .gguf file or a Hugging Face directory")
    convert.add_argument("destination", metavar="DST", help="the directory to make")
    convert.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights, from a directory")
    convert.set_defaults(run=_convert)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.workers is not None:
        arguments.overrides.append(f"rollout.workers_url={arguments.workers}")
    by_hand = (arguments.coordinator, arguments.processes, arguments.process)
    if any(value is not None for value in by_hand) and (None in by_hand or arguments.multihost):
        raise UserError("--coordinator, --processes and --process go together, without --multihost")
    if arguments.process is not None and not 0 <= arguments.process < arguments.processes:
        raise UserError(
            f"--process {arguments.process} --processes {arguments.processes}: expected --process from 0 to "
            f"{max(0, arguments.processes - 1)}, another one for each process"
        )
    if not arguments.multihost and arguments.coordinator is None:
        return _train_one(arguments, None)
    if arguments.dry_run:
        raise UserError("--dry-run: looks at one host; leave out --multihost and --coordinator")
    from agentrl_jax.runtime.hosts import join

    with join(*by_hand) as hosts:
        return _train_one(arguments, hosts)


def _train_one(arguments: argparse.Namespace, hosts: Any) -> int:
    """Train as the one process that there is, or as one of `hosts`."""
    if hosts is not None:  # where a run is to go on from, one of them has seen
        arguments.resume = hosts.first(arguments.resume)
    with nullcontext() if hosts is None else hosts.leader_first():
        config = _resolved(arguments, resume=arguments.resume)
    directory = Path(config.runs) / config.name
    if arguments.dry_run:
        if arguments.resume:
            raise UserError("--dry-run and --resume: a dry run writes nothing and continues nothing; leave one out")
        from agentrl_jax.cli.configs import describe
        from agentrl_jax.recipes.dry_run import dry_run

        _print_json({"config": describe(config), "run_dir": str(directory), **dry_run(config)})
        return 0
    from agentrl_jax.recipes.directory import Source
    from agentrl_jax.recipes.train import train

    source = Source(file=Path(arguments.config), overrides=arguments.overrides)
    _begun.append(directory)
    summary = train(config, directory, resume=arguments.resume, source=source, hosts=hosts)
    if hosts is not None and not hosts.leads:
        return 0
    print(_outcome(summary))
    print(f"report   {directory / 'report.html'}\nsummary  {directory / 'summary.json'}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    run_dir = _existing_run(arguments.run_dir)
    from agentrl_jax.recipes.train import evaluate_run

    _print_json(evaluate_run(_resolved_run(run_dir, arguments.overrides), run_dir))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    run_dir = _existing_run(arguments.run_dir)
    from agentrl_jax.recipes.export import export

    destination, number = Path(arguments.destination), arguments.checkpoint
    print(export(_resolved_run(run_dir), run_dir, destination, adapter=arguments.adapter, number=number))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    return serve.run(arguments, _resolved_run)


def _report(arguments: argparse.Namespace) -> int:
    from agentrl_jax.report.html import build

    print(build(arguments.run_dir))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from agentrl_jax.cli.receipts import read_receipt

    receipt = read_receipt(arguments.receipt)
    if receipt.ref is None:
        raise UserError(
            f"{arguments.receipt}: the receipt names no environment to replay in (it was played in process)"
        )
    from agentrl_jax.rollout.replay import replay

    divergence = replay(receipt, receipt.ref)
    if divergence is None:
        print(f"reproduced: {len(receipt.steps)} steps, same observations, same verdict ({receipt.replay_id})")
        return 0
    print(f"diverged: {divergence}")
    return DIVERGED


def _config(arguments: argparse.Namespace) -> int:
    from agentrl_jax.cli.configs import describe

    _print_json(describe(_resolved(arguments)))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    return plan.run(arguments, _resolved)


def _pull(arguments: argparse.Namespace) -> int:
    from agentrl_jax.runtime.model_store import pull

    print(pull(arguments.name))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from agentrl_jax.recipes.export import convert

    print(convert(Path(arguments.source), Path(arguments.destination), arguments.dtype))
    return 0


def _resolved(arguments: argparse.Namespace, run_dir: Path | None = None, *, resume: bool = False) -> Any:
    """The config that the file and the overrides give, checked as a whole, with an environment that loads.

    `run_dir`: where a run of it was begun; with `resume` the directory that the config names.
    """
    from agentrl_jax.cli.configs import apply_overrides, load, one_line
    from agentrl_jax.recipes.checks import check
    from agentrl_jax.recipes.config import RunConfig

    config = check(apply_overrides(load(arguments.config, RunConfig), arguments.overrides))
    config = _from_run(config, run_dir if run_dir or not resume else Path(config.runs) / config.name)
    if not config.name or config.name in (".", "..") or "/" in config.name:
        raise UserError(f"name={config.name}: expected a name for the run's directory, without '/'")
    try:
        config.environment.load()
    except UserError:
        raise
    except Exception as error:  # an environment is the user's code and data: whatever it raises is theirs to see
        target, options = config.environment.target, dict(config.environment.options)
        raise UserError(
            f"environment {target!r} with options {options}: {type(error).__name__}: {one_line(error)}"
        ) from error
    return config


def _resolved_run(run_dir: Path, overrides: Sequence[str] = ()) -> Any:
    """The config that the run in `run_dir` was started with, `overrides` on top."""
    from agentrl_jax.recipes.directory import source_of

    source = source_of(run_dir)
    replaced = {override.partition("=")[0] for override in overrides}
    kept = [override for override in source.overrides if override.partition("=")[0] not in replaced]
    return _resolved(argparse.Namespace(config=source.file, overrides=[*kept, *overrides]), run_dir)


def _from_run(config: Any, begun: Path | None) -> Any:
    """A `policy.path` that is a run becomes the export of its newest checkpoint; for a run that was `begun` already,
    the export that it began from, whatever the other run has come to since."""
    from agentrl_jax.recipes.config import PretrainedPolicy
    from agentrl_jax.recipes.directory import began_from, is_run

    policy = config.policy
    if not isinstance(policy, PretrainedPolicy) or not is_run(source := Path(policy.path).expanduser()):
        return config
    from agentrl_jax.recipes.export import exported

    path = began_from(begun) if begun is not None else None
    if path is None or Path(path).parent != source / "exports":
        path = str(exported(_resolved_run(source), source))
    return replace(config, policy=replace(policy, path=path))


def _existing_run(path: str) -> Path:
    if not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path}: holds no run (no config.json); expected a directory that `agentrl train` wrote, "
            "such as runs/quickstart"
        )
    return Path(path)


def _outcome(summary: Mapping[str, Any]) -> str:
    """`success  0.0 % -> 34.0 % -> 95.1 %   violations 0.0 %   tool calls 3.4` of a finished run."""
    steps = [f"{100 * v:.1f} %" for k, v in summary.items() if k.startswith("success_") and isinstance(v, int | float)]
    violations, calls = summary.get("violation_rate"), summary.get("mean_tool_calls")
    parts = [f"success  {' -> '.join(steps)}"] if steps else []
    parts += [f"violations {100 * violations:.1f} %"] if violations is not None else []
    parts += [f"tool calls {calls:.1f}"] if calls is not None else []
    return "   ".join(parts)


def _resume_line(argv: Sequence[str]) -> str:
    words = [*argv, *([] if "--resume" in argv else ["--resume"])]
    return " ".join(["agentrl", *words])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
