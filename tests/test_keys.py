"""Every etcd key of a run stands once in `daemon/run/keys.py`, and docs/internals/protocol.md has the same."""

import ast
import re
from pathlib import Path

from life_states import TRANSITIONS

from resilient_run.daemon.etcd.config import RUNS
from resilient_run.daemon.run import keys

ROOT = Path(__file__).parent.parent
AT_HOME = ("daemon/run/keys.py", "daemon/etcd/config.py")
LIKE_A_KEY = re.compile(rf"(^|/)(rdzv|ckpt|root|to-root|inject)/|{RUNS}")


def known() -> list[str]:
    """Return all keys as the table has them, up to the names in a folder."""
    values = [value for name, value in vars(keys).items() if name.isupper() and name != "RUNS"]
    return [value() if isinstance(value, keys.Folder) else value for value in values if not value.endswith("/")]


def literals(path: Path) -> list[str]:
    """Return the strings in a module, but for its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    ]


def test_no_other_module_spells_a_key() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {text!r}"
        for folder in ("launcher", "daemon", "ckpt", "comm")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in AT_HOME
        for text in literals(path)
        if LIKE_A_KEY.search(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_protocol_has_the_same_keys() -> None:
    (section,) = re.findall(
        r"^## etcd keys, below .*?(?=^## )", (ROOT / "docs/internals/protocol.md").read_text(), re.M | re.S
    )
    table = re.findall(r"^\| `([^`]+)`", section, re.M)
    assert len(table) > 20
    assert sorted(name.partition("<")[0] for name in table) == sorted(known())


def test_key_is_taken_apart_as_it_was_made() -> None:
    for folder in (value for value in vars(keys).values() if isinstance(value, keys.Folder)):
        assert keys.split(folder("a")) == [folder, "a"]
        assert keys.split(folder(3, "a")) == [folder, "3", "a"]
        assert folder(3, "a") == folder(3, "") + "a" == f"{folder()}3/a"
    for name in (keys.JOB, keys.ROUND, keys.WATERMARK, keys.PERSISTED):
        assert keys.split(name) == [name]


def test_daemons_follow_all_but_what_goes_to_the_root_in_one_range() -> None:
    """`Etcd.changes(before=keys.STATE)` ends where these begin."""
    others = [name for name in known() if not name.startswith(keys.STATE)]
    assert max(others) < keys.STATE
    root_alone = {keys.HELD(), keys.OBSERVATIONS(), keys.PERSISTED, keys.ANSWERS()}
    root_alone |= {keys.WATERMARK, keys.NEXT, keys.OLDER, keys.PERSIST}
    assert root_alone == {*known()}.difference(others)


def test_all_that_is_not_leased_is_deleted_at_the_end() -> None:
    (section,) = re.findall(
        r"^## etcd keys, below .*?(?=^## )", (ROOT / "docs/internals/protocol.md").read_text(), re.M | re.S
    )
    leased = re.findall(r"^\| `([^`<]+)[^`]*` \(leased\)", section, re.M)
    assert keys.HOSTS() in leased
    deleted = keys.lasting()
    for name in known():
        covered = name in deleted or any(name.startswith(folder) for folder in deleted if folder.endswith("/"))
        assert covered == (name not in leased or name.startswith(keys.RENDEZVOUS)), name


def test_protocol_has_the_same_transitions() -> None:
    (section,) = re.findall(r"^### Lives$.*?(?=^### )", (ROOT / "docs/internals/protocol.md").read_text(), re.M | re.S)
    rows = re.findall(r"^\| (\w+→.+) \| (.+) \|$", section, re.M)
    table = {tuple(change.split("→")): who for changes, who in rows for change in changes.split(", ")}
    assert table == {change: who.replace("|", ", ") for change, who in TRANSITIONS.items()}
