"""The heat map of an adapter as a web page that needs nothing else: no script, font or image."""

import math
from html import escape

from checkpointing.cli.heat_map import NO_ADAPTER, NOT_FINITE, HeatMap, Row

# Colours of 0 to the largest value, evenly spaced: viridis, https://github.com/BIDS/colormap.
_RAMP = (
    "#440154",
    "#48186a",
    "#472d7b",
    "#424086",
    "#3b528b",
    "#33638d",
    "#2c728e",
    "#26828e",
    "#21918c",
    "#1fa088",
    "#28ae80",
    "#3fbc73",
    "#5ec962",
    "#84d44b",
    "#addc30",
    "#d8e219",
    "#fde725",
)
_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --soft: #5c5c5c; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececec; --soft: #a8a8a8; --page: #161616; }
}
body { margin: 2rem; background: var(--page); color: var(--text);
  font: 0.9rem/1.4 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.2rem; }
p { margin: 0.2rem 0 1rem; color: var(--soft); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 1px; }
th { font-weight: normal; white-space: nowrap; text-align: left; }
tbody th { position: sticky; left: 0; background: var(--page); padding-right: 0.8rem;
  max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
thead th { color: var(--soft); font-size: 0.75rem; max-width: 0; overflow: visible; }
td { height: 1.3rem; text-align: center; font-weight: bold; line-height: 1; }
td.cell { min-width: 0.9rem; }
td.span { padding-left: 0.8rem; text-align: left; font-weight: normal; white-space: nowrap;
  color: var(--soft); font-variant-numeric: tabular-nums; }
tbody.others::before { content: ""; display: block; height: 0.5rem; }
.none { background: repeating-linear-gradient(45deg, transparent 0 3px, #8888 3px 4px); }
.bad { background: #d6262a; color: #ffffff; }
ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1.5rem; margin: 1rem 0 0; padding: 0;
  list-style: none; color: var(--soft); }
li { display: flex; align-items: center; gap: 0.5rem; }
i { display: inline-block; width: 1.3rem; height: 1.3rem; text-align: center; font-style: normal;
  font-weight: bold; line-height: 1.3rem; }
i.ramp { width: 12rem; }
"""
# Names come from files: should one ever get past the escaping, it still can load and run nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(heat_map: HeatMap, title: str, subtitle: str) -> str:
    """The page, a table with a tooltip for every cell.

    Args:
        heat_map: what to show.
        title: whose heat map it is, as plain text.
        subtitle: facts beside it, as plain text.
    """
    kinds = "".join(_kind(row, heat_map) for row in heat_map.kinds)
    others = "".join(_other(row, heat_map) for row in heat_map.others)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}: {escape(heat_map.heading)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(heat_map.heading)}</h1>
<p>{escape(title)}<br>{escape(subtitle)}</p>
<div class="scroll">
<table>
<thead>
<tr><td></td>{_numbers(heat_map)}</tr>
</thead>
<tbody>
{kinds}</tbody>
<tbody class="others">
{others}</tbody>
</table>
</div>
{_legend(heat_map)}
</body>
</html>
"""


def _numbers(heat_map: HeatMap) -> str:
    step = heat_map.tick_step
    return "".join(
        f'<th scope="colgroup" colspan="{min(step, heat_map.layers - layer)}">{layer}</th>'
        for layer in range(0, heat_map.layers, step)
    )


def _kind(row: Row, heat_map: HeatMap) -> str:
    cells = [
        _cell(value, f"{row.name}, layer {layer}", heat_map)
        for layer, value in enumerate(row.values)
    ]
    return _line(row, "".join(cells))


def _other(row: Row, heat_map: HeatMap) -> str:
    return _line(row, _cell(row.values[0], row.name, heat_map, max(1, heat_map.layers)))


def _line(row: Row, cells: str) -> str:
    name = escape(row.name)
    header = f'<th scope="row" title="{name}">{name}</th>'
    return f'<tr>{header}{cells}<td class="span">{row.span}</td></tr>\n'


def _cell(value: float | None, name: str, heat_map: HeatMap, width: int = 1) -> str:
    tip = f'title="{escape(name)}: {NO_ADAPTER if value is None else f"{value:.3e}"}"'
    wide = f' colspan="{width}"' if width > 1 else ""
    if value is None:
        return f'<td class="cell none"{wide} {tip}></td>'
    if not math.isfinite(value):
        return f'<td class="cell bad"{wide} {tip}>!</td>'
    color = _color(heat_map.share(value))
    return f'<td class="cell"{wide} style="background:{color}" {tip}></td>'


def _color(share: float) -> str:
    """The colour at a place of the scale, between its two neighbours of the ramp."""
    place = share * (len(_RAMP) - 1)
    lower = min(int(place), len(_RAMP) - 2)
    first, second = (bytes.fromhex(each[1:]) for each in _RAMP[lower : lower + 2])
    mixed = (a + (b - a) * (place - lower) for a, b in zip(first, second, strict=True))
    return "#" + bytes(round(each) for each in mixed).hex()


def _legend(heat_map: HeatMap) -> str:
    ramp = f'<i class="ramp" style="background:linear-gradient(to right,{",".join(_RAMP)})"></i>'
    entries = [f"0 {ramp} {heat_map.largest:.2e}"]
    if heat_map.has_gaps:
        entries.append(f'<i class="none"></i> {NO_ADAPTER}')
    if heat_map.has_not_finite:
        entries.append(f'<i class="bad">!</i> {NOT_FINITE}')
    return "<ul>" + "".join(f"<li>{entry}</li>" for entry in entries) + "</ul>"
