"""Writes `messages.md`: every line that the programs print, log or raise, as the source has it.

python docs/message_catalogue.py
"""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = Path(__file__).with_name("messages.md")
TROUBLE: Final = PAGE.with_name("troubleshooting.md")

_HEAD: Final = """# Messages

Every message that the programs print, log or raise. Search for a part without names and numbers, which are `…` here.
Most messages say what to do. The last column does for others, or links to [troubleshooting](troubleshooting.md).

*Reasons* are parts of other messages: they follow a colon, or stand in brackets."""

_SECTIONS: Final = {
    "Fault injection": ("launcher/inject", "daemon/inject"),
    "The launcher": ("launcher",),
    "resilientctl doctor": ("daemon/doctor",),
    "resilientctl": ("daemon/ctl",),
    "The daemon": ("daemon",),
    "Checkpoints in a script": ("ckpt",),
    "Gradient communication": ("comm",),
}
"""Heading → what says it; a file belongs to the first that fits."""
_ORDER: Final = (*list(_SECTIONS)[1:], "Fault injection")

_LEVELS: Final = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
_OUTPUT: Final = {"print": "output", "click.echo": "output", "warnings.warn": "warning"}
_FINDINGS: Final = ("ok", "warn", "fail")
_REASON: Final = "reason"
_NO_MESSAGES: Final = {"help", "short_help", "metavar", "epilog", "description", "match"}
_INNER: Final = {"AssertionError", "AttributeError", "ModuleNotFoundError", "SystemExit"}
"""Exceptions that no message of ours explains: bugs, and what Python itself expects."""

EXPLAINED: Final[dict[str, str]] = tomllib.loads(PAGE.with_suffix(".toml").read_text())
"""What messages do not say themselves: why they are there, and what to do."""

_FENCE: Final = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.M | re.S)
_ITEM: Final = re.compile(r" *- (?=`)(?:`[^`]*`|[^`:])*:")
_VARIES: Final = re.compile(r"…|'[^']*'|/\S+|\d[\d.]*|[:;()=]|, or ")
"""What is between those parts of a quoted message that are the same each time."""


@dataclass(frozen=True, order=True)
class Message:
    """A message of the source.

    Attributes:
        text: The message, with … for what is formatted.
        kind: Level of a log line, level of a finding, name of an exception, "output", or "reason".
        file: Where it is, relative to the repository.
    """

    text: str
    kind: str
    file: str


def messages() -> list[Message]:
    """Return all messages of the source."""
    found = set()
    for path in sorted(
        path for folder in ("launcher", "daemon", "ckpt", "comm") for path in (ROOT / folder).rglob("*.py")
    ):
        file = str(path.relative_to(ROOT))
        if file != "daemon/exporter/metrics.py":  # help texts of metrics
            for text, kind in _texts(ast.parse(path.read_text()), _REASON):
                words = [word for word in text.split() if re.search("[A-Za-z]{2}", word)]
                if (
                    " " in text
                    and len(words) >= (3 if kind == _REASON else 1)
                    and not re.match("import |from |.*%[(]", text)
                ):
                    found.add(Message(text, kind, file))
    return sorted(found)


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Yield each text of an expression or statement, and the kind that it has where it is."""
    match node:
        case ast.Expr(ast.Constant()) | ast.Assert() | ast.Compare() | ast.keyword("help"):
            return
        case ast.Raise(ast.Call(called) | (ast.Name() as called)):
            name = ast.unparse(called).rpartition(".")[2]
            if name in _INNER:
                return
            kind = name if name.endswith(("Error", "Exception", "Parameter", "Start", "Fault")) else _REASON
        case ast.Call(ast.Name(level), [_, found, *remedy]) if level in _FINDINGS:
            said = "; remedy: ".join(_text(part) or "…" for part in (found, *remedy))
            yield said, level
            kind = _REASON
        case ast.Call(called):
            name = ast.unparse(called)
            if logged := re.fullmatch(r"_?log\.(\w+)", name):
                if logged[1] == "debug":
                    return
                kind = _LEVELS.get(logged[1], kind)
            kind = _OUTPUT.get(name, kind)
            if name.startswith("click.") and name.endswith(("Exception", "UsageError", "BadParameter")):
                kind = name.removeprefix("click.")
            if name.startswith("re."):
                return
    text = _text(node)
    if text is not None:
        yield " ".join(text.split()), kind
        kind = _REASON
        children: Iterable[ast.AST] = (
            part.value for part in getattr(node, "values", ()) if isinstance(part, ast.FormattedValue)
        )
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        if not (isinstance(child, ast.keyword) and child.arg in _NO_MESSAGES):
            yield from _texts(child, kind)


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(str(text)):
            return re.sub(r"%[+-]?\d*(?:\.\d+)?[dsrfx]", "…", text)
        case ast.JoinedStr(parts):
            return "".join(_text(part) or "…" for part in parts)
        case ast.BinOp(left, ast.Add(), right) if _text(left) or _text(right):
            return (_text(left) or "…") + (_text(right) or "…")
    return None


def quoted(page: Path) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each message that a page quotes.

    They are blocks of code of no language, and code with which an item of a list begins, before its colon.
    """
    heading = ""
    blocks = iter(_FENCE.finditer(text := page.read_text()))
    for line in _FENCE.sub("```", text).splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line == "```":
            block = next(blocks)[0]
            if block.startswith("```\n"):
                yield heading, block.strip("`")
        elif said := _ITEM.match(line):
            yield from ((heading, quote) for quote in re.findall(r"`([^`]+)`", said[0]))


def fixed_parts(quote: str) -> list[str]:
    """Return what a quoted message always has, in parts of at least four words."""
    parts = (part.strip(" ,.").replace("`", "") for part in _VARIES.split(quote))
    return [part for part in parts if len(part.split()) >= 4]


def page() -> str:
    """Return the text of the page."""
    explained = [(heading, part) for heading, quote in quoted(TROUBLE) for part in fixed_parts(quote)]
    sections: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for message in messages():
        section = next(name for name, files in _SECTIONS.items() if message.file.startswith(files))
        sections[section][message.text].add(message.kind)
    unknown = EXPLAINED.keys() - {message.text for message in messages()}
    assert not unknown, f"no longer in the source: {unknown}"
    lines = [_HEAD]
    for section in _ORDER:
        said = sorted(sections[section].items(), key=lambda item: (re.sub(r"^[\W_]+", "", item[0]).casefold(), item[0]))
        lines += ["", f"## {section}", "", "| message | kind | more |", "|---|---|---|"]
        lines += [
            f"| {_code(text)} | {', '.join(sorted(kinds - {_REASON}))} | {_more(text, explained)} |"
            for text, kinds in said
            if kinds != {_REASON}
        ]
        lines += ["", f"## {section}: reasons", "", "| part of a message | more |", "|---|---|"]
        lines += [f"| {_code(text)} | {_more(text, explained)} |" for text, kinds in said if kinds == {_REASON}]
    return "\n".join(lines) + "\n"


def _more(text: str, explained: list[tuple[str, str]]) -> str:
    links = sorted({heading for heading, part in explained if part in text.replace("`", "")})
    found = [EXPLAINED.get(text, ""), *(f"[{heading}](troubleshooting.md#{_slug(heading)})" for heading in links)]
    return " ".join(found).strip()


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _code(text: str) -> str:
    text = text.replace("|", r"\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
