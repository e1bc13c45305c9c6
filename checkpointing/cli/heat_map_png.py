"""The heat map of an adapter as an image, drawn by matplotlib."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from checkpointing.cli.errors import UsageError
from checkpointing.cli.heat_map import NO_ADAPTER, NOT_FINITE, HeatMap, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

_DPI = 150
_ROW = 0.26  # Heights and widths are in inches.
_CELLS = 9.0
_CHARACTER = 0.075
_LARGEST_SIDE = 400.0  # matplotlib draws up to 2**16 pixels.
_LONGEST_NAME, _LONGEST_LINE = 48, 120  # In characters.
_SMALL, _LARGE = 8, 9
_SCALE = 0.3  # Share of the width.
_HATCHED: dict[str, Any] = {
    "facecolor": "white",
    "hatch": "//////",
    "edgecolor": "#c8c8c8",
    "linewidth": 0,
}
_TEXT, _SOFT, _RED = "#1c1c1c", "#5c5c5c", "#d6262a"


def check_matplotlib() -> None:
    """Checks that images can be drawn.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            'a heat map as .png needs matplotlib: `pip install "tunepoint[plot]"`, or name a file '
            "that ends in .html, which needs nothing more"
        ) from error


def image(heat_map: HeatMap, title: str, subtitle: str) -> bytes:
    """The image as the bytes of a PNG file; see :func:`draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(heat_map, title, subtitle)
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def draw(heat_map: HeatMap, title: str, subtitle: str) -> "Figure":
    """Draws the image; pyplot, with its windows and its list of open figures, is not used.

    Args:
        heat_map: what to show.
        title: whose heat map it is.
        subtitle: facts beside it.

    Returns:
        A figure that has axes for the kinds, for the others (either only if there are any), and
        for the scale.
    """
    from matplotlib.figure import Figure

    groups = [rows for rows in (heat_map.kinds, heat_map.others) if rows]
    cell = min(0.3, max(0.1, _CELLS / max(1, heat_map.layers)))
    width = max(4.0, cell * heat_map.layers)
    width += _CHARACTER * max(len(_short(row.name)) + len(row.span) for row in heat_map.rows)
    heading = [heat_map.heading, _short(title, _LONGEST_LINE), _short(subtitle, _LONGEST_LINE)]
    width = max(width, _CHARACTER * max(map(len, heading)))
    height = _ROW * len(heat_map.rows) + 1.5
    figure = Figure(
        figsize=(min(_LARGEST_SIDE, width + 0.5), min(_LARGEST_SIDE, height)),
        layout="constrained",
        facecolor="white",
    )
    axes = figure.subplots(
        len(groups) + 1, height_ratios=[*(_ROW * len(rows) for rows in groups), 0.12], squeeze=False
    )[:, 0]
    for rows, each in zip(groups, axes, strict=False):
        mesh = _draw_rows(each, rows, heat_map, 72 * cell)
    if heat_map.kinds:
        _number_layers(axes[0], heat_map)
    _draw_legend(figure, axes[-1], mesh, heat_map)
    # The names come from files; what stands between two dollars would be read as a formula.
    figure.suptitle(
        "\n".join(heading),
        x=0.01,
        ha="left",
        fontsize=_LARGE,
        color=_TEXT,
        parse_math=False,
    )
    return figure


def _draw_rows(axes: "Axes", rows: Sequence[Row], heat_map: HeatMap, cell: float) -> "QuadMesh":
    import numpy as np

    values = np.array([[math.nan if v is None else v for v in row.values] for row in rows])
    # What is not drawn shows the background.
    axes.patch.set(**_HATCHED)
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap="viridis",
        vmin=0,
        vmax=heat_map.largest or 1,
        edgecolors="white",
        linewidth=0.8,
    )
    for y, row in enumerate(rows):
        for x, value in enumerate(row.values):
            if value is not None and not math.isfinite(value):
                _mark(axes, x, y, min(_SMALL, cell))
        axes.text(
            1,
            y + 0.5,
            f"  {row.span}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=_SMALL,
            color=_SOFT,
        )
    axes.set_xticks([])
    axes.set_yticks(
        [y + 0.5 for y in range(len(rows))],
        [_short(row.name) for row in rows],
        fontsize=_SMALL,
        color=_TEXT,
        parse_math=False,
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    return mesh


def _mark(axes: "Axes", x: int, y: int, size: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=_RED, edgecolor="white", linewidth=0.8))
    axes.text(
        x + 0.5,
        y + 0.5,
        "!",
        ha="center",
        va="center",
        fontsize=size,
        color="white",
        weight="bold",
    )


def _number_layers(axes: "Axes", heat_map: HeatMap) -> None:
    numbers = range(0, heat_map.layers, heat_map.tick_step)
    axes.set_xticks(
        [number + 0.5 for number in numbers], list(map(str, numbers)), fontsize=_SMALL, color=_SOFT
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)


def _draw_legend(figure: "Figure", axes: "Axes", mesh: "QuadMesh", heat_map: HeatMap) -> None:
    from matplotlib.patches import Patch

    axes.set_axis_off()
    scale = axes.inset_axes((0, 0, _SCALE, 1))
    figure.colorbar(mesh, cax=scale, orientation="horizontal", drawedges=False)
    ends = [0, heat_map.largest] if heat_map.largest else [0]
    scale.set_xticks(ends, [f"{end:.2e}" if end else "0" for end in ends])
    scale.tick_params(length=0, labelsize=_SMALL, labelcolor=_SOFT)
    scale.spines[:].set_visible(False)
    patches = []
    if heat_map.has_gaps:
        patches.append(Patch(**_HATCHED, label=NO_ADAPTER))
    if heat_map.has_not_finite:
        patches.append(Patch(facecolor=_RED, label=f"! {NOT_FINITE}"))
    if patches:
        axes.legend(
            handles=patches,
            loc="center left",
            bbox_to_anchor=(_SCALE + 0.08, 0.5),
            ncols=2,
            fontsize=_SMALL,
            labelcolor=_SOFT,
            frameon=False,
        )


def _short(text: str, longest: int = _LONGEST_NAME) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…{text[1 - half :]}"
