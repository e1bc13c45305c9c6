"""Small or large files that would take all memory or time are refused within bounds."""

import json
import struct
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_GROWTH = 700 << 20

# Reads a file in a process of its own, which may grow by so much and no more.
_READ = """
import resource, sys, time
from pathlib import Path
from checkpointing.errors import CheckpointingError
from checkpointing.storage.read import open_tensor_file, read_json

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (2 << 30),) * 2)
for path in map(Path, sys.argv[1:]):
    start = time.perf_counter()
    try:
        (read_json if path.suffix == ".json" else open_tensor_file)(path)
        said = "read"
    except CheckpointingError as error:
        assert path.name in str(error), error
        said = "refused"
    print(path.name, said, peak() - before, time.perf_counter() - start)
"""


def _header(entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


_PETABYTES = {"x": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}
_OVERFLOW = {"x": {"dtype": "F32", "shape": [1 << 33, 1 << 33], "data_offsets": [0, 0]}}


def _large(path, piece, size):
    with path.open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)


def _repeated(path, start, piece):
    text = start + piece * ((40 << 20) // len(piece))
    path.write_bytes(struct.pack("<Q", len(text)) + text)


_FILES = {
    "deep.json": lambda path: _large(path, b"[" * 1000, 50 << 20),
    "nested.json": lambda path: _large(path, b'{"a":' * 1000, 60 << 20),
    "long.json": lambda path: _large(path, b" " * 1000, 200 << 20),
    "number.json": lambda path: path.write_bytes(b'{"a": ' + b"9" * (10 << 20) + b"}"),
    "petabytes.safetensors": lambda path: path.write_bytes(_header(_PETABYTES)),
    "overflow.safetensors": lambda path: path.write_bytes(_header(_OVERFLOW)),
    "length.safetensors": lambda path: path.write_bytes(struct.pack("<Q", 1 << 50) + b"{}"),
    "nested.safetensors": lambda path: path.write_bytes(
        struct.pack("<Q", 1 << 20) + b"[" * (1 << 20)
    ),
    "lists.safetensors": lambda path: _repeated(path, b'{"x":{"dtype":"F32","shape":[', b"[],"),
    "sizes.safetensors": lambda path: _repeated(path, b'{"x":{"dtype":"F32","shape":[', b"0,"),
    "metadata.safetensors": lambda path: _repeated(path, b'{"__metadata__":{', b'"":"",'),
    "name.safetensors": lambda path: _repeated(path, b'{"', b"\\n"),
}


def test_reading_such_files_takes_bounded_memory_and_time(tmp_path):
    for name, write in _FILES.items():
        write(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", _READ, *(str(tmp_path / name) for name in _FILES)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=_ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name: said for name, said, _, _ in lines} == {
        name: "read" if name == "number.json" else "refused" for name in _FILES
    }
    assert all(int(growth) < _GROWTH and float(seconds) < 5 for _, _, growth, seconds in lines)
