"""`resilientctl keygen`: a new run key."""

from pathlib import Path

import click

from ..trust.secret import make_key


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def keygen(path: Path) -> None:
    """Write a new run key to the file PATH, which must not exist; give it to every host of a run (--rr-key-file)."""
    try:
        make_key(path)
    except OSError as error:
        raise click.ClickException(f"cannot write a run key to {path}: {error.strerror}") from error
