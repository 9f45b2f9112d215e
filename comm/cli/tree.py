"""`resilient-comm tree`: Espresso's decision tree, listed."""

import json

import click

from ..plan.constraints import CONSTRAINTS, allowed


@click.command()
@click.option(
    "--constraint",
    "constraints",
    type=click.Choice(list(CONSTRAINTS)),
    multiple=True,
    help="Only options that meet this; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tree(constraints: tuple[str, ...], as_json: bool) -> None:
    """Show every way to synchronize a tensor: compressed or not, where, and by which collectives."""
    try:
        options = allowed(constraints)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    texts = [str(option) for option in options]
    click.echo(json.dumps(texts) if as_json else "\n".join(texts))
