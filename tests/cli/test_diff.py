"""`tune diff` compares two models, in whatever formats they are."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpointing.cli.main import main
from tests.cli.test_convert import convert, write_base
from tests.cli.test_merge import ADAPTER, MODEL, save_adapter
from tests.training.peers import config


def write(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """Native weights without a config, which can hold any tensors."""
    directory.mkdir()
    torch.save({"layers.0.attn.q_proj.weight": torch.ones(2, 3), **tensors}, directory / "model.pt")
    return directory


def diff(a: Path, b: Path, *more: str) -> int:
    return main(["diff", str(a), str(b), *more])


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_the_same_in_every_format(tmp_path, capsys, tied):
    base = write_base(tmp_path / "base", config(tied=tied), torch.bfloat16)
    for to in ("meta", "tune"):
        assert convert(base, tmp_path / to, to) == 0
    capsys.readouterr()
    assert diff(base, tmp_path / "meta") == 0
    assert f"same, bit for bit: {29 if tied else 30} of" in capsys.readouterr().out
    assert diff(tmp_path / "tune", tmp_path / "meta") == 0


def test_differences_are_named_measured_and_sorted(tmp_path, capsys):
    a = {
        "small": torch.tensor([3.0, 4.0]),
        "large": torch.tensor([0.0, 2.0]),
        "half": torch.tensor([1.0, 2.0]),
        "zero": torch.tensor([0.0]),
        "wide": torch.zeros(2, 5),
        "gone": torch.zeros(7),
        "same": torch.tensor([float("nan")]),
    }
    b = {
        "small": torch.tensor([3.0, 4.5]),
        "large": torch.tensor([3.0, -2.0]),
        "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
        "zero": torch.tensor([-0.0]),
        "wide": torch.zeros(5, 2),
        "new": torch.zeros(11),
        "same": torch.tensor([float("nan")]),
    }
    assert diff(write(tmp_path / "a", a), write(tmp_path / "b", b)) == 1
    printed = capsys.readouterr().out
    assert "same, bit for bit: 2 of 9 tensors" in printed
    assert re.search(r"only in A: 1 tensor\n  gone +\[7\] float32", printed)
    assert re.search(r"only in B: 1 tensor\n  new +\[11\] float32", printed)
    assert re.search(r"wide +\[2, 5\] float32 in A, \[5, 2\] float32 in B", printed)
    rows = re.findall(r"^  (\w+) +([\d.e-]+) +([\d.e-]+)(.*)$", printed, re.MULTILINE)
    # |A-B| = (3, 4), norm 5, over the norm 2; 0.5 over 5; and values that are equal.
    assert [row[:3] for row in rows[:2]] == [("large", "4", "2.5"), ("small", "0.5", "0.1")]
    assert {row[0] for row in rows[2:]} == {"half", "zero"}
    assert "float32 / float16" in printed


def test_a_value_that_is_not_a_number_comes_first(tmp_path, capsys):
    a = {"x": torch.tensor([1.0]), "y": torch.tensor([1.0])}
    b = {"x": torch.tensor([9.0]), "y": torch.tensor([float("nan")])}
    assert diff(write(tmp_path / "a", a), write(tmp_path / "b", b)) == 1
    printed = capsys.readouterr().out
    assert printed.index("  y  ") < printed.index("  x  ")
    assert "nan" in printed


def test_a_long_list_is_cut_unless_all_of_it_is_wanted(tmp_path, capsys):
    a = write(tmp_path / "a", {f"t{n}": torch.tensor([1.0]) for n in range(31)})
    b = write(tmp_path / "b", {f"t{n}": torch.tensor([2.0 + n]) for n in range(31)})
    assert diff(a, b) == 1
    printed = capsys.readouterr().out
    assert "11 more" in printed and "t30" in printed and "t1 " not in printed
    assert diff(a, b, "--all") == 1
    assert "t1 " in capsys.readouterr().out


def test_two_adapters_are_compared_with_each_other(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = save_adapter(base, tmp_path / "first", ADAPTER)
    second = save_adapter(base, tmp_path / "second", ADAPTER)
    assert diff(first, second) == 0
    assert "44 of 44 tensors" in capsys.readouterr().out
