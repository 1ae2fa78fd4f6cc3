"""kvctl completion."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="\b\n"
    'bash:  eval "$(kvctl completion bash)"     in ~/.bashrc\n'
    'zsh:   eval "$(kvctl completion zsh)"      in ~/.zshrc\n'
    "fish:  kvctl completion fish | source      in ~/.config/fish/config.fish"
)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell; it also completes names of replicas and contexts."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(found(ctx.find_root().command, {}, "kvctl", "_KVCTL_COMPLETE").source())
