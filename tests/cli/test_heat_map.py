"""The heat map of an adapter: the same numbers in the terminal, in a page and in an image."""

import json
import math
import re
import shutil
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread

from checkpointing.cli.heat_map import arrange, as_text
from checkpointing.cli.heat_map_html import page
from checkpointing.cli.heat_map_png import draw, image
from checkpointing.cli.main import main
from tests.cli.test_convert import write_base
from tests.cli.test_merge import ADAPTER, MODEL, save_adapter
from tests.tiny import LAYER_LINEARS, random_adapter
from tests.training.peers import DIMS, hf_model, native_weights

UPDATES = {
    "layers.0.attn.q_proj": 0.0,
    "layers.1.attn.q_proj": 0.1,
    "layers.3.attn.q_proj": 0.4,
    "layers.0.mlp.w1": 0.2,
    "layers.1.mlp.w1": 0.3,
    "layers.2.mlp.w1": float("inf"),
    "layers.3.mlp.w1": float("nan"),
    "output": 0.25,
}
EVIL = 'x"><script>alert(1)</script>&amp;$\\frac$\x1b[31m'


class Page(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: dict[str, dict[str, str | None]] = {}
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        found = dict(attrs)
        self.attributes |= set(found)
        if "cell" in found.get("class", "").split():
            self.cells[found["title"].rpartition(": ")[0]] = found

    def handle_data(self, data):
        self.text += data

    def value(self, cell: str) -> float:
        return float(self.cells[cell]["title"].rpartition(": ")[2])


def inspect(*arguments: Path | str) -> int:
    return main(["inspect", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("heat_map")
    return save_adapter(write_base(directory / "base", MODEL), directory / "run", ADAPTER)


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    """‖s B A‖ / ‖W‖ of every module, by layer and name as pictures give them."""
    adapter, native = random_adapter(DIMS, ADAPTER), native_weights(hf_model(MODEL), MODEL)
    modules = {
        f"{name}, layer {layer}": f"layers.{layer}.{name}"
        for name in LAYER_LINEARS
        for layer in range(DIMS.layers)
    }
    norms = {}
    for shown, module in {**modules, "output": "output"}.items():
        a, b = (adapter[f"{module}.lora_{each}.weight"].double() for each in "ab")
        update, weight = b @ a * 6 / 4, native[f"{module}.weight"].double()
        norms[shown] = float(torch.linalg.norm(update) / torch.linalg.norm(weight))
    return norms


def test_the_terminal_shades_each_layer_by_its_share_of_the_largest():
    lines = as_text(arrange(UPDATES), 80)
    assert "4.00e-01" in lines[0]
    assert lines[1:] == [
        "  attn.q_proj  | ░·█|  0.00e+00 to 4.00e-01",
        "  mlp.w1       |▒▓!!|  2.00e-01 to 3.00e-01, 2 not finite",
        "  output       |▓▓▓▓|  2.50e-01",
    ]


def test_more_layers_than_fit_in_the_terminal_go_on_below():
    updates = {f"layers.{layer}.mlp.w1": 1.0 + layer for layer in range(81)}
    lines = as_text(arrange(updates), 79)
    assert max(map(len, lines[1:])) <= 79
    assert "".join(re.findall(r"\|(.+)\|", "\n".join(lines))).count("█") == 21
    assert sum(map(len, re.findall(r"\|(.+)\|", "\n".join(lines)))) == 81
    assert re.search(r"layers 0 to (\d+)\n", "\n".join(lines))
    assert len(as_text(arrange(updates), 120)) == 2


def test_the_page_gives_the_norm_of_every_modules_update(checkpoint, expected, tmp_path, capsys):
    assert inspect(checkpoint, "--heat-map", tmp_path / "map.HTML") == 0
    assert f"wrote {tmp_path / 'map.HTML'}" in capsys.readouterr().out
    found = Page((tmp_path / "map.HTML").read_text(encoding="utf-8"))
    assert list(found.cells) == list(expected)
    for cell, norm in expected.items():
        assert found.value(cell) == pytest.approx(norm, rel=6e-4), cell
    assert "LoRA, rank 4, alpha 6" in found.text
    assert f"{max(expected.values()):.2e}" in found.text
    assert "not finite" not in found.text and "without an adapter" not in found.text


def test_the_page_has_the_colours_of_viridis_and_marks_what_has_none():
    found = Page(page(arrange(UPDATES), "title", "subtitle"))
    viridis = matplotlib.colormaps["viridis"]
    for cell, value in {
        "attn.q_proj, layer 0": 0.0,
        "attn.q_proj, layer 1": 0.1,
        "attn.q_proj, layer 3": 0.4,
        "mlp.w1, layer 1": 0.3,
        "output": 0.25,
    }.items():
        color = found.cells[cell]["style"].removeprefix("background:")
        assert to_rgb(color) == pytest.approx(viridis(value / 0.4)[:3], abs=0.01), cell
    marked = {cell: it["class"] for cell, it in found.cells.items() if "style" not in it}
    assert marked == {
        "attn.q_proj, layer 2": "cell none",
        "mlp.w1, layer 2": "cell bad",
        "mlp.w1, layer 3": "cell bad",
    }
    assert found.cells["output"]["colspan"] == "4"
    assert "not finite" in found.text and "without an adapter" in found.text


def test_the_image_has_a_row_for_each_kind_and_a_cell_for_each_layer(expected):
    updates = {
        re.sub(r"(.+), layer (\d+)", r"layers.\2.\1", cell): v for cell, v in expected.items()
    }
    kinds, others, _ = draw(arrange(updates), "title", "subtitle").axes
    assert [label.get_text() for label in kinds.get_yticklabels()] == list(LAYER_LINEARS)
    assert [label.get_text() for label in kinds.get_xticklabels()] == ["0", "1", "2"]
    assert [label.get_text() for label in others.get_yticklabels()] == ["output"]
    values = list(expected.values())
    (mesh,) = kinds.collections
    assert mesh.get_array().shape == (7, 3)
    assert mesh.get_array().flatten().tolist() == values[:-1]
    assert others.collections[0].get_array().tolist() == [[values[-1]]]
    assert mesh.get_clim() == others.collections[0].get_clim() == (0, max(values))


def test_the_image_that_is_saved_shows_the_cells_in_their_colours(checkpoint, expected, tmp_path):
    assert inspect(checkpoint, "--heat-map", tmp_path / "map.png") == 0
    pixels = (imread(tmp_path / "map.png")[..., :3] * 255).round().astype(int)
    colors, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    large = {to_hex(color / 255) for color, n in zip(colors, counts, strict=True) if n > 1000}
    viridis = matplotlib.colormaps["viridis"]
    for cell, norm in expected.items():
        wanted = np.array(viridis(norm / max(expected.values()))[:3])
        assert min(abs(np.array(to_rgb(each)) - wanted).max() for each in large) < 1 / 255, cell


def test_an_image_of_what_is_not_finite_or_without_an_adapter_marks_it():
    kinds, _, scale = draw(arrange(UPDATES), "title", "subtitle").axes
    mask = kinds.collections[0].get_array().mask
    assert mask.tolist() == [[False, False, True, False], [False, False, True, True]]
    marks = [text for text in kinds.texts if text.get_text() == "!"]
    assert [text.get_position() for text in marks] == [(2.5, 1.5), (3.5, 1.5)]
    labels = [text.get_text() for text in scale.get_legend().get_texts()]
    assert labels == ["without an adapter", "! not finite"]


@pytest.mark.parametrize("layers", [1, 31, 81, 126])
def test_layers_of_any_number_are_numbered_without_overlap(layers):
    updates = {f"layers.{n}.mlp.experts.gate_proj": 1.0 for n in range(layers)}
    figure = draw(arrange(updates), "title", "subtitle")
    image(arrange(updates), "title", "subtitle")
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    found = Page(page(arrange(updates), "title", "subtitle"))
    assert len(found.cells) == layers


def test_an_adapter_outside_of_the_layers_alone_and_one_of_zeros_have_pictures():
    for updates in ({"output": 0.5}, {"layers.0.mlp.w1": 0.0, "layers.1.mlp.w1": 0.0}):
        heat_map = arrange(updates)
        assert len(Page(page(heat_map, "title", "subtitle")).cells) == len(updates)
        assert image(heat_map, "title", "subtitle").startswith(b"\x89PNG")
        assert len(as_text(heat_map, 80)) == 2


def test_names_from_files_stay_text_in_every_rendering(tmp_path, capsys):
    base, adapter = tmp_path / "base", tmp_path / EVIL.replace("/", "")
    base.mkdir()
    adapter.mkdir()
    modules = (f"layers.0.{EVIL}", EVIL)
    weights = {f"{module}.weight": torch.ones(3, 5) for module in modules}
    torch.save({"layers.0.attn.q_proj.weight": torch.ones(2, 5), **weights}, base / "model.pt")
    lora = {}
    for module in modules:
        lora[f"{module}.lora_a.weight"] = torch.full((1, 5), 0.5)
        lora[f"{module}.lora_b.weight"] = torch.full((3, 1), 0.25)
    torch.save(lora, adapter / "adapter_model.pt")
    facts = {"adapter_config": {"r": 1, "lora_alpha": 1.0, "target_modules": [EVIL]}, "files": {}}
    (adapter / "manifest.json").write_text(json.dumps(facts))
    for suffix in ("html", "png"):
        assert inspect(adapter, "--base", base, "--heat-map", tmp_path / f"map.{suffix}") == 0
    printed = capsys.readouterr().out
    shown = EVIL.replace("\x1b", "\\x1b")
    assert printed.count(f"  {shown}  |█|  1.25e-01") == 4
    found = Page((tmp_path / "map.html").read_text(encoding="utf-8"))
    assert list(found.cells) == [f"{shown}, layer 0", shown]
    assert found.value(shown) == 0.125
    assert found.tags.isdisjoint({"script", "img", "link", "iframe", "b"})
    assert not any(name.startswith("on") or name in ("src", "href") for name in found.attributes)
    assert imread(tmp_path / "map.png").ndim == 3


def test_a_picture_is_replaced_and_a_file_of_a_checkpoint_is_not(checkpoint, tmp_path, capsys):
    (tmp_path / "map.html").write_text("old")
    assert inspect(checkpoint, "--heat-map", tmp_path / "map.html") == 0
    assert (tmp_path / "map.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    base = checkpoint.parents[1] / "base"
    for directory in (checkpoint, base):
        theirs = directory / "card.html"
        theirs.write_text("theirs")
        (tmp_path / "link.html").unlink(missing_ok=True)
        (tmp_path / "link.html").symlink_to(theirs)
        for file in (theirs, tmp_path / "link.html"):
            assert inspect(checkpoint, "--heat-map", file) == 1
            assert "in the directory of a checkpoint" in capsys.readouterr().err
        assert theirs.read_text() == "theirs"
        theirs.unlink()


def test_a_file_that_cannot_be_made_is_refused_first(checkpoint, tmp_path, capsys):
    for name, reason in {
        "map.jpg": "as .png or .html",
        "map": "as .png or .html",
        "none/map.png": "no such directory",
    }.items():
        assert inspect(checkpoint, "--heat-map", tmp_path / name) == 1
        printed = capsys.readouterr()
        assert reason in printed.err and str(tmp_path) in printed.err
        assert not printed.out
    (tmp_path / "dir.png").mkdir()
    assert inspect(checkpoint, "--heat-map", tmp_path / "dir.png") == 1
    assert "is a directory" in capsys.readouterr().err


def test_without_matplotlib_an_image_is_refused_and_a_page_is_made(
    checkpoint, tmp_path, capsys, monkeypatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert inspect(checkpoint, "--heat-map", tmp_path / "map.png") == 1
    assert "tunepoint[plot]" in capsys.readouterr().err
    assert inspect(checkpoint, "--heat-map", tmp_path / "map.html") == 0


def test_a_model_and_an_adapter_without_its_base_have_no_picture(checkpoint, tmp_path, capsys):
    file = tmp_path / "map.html"
    assert inspect(checkpoint.parents[1] / "base", "--heat-map", file) == 1
    assert "holds no adapter" in capsys.readouterr().err
    shutil.copytree(checkpoint.parents[1], tmp_path / "copy")
    moved = tmp_path / "copy" / "run" / checkpoint.name
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["base"]["directory"] = str(tmp_path / "gone")
    (moved / "manifest.json").write_text(json.dumps(manifest))
    assert inspect(moved, "--heat-map", file) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "gone") in error and "--base" in error
    assert not file.exists()
    assert inspect(moved, "--heat-map", file, "--base", tmp_path / "copy" / "base") == 0
    assert file.exists()


def test_json_stays_json_when_a_picture_is_saved(checkpoint, tmp_path, capsys):
    assert inspect(checkpoint, "--json", "--heat-map", tmp_path / "map.html") == 0
    updates = json.loads(capsys.readouterr().out)["adapter"]["relative_updates"]
    found = Page((tmp_path / "map.html").read_text(encoding="utf-8"))
    assert math.isclose(found.value("output"), updates["output"], rel_tol=6e-4)
