"""The command line: assembles the commands of `marfl.commands` and turns every expected error into one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from marfl import __version__
from marfl.commands.doctor import doctor, show_id
from marfl.commands.peer import run_peer
from marfl.commands.peers_seen import show_peers
from marfl.commands.plan import show_plan
from marfl.commands.privacy import show_privacy
from marfl.commands.report import report
from marfl.commands.reproduce import reproduce
from marfl.commands.simulate import run_simulation
from marfl.commands.swarm import run_swarm
from marfl.commands.swarm_key import swarm_key
from marfl.commands.sweep import sweep
from marfl.commands.watch import watch
from marfl.errors import InputError, MarflError

HELP = {"help_option_names": ["-h", "--help"]}
KINDS = {"<str>": "TEXT", "<list[str]>": "TEXT", "<path>": "PATH", "<int>": "INTEGER", "<float>": "NUMBER"}


class Command(TyperCommand):
    """A command whose help says in words what a flag takes, and nothing where it takes nothing."""

    def get_params(self, ctx: Any) -> list[Any]:
        flags: list[Any] = super().get_params(ctx)
        for flag in flags:
            if isinstance(flag, TyperOption) and flag.metavar is None:
                kind = flag.display_type(ctx).replace(" range", "")
                flag.metavar = "" if flag.is_flag else KINDS[kind]
        return flags


app = typer.Typer(
    name="marfl",
    help="Peer-to-peer federated learning without a server.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "id": show_id,
    "peer": run_peer,
    "peers": show_peers,
    "plan": show_plan,
    "privacy": show_privacy,
    "report": report,
    "reproduce": reproduce,
    "simulate": run_simulation,
    "swarm": run_swarm,
    "swarm-key": swarm_key,
    "sweep": sweep,
    "watch": watch,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command, context_settings=HELP)(command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Peer-to-peer federated learning without a server."""
    if version:
        typer.echo(f"marfl {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; wrong input is one line on stderr and code 2, no traceback."""
    try:
        code = app(args=arguments, prog_name="marfl", standalone_mode=False)
    except (MarflError, typer.TyperException) as error:
        return _complain(error)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "hivemind":
            raise
        return _complain(InputError("real peers need the extra swarm: pip install 'marfl[swarm]' (Linux and macOS)"))
    except typer.Abort:
        print("marfl: stopped", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def _complain(error: MarflError | typer.TyperException) -> int:
    message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    print("marfl:", " ".join(message.split()), file=sys.stderr)
    return 2
