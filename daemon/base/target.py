"""What commands check of the option that names a persistent tier."""

import click
from click.core import ParameterSource

from ..trust.secret import refuse_password


def check_target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the value of the option, as click wants it from a callback.

    Raises:
        click.BadParameter: A password stands in it, on the command line.
    """
    if value is not None and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
        try:
            refuse_password(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value
