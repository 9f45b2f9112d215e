"""Checks the English of the documents and of all messages: words and phrases to avoid, and long sentences.

python docs/prose.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from message_catalogue import EXPLAINED, PAGE, ROOT, messages

LONGEST_WORDS: Final = 32
"""Of a sentence, or of a part of it between colons and semicolons."""

AVOID: Final = {
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|other|different|better|worse|slower|faster)\w+": "is not a …",
    r"in the place of": "instead of, or in place of",
    r"whoever": "anyone who, or name the process",
    r"anew": "again",
    r"others? wants? in|(?:is|are|be) let in|lets? (?:every|any)(?:body|one) in": "connects, accepts",
    r"lets? in (?:every|any)(?:body|one)|lets? this one in": "connects, accepts",
    r"sa(?:y|ys|id) nothing": "sends, prints or logs nothing",
    r"counts? as nothing": "is ignored",
    r"let it forget|forgets? (?:old|nothing|none)": "compact (etcd's word)",
    r"take the alarm back": "disarm the alarm (etcd's word)",
    r"here \d+": "on this host",
    r"one too many": "a surplus one",
    r"as far as \w+ (?:has|have) heard": "to its knowledge",
    r"has no claim|own trouble": "say what happens",
    r"in order to": "to",
    r"(?:due|owing) to the fact that": "because",
    r"utili[sz]e[sd]?|leverag(?:es?|ing)": "use",
    r"please note|note that|it should be noted": "leave it out",
    r"simply|obviously|of course|easily|very|quite": "leave it out, or give a number",
    r"and/or": "and, or or",
}
"""Pattern → what to write. They match whole words, in any case, outside code."""

_AVOID: Final = [(re.compile(rf"\b(?:{pattern})\b", re.I), instead) for pattern, instead in AVOID.items()]
_FENCE: Final = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.M | re.S)
_CODE: Final = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^()\s]*\)")
_END: Final = re.compile(r"(?<=[.!?:;])[\")*]* ")


def pages() -> list[Path]:
    """Return the pages that are checked: all but the changelog. That of messages is checked message by message."""
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
    return [*top, *sorted({*PAGE.parent.rglob("*.md")} - {PAGE})]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each sentence of a page, or part of one; the end of a cell or item ends it, too."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        plain = _LINK.sub(r"\1", _CODE.sub("CODE", line))
        for cell in plain.split("|") if line.startswith("|") else [plain]:
            yield from ((number, part) for part in _END.split(cell.strip(" #>*-")))


def findings() -> Iterator[str]:
    """Yield what is wrong, with its place and the remedy."""
    for page in pages():
        for number, sentence in sentences(page.read_text()):
            yield from wrong(f"{page.relative_to(ROOT)}:{number}", sentence)
    said = [(message.file, message.text) for message in messages()]
    for place, text in [*said, *(("docs/messages.toml", text) for text in EXPLAINED.values())]:
        for _, sentence in sentences(text):
            yield from wrong(place, sentence)


def wrong(place: str, sentence: str) -> Iterator[str]:
    """Yield what is wrong with a sentence that is at `place`."""
    if (words := len(sentence.split())) > LONGEST_WORDS:
        yield f"{place}: {words} words, at most {LONGEST_WORDS} without a full stop, colon or semicolon: {sentence}"
    for pattern, instead in _AVOID:
        if found := pattern.search(sentence):
            yield f'{place}: "{found[0]}" (write: {instead}): {sentence}'


if __name__ == "__main__":
    found = list(findings())
    print("\n".join(found))
    sys.exit(bool(found))
