"""Checked access to the fields of a message or an etcd value that somebody else wrote."""

import base64
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard, TypeVar

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1
MAX_NUMBER = 1e9
MAX_TEXT_BYTES = 4096


class Fields:
    """The fields of one JSON object.

    Every accessor checks type and range, and raises a DaemonError that names the field that is missing or wrong.

    Args:
        values: The object.
        what: What the object is, for the error text.
    """

    __slots__ = ("values", "what")

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self.values = values
        self.what = what

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Return the text field `name`, one of `choices`."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        """Return the integer field `name`."""
        value = self.values.get(name)
        if type(value) is int and low <= value <= high:
            return value
        raise self.wrong(name, f"an integer {_range(value, low, high, MAX_INTEGER)}")

    def optional_integer(self, name: str, low: int = 0) -> int | None:
        """Return the integer field `name`, None when it is null or missing."""
        return None if self.values.get(name) is None else self.integer(name, low)

    def number(self, name: str, low: float = 0.0, high: float = MAX_NUMBER) -> float:
        """Return the field `name`, an integer or float."""
        value = self.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        raise self.wrong(name, f"a number {_range(value, low, high, MAX_NUMBER)}")

    def optional_number(self, name: str) -> float | None:
        """Return the number in the field `name`, None when it is null or missing."""
        return None if self.values.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return the field `name`, an even number of at most `count` numbers."""
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) > count or len(values) % 2:
            raise self.wrong(name, f"an even number of at most {count} numbers")
        return [Fields({name: value}, self.what).number(name) for value in values]

    def text(self, name: str, high: int = MAX_TEXT_BYTES) -> str:
        """Return the text field `name`, 1 to `high` bytes of printable UTF-8."""
        value = self.values.get(name)
        if is_text(value, high):
            return value
        raise self.wrong(name, f"printable text of 1 to {high} bytes")

    def optional_text(self, name: str) -> str:
        """Return the text field `name`, "" when it is empty, null or missing."""
        return "" if self.values.get(name) in ("", None) else self.text(name)

    def texts(self, name: str, high: int = MAX_INTEGER) -> list[str]:
        """Return the field `name`, a list of at most `high` texts."""
        values = self.of(name, list, "a list of texts")
        if len(values) > high or not all(map(is_text, values)):
            raise self.wrong(name, f"a list of at most {high} printable texts of 1 to {MAX_TEXT_BYTES} bytes")
        return values

    def secret(self, name: str) -> str | None:
        """Return the text field `name`, None when it is null or missing; what it is instead is in no message."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise DaemonError(f"{self.what}: field '{name}' must be text")

    def flag(self, name: str) -> bool:
        """Return the boolean field `name`."""
        return self.of(name, bool, "true or false")

    def object(self, name: str) -> dict[str, Any]:
        """Return the field `name`, a JSON object."""
        return self.of(name, dict, "an object")

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return the field `name`, a list of JSON objects."""
        value = self.of(name, list, "a list of objects")
        if not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects")
        return value

    def integers(self, name: str, high: int = MAX_INTEGER) -> list[int]:
        """Return the field `name`, a list of integers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= high for item in value):
            raise self.wrong(name, f"a list of integers from 0 to {high}")
        return value

    def binary(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
        """Return the bytes that the field `name` holds as base64, at most `max_bytes` of them."""
        text = self.text(name, high=2 * max_bytes)
        try:
            value = base64.b64decode(text, validate=True)
        except ValueError:
            value = None
        if value is None or len(value) > max_bytes:
            raise self.wrong(name, f"at most {max_bytes} bytes as base64")
        return value

    def pair(self) -> Pair:
        """Return the fields `generation` (0 is an import) and `step`."""
        return Pair(self.integer("generation"), self.integer("step"))

    def named_pair(self, name: str) -> Pair:
        """Return the object `name` of a generation and a step."""
        return Fields(self.object(name), f"{self.what}, {name}").pair()

    def of(self, name: str, kind: type[T], wanted: str) -> T:
        """Return the field `name`, which must be of `kind`; `wanted` says so to people."""
        value = self.values.get(name)
        if not isinstance(value, kind):
            raise self.wrong(name, wanted)
        return value

    def made(self, name: str, wanted: str, make: Callable[[Any], T]) -> T:
        """Return what `make` makes of the field `name`; where it refuses that, `wanted` says what the field must be."""
        try:
            return make(self.values[name])
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise DaemonError(f"{self.wrong(name, wanted)}: {error!r}") from error

    def wrong(self, name: str, wanted: str) -> DaemonError:
        """Return the error that says what the field `name` must be, and what it is."""
        try:
            got = repr(self.values[name])[:80] if name in self.values else "nothing"
        except RecursionError:  # it was read with less on the stack than there is now
            got = "what is nested too deeply"
        return DaemonError(f"{self.what}: field '{name}' must be {wanted}, got {got}")


def is_text(value: Any, high: int = MAX_TEXT_BYTES) -> TypeGuard[str]:
    """Tell whether `value` is 1 to `high` bytes of printable UTF-8."""
    # A NUL or a lone surrogate is valid JSON, but not printable, and no file name, key or header can hold it.
    return isinstance(value, str) and value != "" and value.isprintable() and len(value.encode()) <= high


def _range(value: Any, low: float, high: float, most: float) -> str:
    shown = [format(bound, "g") if isinstance(bound, float) else str(bound) for bound in (low, high)]
    is_great = isinstance(value, int | float) and value > high
    return f"of at least {shown[0]}" if high == most and not is_great else "from {} to {}".format(*shown)


def printable(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return `text` as `Fields.text` takes it: "?" for what is not printable, cut off at `max_bytes`."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:max_bytes])
    return shown.encode()[:max_bytes].decode(errors="ignore")
