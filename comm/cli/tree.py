"""`resilient-comm tree`: Espresso's decision tree, counted or listed."""

import json
from collections.abc import Callable, Iterable

import click

from ..plan import tree as decision_tree
from ..plan.constraints import CONSTRAINTS, allowed, compressed, gpu_only
from ..plan.tree import Option, Phase, Routine, Steps

_LAST = Routine.ALL_GATHER
_SUBTREES: tuple[tuple[str, str, Callable[[], Iterable[Steps]]], ...] = (
    ("T1", "last step, dense", lambda: decision_tree.last_dense(Phase.INTRA2, _LAST)),
    ("T2", "last step, compressed", lambda: decision_tree.last_compressed(Phase.INTRA2, _LAST)),
    ("T3", "between hosts, dense", lambda: decision_tree.inter_dense(_LAST)),
    ("T4", "between hosts, compressed", lambda: decision_tree.inter_compressed(_LAST)),
    ("T5", "second step between hosts, dense", lambda: decision_tree.inter_second_dense(_LAST, _LAST)),
    ("flat", "all GPUs in one phase", decision_tree.flat),
    ("hierarchical", "in hosts, between hosts, in hosts", decision_tree.hierarchical),
)


@click.command()
@click.option("--count", is_flag=True, help="How many there are, also of each sub-tree, in place of the options.")
@click.option(
    "--constraint",
    "constraints",
    type=click.Choice(list(CONSTRAINTS)),
    multiple=True,
    help="Only options that meet this; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tree(count: bool, constraints: tuple[str, ...], as_json: bool) -> None:
    """Show every way to synchronize a tensor: compressed or not, where, and by which collectives."""
    try:
        options = allowed(constraints)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if not count:
        texts = [str(option) for option in options]
        click.echo(json.dumps(texts) if as_json else "\n".join(texts))
    elif as_json:
        click.echo(json.dumps({"options": len(options), "gpu_only": sum(map(gpu_only, options))}))
    else:
        rows = [(name, what, tuple(map(Option, paths()))) for name, what, paths in _SUBTREES]
        rows.append(("all", f"that meet {', '.join(constraints)}" if constraints else "the tree", options))
        click.echo(f"{'':<14}{'':<36}{'options':>9}{'compress':>10}{'GPU only':>10}")
        for name, what, found in rows:
            counts = (len(found), sum(map(compressed, found)), sum(map(gpu_only, found)))
            click.echo(f"{name:<14}{what:<36}{counts[0]:>9}{counts[1]:>10}{counts[2]:>10}")
