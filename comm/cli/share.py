"""A share as an option."""

import math
from typing import Any

import click


class Share(click.FloatRange):
    """More than 0 and at most 1; click lets nan through."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share.

        Raises:
            click.BadParameter: It is none.
        """
        share = float(super().convert(value, param, ctx))
        if math.isnan(share):
            self.fail("nan is not a share.", param, ctx)
        return share
