"""Runs the `keyhole` command: finds a verb, loads its file, and says how it ended."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import NoReturn

import click

from keyhole.arrays import keep_freed_memory
from keyhole.cli.screen import Around
from keyhole.errors import KeyholeError
from keyhole.extras import lacking
from keyhole.logs import say
from keyhole.parts import failed_hook, near_miss, own_frames
from keyhole.signals import ignore_interrupts

INTERRUPTED = 130
_SHOWN = {"help_option_names": ["-h", "--help"], "show_default": True}

VERBS: Mapping[str, Mapping[str, str]] = {
    "Train and compare": {
        "demo": "Train a small model with and without select, and compare.",
        "train": "Train a task.",
        "sweep": "Run every training run behind a figure of the paper.",
        "report": "Draw figures and tables from finished runs.",
        "export": "Write the model of a run to one file.",
        "status": "Show how runs and rounds stand, on one screen.",
        "watch": "Show runs and rounds on a page that is live.",
        "plan": "Price every delivery and aggregation for a workload.",
        "data": "List, inspect and import client data.",
    },
    "Projects": {
        "new": "Write a small project that trains.",
        "run": "Train the run of a project, here or with its devices.",
        "check": "Check a project: who learns what, what a round costs.",
        "up": "Start all parties of a project on this machine.",
        "provision": "Make a start-up kit for each party of a project.",
    },
    "Serve": {
        "serve": "Serve slices to devices and take in their updates.",
        "publish": "Publish the state of a run as a round for devices.",
        "mirror": "Copy published rounds to an object store and back.",
        "relay": "Hide from a slice service who asks for slices.",
        "aggregator": "Add up shares of updates as one of two aggregators.",
        "privacy": "Show what sums have spent of devices' privacy.",
        "token": "Make signing keys, and tokens for devices.",
    },
    "Take part": {
        "device": "Take part in the rounds of a slice service.",
        "lookup": "Fetch rows of a published model in private.",
        "flower": "Train on devices that Flower calls.",
    },
}
"""Role -> verb -> what it does, in the order of `keyhole --help`."""


class _Verbs(click.Group):
    """A group whose verbs stand in files of their own, each loaded when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns all verbs, by role."""
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a verb, or None where there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return super().get_command(ctx, cmd_name)
        try:
            command = getattr(import_module(f"keyhole.cli.{cmd_name}"), cmd_name)
        except ModuleNotFoundError as error:
            raise _of_an_extra(error, cmd_name) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each role, without loading a verb."""
        for role, verbs in VERBS.items():
            with formatter.section(role):
                formatter.write_dl(list(verbs.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Runs a verb; an error in code of the user's own is told by the frames of that code, and a
        library that is not installed by the extra that brings it."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and not own_frames(error):
                raise _of_an_extra(error, str(ctx.invoked_subcommand)) from error
            hook, frames = failed_hook(error), own_frames(error)
            is_ours = isinstance(error, KeyholeError | click.exceptions.Exit | click.ClickException)
            if is_ours or ctx.params["traceback"] or not (hook or frames):
                raise
            say(_told(hook or "code of your own has failed", error, frames))
            raise click.exceptions.Exit(1) from error


def _of_an_extra(error: ModuleNotFoundError, verb: str) -> Exception:
    """What to raise where a verb lacks a library: which extra brings it, if one does."""
    wants = "serve" if verb in VERBS["Serve"] else ""
    return lacking(error, f"keyhole {verb}", wants) or error


def _told(hook: str, error: Exception, frames: str) -> str:
    """One line on what failed, and the lines of the user's own code that led there."""
    notes = [note for note in getattr(error, "__notes__", ()) if note != hook]
    lines = "\n".join([frames.rstrip(), *notes]).strip("\n")
    why = " ".join(f"{type(error).__name__}: {error}".split())
    more = "(KEYHOLE_TRACEBACK=1, or keyhole --traceback, shows every frame)"
    return "\n".join(filter(None, [f"keyhole: {hook}: {why}", lines, more]))


@click.group(cls=_Verbs, context_settings=_SHOWN)
@click.version_option(package_name="keyhole", message="%(prog)s %(version)s")
@click.option(
    "--traceback",
    is_flag=True,
    envvar="KEYHOLE_TRACEBACK",
    help="Show every frame of an error in your own code, those of keyhole and JAX included.",
)
def keyhole(traceback: bool) -> None:
    """Federated select: devices train on the slices of a model they ask for."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command; an error is one line on standard error and a non-zero exit code."""
    keep_freed_memory()
    with ExitStack() as logs:  # what ends a command is written as its log is
        try:
            code = keyhole.main(args, prog_name="keyhole", standalone_mode=False, obj=Around(logs))
        except click.ClickException as error:
            say(f"keyhole: {_in_one_line(error)}", "error")
            code = error.exit_code
        except click.Abort:
            say("keyhole: interrupted", "warning")
            code = INTERRUPTED
        except KeyholeError as error:
            say(f"keyhole: {error}", "error")
            code = error.exit_code
    # All is said and kept: one more interrupt would be a traceback out of the threads and exit
    # hooks, such as JAX's, that are still waited for.
    if code == INTERRUPTED:
        ignore_interrupts()
    atexit.register(ignore_interrupts)
    sys.exit(code)


def _in_one_line(error: click.ClickException) -> str:
    message = " ".join(_message(error).split())
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    glue = " See" if message.endswith("?") else "; see"
    return f"{message.rstrip('.')}{glue} {context.command_path} --help"


def _message(error: click.ClickException) -> str:
    """What went wrong; the nearest name, where one is near, in place of click's list by letters."""
    context = getattr(error, "ctx", None)
    if context is not None and isinstance(error, click.NoSuchOption):
        options = [each for param in context.command.get_params(context) for each in param.opts]
        around = context.find_object(Around) or Around()
        near = near_miss(error.option_name, [*options, *around.known])
    elif context is not None and isinstance(error, click.NoSuchCommand):
        near = near_miss(error.command_name, context.command.list_commands(context))
    else:
        return error.format_message()
    return f"{error.message.rstrip('.')}; {near}" if "mean" in near else error.message
