"""The entry point: the table of commands, and how every failure ends.

Only click is imported here, so that `kvctl --help` and completion answer at once.
"""

from __future__ import annotations

import errno
import os
import sys

try:
    import click

    from sidecar.cli.failures import UNWRITTEN, Refusal, unwritten
    from sidecar.cli.lazy import Entry, LazyGroup, ReaderLeft
except KeyboardInterrupt:
    # Ctrl-C while Python still reads modules: there is no click yet to say it.
    os.write(2, b"kvctl: interrupted\n")
    os._exit(130)

_AT = "sidecar.cli.commands"

COMMANDS = {
    "reset": Entry(f"{_AT}.reset:reset", "Forget cached prefixes, without stopping traffic."),
    "reorder": Entry(f"{_AT}.reorder:reorder", "Put free KV blocks back into block-id order."),
    "admission": Entry(f"{_AT}.admission:admission", "Say whether requests are admitted, and if not, why."),
    "relieve": Entry(f"{_AT}.relieve:relieve", "Free the blocks of waiting requests that deadlock admissions."),
    "replicas": Entry(f"{_AT}.replicas:replicas", "List replicas: who they are, versions, what they can do."),
    "top": Entry(f"{_AT}.top:top", "Watch the fleet on a live screen."),
    "scheduling": Entry(f"{_AT}.scheduling:scheduling", "Pause and resume the schedulers of engines."),
    "ops": Entry(f"{_AT}.ops:ops", "Operations on record at the coordinator."),
    "doctor": Entry(f"{_AT}.doctor:doctor", "Check everything between here and the engines, and say what to do."),
    "local": Entry(f"{_AT}.local:local", "Run a small fleet of real engines on this machine."),
    "demo": Entry(f"{_AT}.local:demo", "See what kvctl promises, measured on real engines."),
    "config": Entry(f"{_AT}.config:config", "Contexts: which fleet commands talk to."),
    "hook": Entry(f"{_AT}.hook:hook", "Container hooks for Kubernetes."),
    "completion": Entry(f"{_AT}.completion:completion", "Print the completion script of a shell."),
    "version": Entry(f"{_AT}.version:version", "Print the version."),
}

HELP = """Administer the KV caches of a fleet of vLLM replicas while they serve.

Start with `kvctl local up` for a fleet on this machine, or name replicas with --target, --inventory,
--coordinator or a context.

\b
Exit codes: 0 all succeeded, 1 all failed, 2 usage, 3 some succeeded,
4 unreachable or denied, 5 deadline passed, outcome unknown or not shown.
"""

cli = LazyGroup(
    COMMANDS,
    name="kvctl",
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from engine_bridge import __version__

        click.echo(f"kvctl {__version__}")
        ctx.exit()


cli.params.append(
    click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version, hidden=True)
)


def main() -> None:
    """Run kvctl and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run kvctl; returns the exit code. Nothing escapes as a traceback unless KVCTL_DEBUG is set."""
    # gRPC's C++ part writes its own lines to stderr, between ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _replace_missing_streams()
    _tolerate_any_text()
    try:
        code = cli.main(args=arguments, prog_name="kvctl", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        _complain(error)
        return 2
    except Refusal as error:
        error.show()
        return error.code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("kvctl: interrupted", err=True)
        return 130
    except (BrokenPipeError, ReaderLeft):
        _discard_stdout()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and _came_from_stdout(error):
            unwritten(error).show()
            _discard_stdout()
            return UNWRITTEN
        if os.environ.get("KVCTL_DEBUG"):
            raise
        text = " ".join(str(error).split()) or "no text"
        click.echo(
            f"kvctl: a defect in kvctl: {type(error).__name__}: {text} (KVCTL_DEBUG=1 shows the trace)", err=True
        )
        return 1


def _complain(error: click.UsageError) -> None:
    where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
    click.echo(f"kvctl: {' '.join(error.format_message().split())}{where}", err=True)


def _replace_missing_streams() -> None:
    """`kvctl ... >&-` leaves Python without stdout. What would go there goes nowhere; the exit code still counts."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF})


def _came_from_stdout(error: OSError) -> bool:
    """Whether stdout is what failed, in click's own printing: a stream's error has no file name, any other has one."""
    return error.filename is None and error.errno in _WRITE_ERRORS


def _tolerate_any_text() -> None:
    """An ASCII terminal shows an escape instead of failing on a letter it does not have."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    """Whoever read us has gone. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
