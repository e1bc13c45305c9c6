"""The benchmarks at a size where they show nothing but that they work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.benchmarks.durable import chill, resident_pages, warm
from tests.benchmarks.groups import GROUPS, differences
from tests.benchmarks.memory import memory_while
from tests.benchmarks.models import Size

ROOT = Path(__file__).parents[2]
_ALLOCATE = "input(); block = bytearray(50 << 20); del block; print(flush=True); input()"


@pytest.mark.slow
def test_every_row_is_there(tmp_path):
    options = [
        "--gb",
        "0.02",
        "--rounds",
        "1",
        "--pause",
        "0",
        "--peers",
        "",
        "--directory",
        tmp_path,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    tables = dict(re.findall(r"^### (\S+)\n(.*?)(?=^###|\Z)", done.stdout, re.M | re.S))
    assert list(tables) == list(GROUPS)
    for name, rows in ROWS.items():
        found = re.findall(r"^\| ([^|]+?) \|", tables[name], re.M)
        assert [row for row in rows if row not in found] == [], name
    assert "0 of " in tables["merge"]
    assert list(tmp_path.iterdir()) == []


# By group, what its first column must hold.
ROWS = {
    "load": ["load, warm", "load"],
    "cold": ["load, cold"],
    "save": ["save HF", "save HF of an adapter run", "save HF, safetensors", "save HF, DCP"],
    "save-others": ["save meta", "save tune"],
    "merge": ["merge HF", "merge HF, PEFT", "merged: bits that differ from PEFT's"],
    "convert": [
        "convert hf -> meta",
        "convert meta -> hf",
        "convert hf -> tune",
        "convert tune -> hf",
    ],
    "background": [
        "background save, blocked",
        "first background save, blocked",
        "background save, written",
        "steps/s beside a save, 1 thread",
        "steps/s beside a save, 2 threads",
    ],
    "adapter": ["save adapter alone", "save adapter in background, blocked"],
    "verify": ["verify, warm", "verify"],
    "start": ["import checkpointing", "import of its classes"],
    "sharded": ["save HF from 2 ranks"],
    "limits": ["merge HF", "convert hf -> meta", "convert hf -> tune", "convert meta -> hf"],
    "growth": ["load", "save HF", "convert hf -> meta", "merge HF"],
    "stream": [
        "stream",
        "stream without digests",
        "sync an adapter, SmolLM2-135M",
        "stream, PEFT",
        "base changed by 5 exports, ours",
    ],
}


def test_memory_that_is_given_back_counts():
    process = subprocess.Popen(
        [sys.executable, "-c", _ALLOCATE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def allocate():
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()

    memory = memory_while(process.pid, allocate)
    process.communicate("\n")
    assert 50 << 20 <= memory.resident < 60 << 20
    assert 45 << 20 <= memory.private < 60 << 20


def test_a_chilled_directory_is_not_in_the_page_cache(tmp_path):
    file = tmp_path / "inner" / "file"
    file.parent.mkdir()
    file.write_bytes(bytes(5 * 4096 + 1))
    warm(tmp_path)
    assert resident_pages(file) == 6
    chill(tmp_path)
    assert resident_pages(file) == 0


def test_one_bit_is_a_difference(tmp_path):
    tensors = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "x.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "other" / "y.safetensors")
    assert differences(tmp_path / "one", tmp_path / "other") == "only one has ['b']"
    save_file(tensors, tmp_path / "other" / "y.safetensors")
    assert differences(tmp_path / "one", tmp_path / "other") == "0 of 2 tensors"
    changed = load_file(tmp_path / "one" / "x.safetensors")
    changed["b"].view(torch.int32)[1] ^= 1
    save_file(changed, tmp_path / "other" / "y.safetensors")
    assert differences(tmp_path / "one", tmp_path / "other") == "1 of 2 tensors"


def test_the_shape_of_llama_3_2_1b():
    size = Size.of_gigabytes(2.47)
    assert (size.hidden, size.layers, size.vocab) == (2048, 16, 128256)
    assert round(size.largest_bytes / 1e9, 2) == 0.53
