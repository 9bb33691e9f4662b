"""Which rules stay silent, and on which layers: names, `name:0,3-5` as in YAML, or (name, layers)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

Mute = str | tuple[str, Sequence[int]]


def resolve_mute(mute: Sequence[Mute], names: Collection[str]) -> Mapping[str, frozenset[int] | None]:
    """Muted rule -> its muted layers, None for all of them.

    Raises:
        ValueError: an unknown rule or an unreadable list of layers; the message says what is allowed.

    >>> sorted(resolve_mute(["oversmoothing:0,3-5"], ["oversmoothing"])["oversmoothing"])
    [0, 3, 4, 5]
    """
    if isinstance(mute, str):
        raise ValueError(f"mute={mute!r}: give a list, as in mute=[{mute!r}]")
    if not isinstance(mute, Iterable):
        raise ValueError(f"mute={mute!r}: give a list of rule names, as in mute=['oversmoothing:0,3-5']; [] for none")
    muted: dict[str, frozenset[int] | None] = {}
    for entry in mute:
        name, layers = _read(entry)
        if name not in names:
            raise ValueError(f"mute: unknown rule {name!r}, allowed are {', '.join(names)}")
        before = muted.get(name, frozenset())
        muted[name] = None if layers is None or before is None else before | layers
    return muted


def _read(entry: Mute) -> tuple[str, frozenset[int] | None]:
    if isinstance(entry, str):
        name, colon, text = entry.partition(":")
        return name.strip(), _layers(entry, text) if colon else None
    try:
        name, layers = entry
        return str(name), frozenset(int(layer) for layer in layers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mute: {entry!r} is neither a rule name, 'name:0,3-5', nor (name, layers)") from error


def _layers(entry: str, text: str) -> frozenset[int]:
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"mute: cannot read the layers of {entry!r}: write 'name:0,3-5'")
        layers.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(layers)
