"""The codec of etcd values, messages, files and settings: dataclasses that are JSON objects, checked field by field."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, pair_of, pair_value

from .fields import Fields, printable

UNIX_S = 1e12
"""The greatest time of a record."""

_Record = TypeVar("_Record", bound="Record")


@dataclass(frozen=True, slots=True)
class _Limits:
    key: str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    inline: bool = False
    outside: bool = False
    shown: bool = False
    read: Callable[[Fields, str], Any] | None = None
    write: Callable[[Any], Any] | None = None


class _FieldPlan(NamedTuple):
    name: str
    key: str
    default: Any
    is_inline: bool
    read: Callable[[Fields, str], Any]
    write: Callable[[Any], Any] | None


def limited(
    default: Any = MISSING, *, factory: Any = MISSING, compare: bool = True, repr: bool = True, **limits: Any
) -> Any:
    """Return a field of a `Record` that says more than its type.

    Args:
        default: Its value where it is missing or null; a field without one must be there.
        factory: Makes that.
        compare: As of `dataclasses.field`.
        repr: As of `dataclasses.field`.
        limits: `key`, its name in the object; `low` and `high`, the least and the greatest number, or the most bytes of
            a text; `choices`, the only texts; `inline`, where the fields of this record are among those of the object;
            `outside`, where the object does not have it, and who parses gives it; `shown`, where a text is for people
            and may be of strangers, so that "?" is written for what is not printable, and only what is not too long;
            `read` and `write`, in the place of what the type says.
    """
    metadata = {"limits": _Limits(**limits)}
    return field(default=default, default_factory=factory, compare=compare, repr=repr, metadata=metadata)


class Record:
    """A JSON object: a dataclass whose fields are checked by their types.

    `int` is of 0 and more, `float` of 0 to 1e9, `str` printable and not too long, unless `limited` says otherwise. A
    field with a default may be missing or null; fields that are not known are left alone.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, value: Mapping[str, Any], what: str = "", **given: Any) -> Self:
        """Return the record in `value`.

        Args:
            value: A JSON object.
            what: What it is, for the error text; by default what the class is called.
            given: Fields that it does not have.

        Raises:
            DaemonError: A field is missing or wrong; says which, what it is, and what it must be.
        """
        return cls.of_fields(Fields(value, what or cls.__name__.lower()), **given)

    @classmethod
    def of_fields(cls, values: Fields, **given: Any) -> Self:
        """Return the record in `values`; see `parse`."""
        found = values.values
        for name, key, default, _, read, _ in _items(cls):
            if name in given:
                continue
            # An empty text is as good as none where that is the default.
            if default is MISSING or ((value := found.get(key)) is not None and (value != "" or default != "")):
                given[name] = read(values, key)
        return cls(**given)

    def to_value(self) -> dict[str, Any]:
        """Return the object that `parse` reads."""
        value: dict[str, Any] = {}
        for name, key, _, is_inline, _, write in _items(type(self)):
            found = getattr(self, name)
            if write is not None and found is not None:
                found = write(found)
            if is_inline:
                value.update(found)
            else:
                value[key] = found
        return value


def parse_all(
    kind: type[_Record], value: Mapping[str, Any], name: str, *, most: int | None = None
) -> tuple[_Record, ...]:
    """Return the records in the list `name` of an object, of which there may be `most`.

    Raises:
        DaemonError: It has no such list, or it is too long, or one of them is wrong.
    """
    found = Fields(value, name).objects(name)
    if most is not None and len(found) > most:
        raise DaemonError(f"{name}: there are {len(found)}, and at most {most} are allowed")
    return tuple(kind.parse(each, name) for each in found)


class SettingsRecord(Record):
    """A record that people write: what it does not know is refused."""

    __slots__ = ()

    @classmethod
    def of_fields(cls, values: Fields, **given: Any) -> Self:
        """Return the record in `values`; see `parse`."""
        known = [item.key for item in _items(cls)]
        for name in values.values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none'}"
                raise DaemonError(f"{values.what}: no setting {str(name)[:80]!r}; {hint}")
        return super().of_fields(values, **given)


def _items_of(cls: type) -> tuple[_FieldPlan, ...]:
    """Return how each field of a record is read and written."""
    hints, found = get_type_hints(cls), []
    for one in fields(cls):
        limits: _Limits = one.metadata.get("limits", _NO_LIMITS)
        if not limits.outside:
            kinds = get_args(hints[one.name])
            kind = next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else hints[one.name]
            found.append(
                _FieldPlan(
                    name=one.name,
                    key=limits.key or one.name,
                    default=MISSING if limits.inline else _default(one),
                    is_inline=limits.inline,
                    read=limits.read or _reader(kind, limits),
                    write=limits.write or _writer(kind, limits),
                )
            )
    return tuple(found)


_items: Callable[[type], tuple[_FieldPlan, ...]] = cache(_items_of)


def _default(one: Field[Any]) -> Any:
    return one.default_factory if one.default is MISSING else one.default


def _reader(kind: Any, limits: _Limits) -> Callable[[Fields, str], Any]:
    bounds = {name: bound for name in ("low", "high") if (bound := getattr(limits, name)) is not None}
    if limits.choices:
        return partial(Fields.choice, choices=limits.choices)
    if kind in _READERS:
        return partial(_READERS[kind], **bounds) if bounds else _READERS[kind]
    many = get_origin(kind) is tuple
    record = get_args(kind)[0] if many else kind
    if isinstance(record, type) and issubclass(record, Record):
        if limits.inline:
            return lambda values, _: record.of_fields(values)
        if many:
            return lambda values, name: tuple(
                record.parse(each, f"{values.what}, {name}") for each in values.objects(name)
            )
        return lambda values, name: record.parse(values.object(name), f"{values.what}, {name}")
    if kind is Pair:
        return (lambda values, _: values.pair()) if limits.inline else Fields.named_pair
    return Fields.object


def _writer(kind: Any, limits: _Limits) -> Callable[[Any], Any] | None:
    if limits.shown:
        return printable if limits.high is None else partial(printable, max_bytes=int(limits.high))
    if get_origin(kind) is tuple:
        return _written
    if isinstance(kind, type) and issubclass(kind, Record):
        return methodcaller("to_value")
    return _WRITERS.get(kind)


def _written(values: Iterable[Any]) -> list[Any]:
    return [value.to_value() if isinstance(value, Record) else value for value in values]


_NO_LIMITS = _Limits()
_READERS: Mapping[Any, Callable[..., Any]] = {
    int: Fields.integer,
    float: Fields.number,
    bool: Fields.flag,
    str: Fields.text,
    Path: lambda values, name: Path(values.text(name)),
    tuple[int, ...]: lambda values, name: tuple(values.integers(name)),
    tuple[str, ...]: lambda values, name, **bounds: tuple(values.texts(name, **bounds)),
    frozenset[int]: lambda values, name: frozenset(values.integers(name)),
    tuple[Pair, ...]: lambda values, name: values.made(name, "a list of pairs", lambda rows: tuple(map(pair_of, rows))),
}
_WRITERS: Mapping[Any, Callable[[Any], Any]] = {Pair: pair_value, Path: str, frozenset[int]: sorted}
