"""The command line: parse, call, print. One module per command, nothing heavy imported before a command needs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from eyas.cli.bench import bench_command
from eyas.cli.calibrate import calibrate_command
from eyas.cli.chat import chat_command
from eyas.cli.data import data_app
from eyas.cli.export import export_command
from eyas.cli.generate import generate_command
from eyas.cli.inspect import inspect_command
from eyas.cli.models import info_command, pull_command
from eyas.cli.perplexity import perplexity_command
from eyas.cli.profile import profile_command
from eyas.cli.train import train_command
from eyas.cli.tune import tune_command
from eyas.environment import version
from eyas.errors import EyasError

app = typer.Typer(
    name="eyas",
    help="Lossless speculative decoding with context-aware draft trees (EAGLE-2).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("inspect")(inspect_command)
app.command("bench")(bench_command)
app.add_typer(data_app, name="data")
app.command("train")(train_command)
app.command("pull")(pull_command)
app.command("info")(info_command)
app.command("tune")(tune_command)
app.command("profile")(profile_command)
app.command("perplexity")(perplexity_command)
app.command("calibrate")(calibrate_command)
app.command("export")(export_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"eyas {version('eyas') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Lossless speculative decoding with context-aware draft trees (EAGLE-2)."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit code 2 and one message for a user's mistake or what the system refuses (a full disk),
    130 for Ctrl-C, never a traceback for any of them."""
    with _usable_streams():
        try:
            try:
                app(arguments)
            finally:
                sys.stdout.flush()  # here, where a failure can still be told
        except EyasError as error:
            print(f"eyas: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader of our output left, as ``head`` does
            sys.stdout = None
            raise SystemExit(141) from None
        except OSError as error:
            print(f"eyas: {error}", file=sys.stderr)
            sys.stdout = None  # what it still holds cannot be written
            raise SystemExit(2) from None


@contextmanager
def _usable_streams() -> Iterator[None]:
    """Voids in place of standard streams that are closed, and a stand-in for characters that output cannot spell."""
    with ExitStack() as stack:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, stack.enter_context(open(os.devnull, mode)))
                stack.callback(setattr, sys, name, None)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        yield
