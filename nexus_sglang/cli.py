"""The ``nexus-sglang`` command. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys

from nexus_sglang.errors import ConfigError

from . import __version__
from .evaluation import command as suite
from .harness.models import MODELS, ModelError, cache_root, ensure_model


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0, or 1 if the work failed, or 2 if a name or value on the command line is not usable.
        Like every argparse program it raises SystemExit for --help, --version and usage errors.
    """
    parser = argparse.ArgumentParser(prog="nexus-sglang", description="KV-cache eviction inside SGLang's radix cache.")
    parser.add_argument("--version", action="version", version=f"nexus-sglang {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _add_model,
        _add_policies,
        suite.add_command,
        _add_doctor,
    ):  # each sets run=function(args) -> exit status
        add(commands)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `nexus-sglang policies | head`: nobody reads on, which is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConfigError, ModelError) as err:
        print(f"nexus-sglang: {err}", file=sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1


def _add_model(commands: argparse._SubParsersAction) -> None:
    text = "make a small model for demos and tests (once) and print its folder"
    command = commands.add_parser("model", help=text, description=text)
    command.add_argument("name", metavar="NAME", help=", ".join(sorted(MODELS)))
    command.set_defaults(run=_model)


def _model(args: argparse.Namespace) -> int:
    print(ensure_model(args.name, log=lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _add_policies(commands: argparse._SubParsersAction) -> None:
    text = "list the eviction policies, their fields with defaults, and where they come from"
    command = commands.add_parser("policies", help=text, description=text)
    command.add_argument("name", metavar="NAME", nargs="?", help="only this one; module:Class for one of your own")
    command.set_defaults(run=_policies)


def _policies(args: argparse.Namespace) -> int:
    from .policy import POLICIES, find_policy  # here because it imports torch, seconds that `model` need not wait

    chosen = {args.name: find_policy(args.name)} if args.name else POLICIES
    width = max(map(len, chosen))
    for name, cls in chosen.items():
        # Fields are printed as the JSON that --kv-policy-config takes.
        fields = json.dumps({f.name: _default(f) for f in dataclasses.fields(cls)}, default=str)
        print(f"{name:{width}}  fields  {fields}")
        print(f"{'':{width}}  source  {getattr(cls, 'source', 'not given')}")
    return 0


def _default(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "(required)" if field.default is dataclasses.MISSING else field.default


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    text = "look at this installation: versions, hooks, attention backend, kernels, memory; status 1 for a fault"
    command = commands.add_parser("doctor", help=text, description=text)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    print("looking at SGLang and this machine, about half a minute", file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):  # what SGLang prints while it is imported
        from .sglang_plugin import doctor  # imports torch and SGLang, for which no other command waits

        findings = doctor.examine(cache_root())
    faults = doctor.faults(findings)
    if args.json:
        report = {"faults": faults, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        print(doctor.as_text(findings))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
