"""What a file of ``torch.save`` holds, with nothing of it made or run."""

import argparse
import collections
import io
import os
import pickle
import random

import numpy
import pytest
import torch

from checkpointing.formats.inert_pickle import Inert, StoredTensor, read_inert, read_inert_pickle
from checkpointing.formats.stored_tensors import stored_tensors


class Trainer:
    """What nobody else can load."""

    def __init__(self) -> None:
        self.steps = 5


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def read(path):
    with path.open("rb") as file:
        return read_inert(file, path.stat().st_size)


def test_tensors_are_where_they_lie_and_objects_are_names(tmp_path):
    base = torch.arange(60, dtype=torch.bfloat16).view(5, 12)
    content = {
        "model": collections.OrderedDict(
            whole=base,
            view=base[1:3, 2:9:3],
            bytes=torch.arange(7, dtype=torch.uint8),
            eight=torch.arange(6.0).to(torch.float8_e4m3fn),
            trained=torch.nn.Parameter(torch.arange(4.0)),
            scalar=torch.tensor(3.5),
        ),
        "args": argparse.Namespace(layers=3, dtype=torch.bfloat16, activation=print),
        "rng": [random.getstate(), numpy.random.get_state(), torch.Size((2, 3)), b"\xff\x00"],
        "trainer": Trainer(),
        "counts": collections.Counter("aab"),
    }
    path = tmp_path / "file.pt"
    torch.save(content, path)
    found = read(path)
    assert found["args"].path == "argparse.Namespace"
    assert (found["args"].state["layers"], found["args"].state["dtype"]) == (3, torch.bfloat16)
    assert isinstance(found["args"].state["activation"], type)
    assert isinstance(found["trainer"], Inert) and found["trainer"].state == {"steps": 5}
    assert found["rng"][0] == random.getstate() and found["rng"][2] == (2, 3)
    assert all(isinstance(tensor, StoredTensor) for tensor in found["model"].values())
    tensors = stored_tensors(path, found["model"])
    for name, tensor in content["model"].items():
        assert tensors.metas[name].shape == tuple(tensor.shape)
        assert torch.equal(tensors.read(name).float(), tensor.float()), name


@pytest.mark.parametrize("function", [open, eval, exec, os.system, getattr, print, pickle.loads])
def test_nothing_that_it_asks_for_is_called(tmp_path, function, capfd):
    marker = tmp_path / "marker"
    arguments = {
        open: (str(marker), "w"),
        eval: (f"open({str(marker)!r}, 'w')",),
        exec: (f"open({str(marker)!r}, 'w')",),
        os.system: (f"touch {marker}",),
        getattr: (marker, "touch"),
        pickle.loads: (pickle.dumps(Call(open, str(marker), "w")),),
    }.get(function, ("printed",))
    path = tmp_path / "file.pt"
    torch.save({"model": Call(function, *arguments), "after": 5}, path)
    found = read(path)
    assert isinstance(found["model"], Inert) and found["after"] == 5
    assert not marker.exists() and capfd.readouterr().out == ""


def test_no_memory_is_taken_for_what_it_only_claims(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"model": Call(bytearray, 1 << 45), "zeros": Call(torch.zeros, 1 << 45)}, path)
    assert isinstance(read(path)["model"], Inert)


def test_what_fills_a_class_instead_of_an_object_is_refused():
    # GLOBAL makes a class; BUILD would set its attributes, for all that come after it.
    for path in ("torch._utils _rebuild_tensor_v2", "collections OrderedDict", "some.where Class"):
        module, name = path.split(" ")
        for state in (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86"):
            content = b"\x80\x02c" + f"{module}\n{name}\n".encode() + state + b"b."
            with pytest.raises((TypeError, AttributeError, pickle.UnpicklingError)):
                read_inert_pickle(content)
    assert not hasattr(Inert, "a") and not hasattr(collections.OrderedDict, "a")


def test_no_room_is_made_for_a_number_that_is_only_named():
    content = b"\x80\x02K\x05r\xff\xff\xff\x7f."  # LONG_BINPUT: 16 GB of room for pointers
    with pytest.raises(ValueError, match="2147483647"):
        read_inert_pickle(content)


def _cut_off(content):
    return content[: len(content) // 2]


def _no_archive(content):
    return pickle.dumps({"model": 3})


@pytest.mark.parametrize("damage", [_cut_off, _no_archive])
def test_what_is_no_whole_archive_is_refused(tmp_path, damage):
    stream = io.BytesIO()
    torch.save({"model": torch.ones(300)}, stream)
    path = tmp_path / "file.pt"
    path.write_bytes(damage(stream.getvalue()))
    with pytest.raises(Exception, match=r"zip"):
        read(path)
