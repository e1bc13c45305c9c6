"""The heat map of an adapter: ‖U‖/‖W‖ as rows of modules and columns of layers, and as text."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkpointing.printable import printable

NO_ADAPTER = "without an adapter"
NOT_FINITE = "not finite"

_SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Row:
    """The modules of a kind.

    Attributes:
        name: the module's name after its layer, fit to be printed.
        values: ``‖U‖ / ‖W‖`` in each layer, or the only one of a module outside of the layers;
            ``None`` without an adapter.
    """

    name: str
    values: tuple[float | None, ...]

    @property
    def span(self) -> str:
        """The smallest and the largest value, in words."""
        known = [value for value in self.values if value is not None]
        finite = [value for value in known if math.isfinite(value)]
        parts = []
        if finite:
            low, high = min(finite), max(finite)
            parts.append(f"{low:.2e}" if low == high else f"{low:.2e} to {high:.2e}")
        if len(finite) < len(known):
            parts.append(f"{len(known) - len(finite)} {NOT_FINITE}")
        return ", ".join(parts) or NO_ADAPTER


@dataclass(frozen=True)
class HeatMap:
    """How much an adapter changes each weight, arranged to be looked at.

    Attributes:
        layers: number of columns.
        kinds: a row for each kind of module that layers have.
        others: a row for each module outside of the layers, such as ``output``.
        largest: the largest finite value, 0 if there is none; the end of the colour scale.
    """

    layers: int
    kinds: tuple[Row, ...]
    others: tuple[Row, ...]
    largest: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, from top to bottom."""
        return (*self.kinds, *self.others)

    @property
    def heading(self) -> str:
        """What is shown, and for which layers."""
        return "‖U‖/‖W‖" + (f" by layer, 0 to {self.layers - 1}" if self.layers else "")

    @property
    def values(self) -> tuple[float | None, ...]:
        """The values of all cells, in no particular order."""
        return tuple(value for row in self.rows for value in row.values)

    @property
    def has_gaps(self) -> bool:
        """Whether a kind carries an adapter in some of the layers only."""
        return None in self.values

    @property
    def has_not_finite(self) -> bool:
        """Whether a value is infinite or not a number."""
        return any(value is not None and not math.isfinite(value) for value in self.values)

    @property
    def tick_step(self) -> int:
        """Every how many layers a picture numbers its columns."""
        return next((step for step in (1, 2, 5) if self.layers <= 25 * step), 10)

    def share(self, value: float) -> float:
        """Where a finite value is on the colour scale, from 0 to 1."""
        return value / self.largest if self.largest else 0.0


def arrange(updates: Mapping[str, float]) -> HeatMap:
    """The heat map of an adapter.

    Args:
        updates: ``‖U‖ / ‖W‖`` by native module name.
    """
    kinds: dict[str, dict[int, float]] = {}
    others: list[Row] = []
    for module, value in updates.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", module, re.DOTALL)
        if match is None:
            others.append(Row(printable(module), (value,)))
        else:
            kinds.setdefault(match[2], {})[int(match[1])] = value
    layers = max((layer + 1 for row in kinds.values() for layer in row), default=0)
    rows = [
        Row(printable(kind), tuple(row.get(layer) for layer in range(layers)))
        for kind, row in kinds.items()
    ]
    largest = max(filter(math.isfinite, updates.values()), default=0.0)
    return HeatMap(layers, tuple(rows), tuple(others), largest)


def as_text(heat_map: HeatMap, columns: int) -> list[str]:
    """Lines of shaded blocks.

    Args:
        heat_map: what to show.
        columns: width of the terminal; more layers than fit in a line are continued below.
    """
    heading = f"{heat_map.heading}: {_SHADES[-1]} is the largest, {heat_map.largest:.2e}"
    marks = [
        f"; {mark} is {meaning}"
        for mark, meaning, used in (
            ("·", NO_ADAPTER, heat_map.has_gaps),
            ("!", NOT_FINITE, heat_map.has_not_finite),
        )
        if used
    ]
    lines = [heading + "".join(marks)]
    width = max(len(row.name) for row in heat_map.rows)
    numbers = max(len(row.span) for row in heat_map.rows)
    layers = max(1, heat_map.layers)
    step = min(layers, max(10, columns - width - numbers - len("    ||  ")))
    for start in range(0, heat_map.layers, step):
        stop = min(start + step, layers)
        if step < layers:
            lines.append(f"  layers {start} to {stop - 1}")
        for row in heat_map.kinds:
            part = replace(row, values=row.values[start:stop])
            blocks = "".join(_shade(value, heat_map) for value in part.values)
            lines.append(f"  {part.name:{width}}  |{blocks}|  {part.span}")
    for row in heat_map.others:
        blocks = _shade(row.values[0], heat_map) * step
        lines.append(f"  {row.name:{width}}  |{blocks}|  {row.span}")
    return lines


def _shade(value: float | None, heat_map: HeatMap) -> str:
    if value is None:
        return "·"
    if not math.isfinite(value):
        return "!"
    return _SHADES[math.ceil((len(_SHADES) - 1) * heat_map.share(value))]


def summary(adapter: Mapping[str, object]) -> str:
    """What a picture says of its adapter in a line, such as ``LoRA, rank 8, alpha 16``.

    Args:
        adapter: the facts of :func:`checkpointing.describe.describe`.
    """
    facts = f"{adapter['kind']}, rank {adapter['rank']}, alpha {adapter['alpha']:g}"
    return f"{facts}, on {printable(str(adapter['base']))}"
