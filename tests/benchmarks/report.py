"""Markdown tables of what was measured."""

from collections.abc import Sequence

from tests.benchmarks.measure import Results
from tests.benchmarks.memory import Memory
from tests.benchmarks.rows import Against, Figure, Group, Growth, Row

_MIB = 1 << 20
_LONGEST = 160
_FLAT, _LINEAR = 1.05, 1.1
_NOISE = 4 * _MIB


def report(group: Group, results: Results) -> str:
    """The tables of a group; those that have no rows are left out."""
    memory = [_memory_cells(row.job, row.limit, results.memory[row.task]) for row in group.memory]
    tables = [
        _table(
            ("job", "ours, s", "against", "its, s", "its / ours", "target", "met"),
            [cells for row in group.rows for cells in _time_cells(row, results)],
        ),
        _table(("job", "private, MiB", "at most", "met", "resident, MiB"), memory),
        _table(("job", "within", "result"), _limited_cells(group, results)),
        _table(
            (
                "job",
                "GB",
                "s",
                "s/GB, last / first",
                "private, MiB",
                "last / the one before",
                "met",
            ),
            [_growth_cells(growth, results) for growth in group.growth],
        ),
        _table(("check", "result"), [[check, text] for check, text in results.checks.items()]),
    ]
    return "\n\n".join(table for table in tables if table)


def _time_cells(row: Row, results: Results) -> list[list[str]]:
    ours = results.median(row.ours)
    cells = []
    if row.at_most is not None or not row.against:
        target = "" if row.at_most is None else f"at most {row.at_most:.3f} s"
        met = _met(row.at_most is None or ours <= row.at_most, row.at_most)
        cells.append([row.job, _number(ours), "", "", "", target, met])
    for against in row.against:
        theirs = _best(against, row, results)
        ratio = ours / theirs if row.is_rate else theirs / ours
        target = "" if against.target is None else f"≥ {against.target:.2f}"
        met = _met(against.target is None or ratio >= against.target, against.target)
        name = against.name
        cells.append([row.job, _number(ours), name, _number(theirs), f"{ratio:.2f}", target, met])
    return cells


def _best(against: Against, row: Row, results: Results) -> float:
    medians = [results.median(figure) for figure in against.figures]
    return max(medians) if row.is_rate else min(medians)


def _memory_cells(job: str, limit: float | None, memory: Memory) -> list[str]:
    at_most = "" if limit is None else f"{limit / _MIB:.0f}"
    met = _met(limit is None or memory.private <= limit, limit)
    return [job, f"{memory.private / _MIB:.0f}", at_most, met, f"{memory.resident / _MIB:.0f}"]


def _limited_cells(group: Group, results: Results) -> list[list[str]]:
    return [
        [each.job, f"{each.limit / _MIB:.0f} MiB", results.limited[each.job][:_LONGEST]]
        for each in group.limited
    ]


def _growth_cells(growth: Growth, results: Results) -> list[str]:
    medians = [results.median(Figure(task)) for task in growth.tasks]
    private = [results.memory[task].private for task in growth.tasks]
    per_byte = [seconds / size for seconds, size in zip(medians, growth.sizes, strict=True)]
    grown = private[-1] / max(private[-2], 1)
    is_flat = grown <= _FLAT or private[-1] - private[-2] <= _NOISE
    is_linear = per_byte[-1] <= _LINEAR * per_byte[0]
    return [
        growth.job,
        " ".join(f"{size / 1e9:.2f}" for size in growth.sizes),
        " ".join(map(_number, medians)),
        f"{per_byte[-1] / per_byte[0]:.2f}",
        " ".join(f"{each / _MIB:.0f}" for each in private),
        f"{grown:.2f}",
        _met(is_linear and (is_flat or not growth.is_flat), _FLAT),
    ]


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _met(is_met: bool, target: float | None) -> str:
    return "" if target is None else "yes" if is_met else "**no**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
