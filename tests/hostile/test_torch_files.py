"""A file of torch.save that is damaged, lies about its tensors, or would run code."""

import codecs
import io
import pickle
import zipfile

import pytest
import torch

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.read import load_torch_file, open_tensor_file
from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import damaged, damaged_pickles, repacked, torch_files


@pytest.mark.parametrize("kind", ["bin", "pth"])
@cases(40, 700)
def test_a_model_is_read_or_refused_with_its_name(tmp_path, kind, count):
    if kind == "bin":
        directory = samples.write_bin_model(tmp_path / "model")
        file, readers = directory / "pytorch_model.bin", samples.model_readers(directory, "hf")
    else:
        directory = samples.write_meta_model(tmp_path / "model", ranks=2)
        file, readers = directory / "consolidated.01.pth", samples.model_readers(directory, "meta")

    def check(content):
        file.write_bytes(content)
        for read in readers[:3]:
            survives(read, tmp_path)

    fuzz(count, torch_files(file.read_bytes()), check)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", ".metadata", "__0_0.distcp", "common.pt"])
@cases(40, 700)
def test_a_megatron_model_is_read_or_refused_with_its_name(tmp_path, name, count):
    root = tmp_path / "model"
    if name == "model_optim_rng.pt":
        samples.write_megatron_model(root)
        file = root / "iter_0000012" / "mp_rank_00_001" / name
    else:
        samples.write_distributed_model(root)
        file = root / "iter_0000012" / name
    readers = samples.megatron_readers(root)
    valid = file.read_bytes()

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, tmp_path)

    # The description is a pickle alone, and the file of pieces many archives of torch.save.
    mutate = {".metadata": damaged_pickles, "__0_0.distcp": damaged}.get(name, torch_files)
    fuzz(count, mutate(valid), check)


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def _pickled(value):
    return pickle.dumps(value, protocol=2)


@pytest.fixture
def valid(tmp_path):
    path = tmp_path / "valid.pt"
    torch.save({"weight": torch.arange(15.0).view(3, 5)}, path)
    return path.read_bytes()


def _refused(path, content, match):
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        load_torch_file(path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "pickle"])
@pytest.mark.parametrize("function", [open, eval, exec, print, getattr, torch.load, pickle.loads])
def test_code_is_not_run_whatever_is_called(tmp_path, valid, function, legacy):
    marker = tmp_path / "marker"
    arguments = {
        open: (str(marker), "w"),
        eval: (f"open({str(marker)!r}, 'w')",),
        exec: (f"open({str(marker)!r}, 'w')",),
        getattr: ("", "format"),
        pickle.loads: (_pickled(Call(open, str(marker), "w")),),
    }.get(function, (str(marker),))
    content = _pickled({"weight": Call(function, *arguments)})
    content = content if legacy else repacked(valid, {"data.pkl": content})
    _refused(tmp_path / "code.pt", content, "cannot be read")
    assert not marker.exists()


def test_a_byte_array_of_a_terabyte_is_not_made(tmp_path, valid):
    content = _pickled({"x": Call(bytearray, 1 << 40)})
    _refused(tmp_path / "bomb.pt", repacked(valid, {"data.pkl": content}), "cannot be read")


def test_a_text_that_is_encoded_over_and_over_is_not(tmp_path, valid):
    text = Call(codecs.encode, "ab" * 50, "latin1")
    for _ in range(40):
        text = Call(codecs.encode, text, "hex_codec")
    content = _pickled({"x": text})
    _refused(tmp_path / "bomb.pt", repacked(valid, {"data.pkl": content}), "cannot be read")


def _tensor(**changes):
    """A pickled tensor whose parts are changed."""
    storage = torch.arange(15.0).untyped_storage()
    parts = {"offset": 0, "size": (3, 5), "stride": (5, 1), "numel": 15, "key": "0"} | changes

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, torch.UntypedStorage):
                return ("storage", torch.FloatStorage, parts["key"], "cpu", parts["numel"])

    rebuilt = Call(
        torch._utils._rebuild_tensor_v2,
        storage,
        *(parts["offset"], parts["size"], parts["stride"], False, None),
    )
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump({"weight": rebuilt})
    return stream.getvalue()


def test_the_pickle_made_here_is_read_if_nothing_in_it_is_changed(tmp_path, valid):
    path = tmp_path / "same.pt"
    path.write_bytes(repacked(valid, {"data.pkl": _tensor()}))
    assert torch.equal(load_torch_file(path)["weight"], torch.arange(15.0).view(3, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": (1 << 20, 1 << 20), "stride": (0, 0)},
        {"size": (1 << 62, 1 << 62), "stride": (1, 1)},
        {"size": (3, 6)},
        {"size": (3, -5)},
        {"size": (4, 5)},
        {"stride": (6, 1)},
        {"stride": (-5, 1)},
        {"offset": 1},
        {"offset": -1},
        {"offset": 1 << 62},
        {"numel": 16},
        {"numel": 1 << 48},
        {"numel": -1},
        {"numel": True},
        {"key": "1"},
        {"key": "../0"},
        {"size": (1,) * 65, "stride": (1,) * 65},
    ],
    ids=str,
)
def test_a_tensor_that_is_more_than_its_file_holds_is_refused(tmp_path, valid, changes):
    content = repacked(valid, {"data.pkl": _tensor(**changes)})
    _refused(tmp_path / "lies.pt", content, "cannot be read")


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path, valid):
    zeros = {"data.pkl": bytes(50 << 20)}
    content = repacked(valid, zeros, zipfile.ZIP_DEFLATED)
    assert len(content) < 100_000
    _refused(tmp_path / "bomb.pth", content, "compressed")


@pytest.mark.parametrize("field", [20, 24])
def test_a_record_that_claims_gigabytes_is_refused(tmp_path, valid, field):
    # Compressed and uncompressed size in the first entry of the central directory.
    place = valid.index(b"PK\x01\x02") + field
    content = valid[:place] + (0xF0000000).to_bytes(4, "little") + valid[place + 4 :]
    _refused(tmp_path / "claims.pth", content, "cannot be read")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["valid/data.pkl", "valid/DATA.PKL"])
def test_an_archive_with_two_entries_of_one_name_is_refused(tmp_path, valid, name):
    path = tmp_path / "twice.pth"
    path.write_bytes(valid)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, _pickled({}))
    _refused(path, path.read_bytes(), "twice")


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(3, dtype=torch.complex64), "complex64, which is not supported"),
        (torch.eye(3).to_sparse(), "cannot be read"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "cannot be read"),
        (torch.empty(3, device="meta"), "cannot be read"),
        (torch.ones(1).expand(7), "cannot be read"),
    ],
    ids=["complex", "sparse", "quantised", "meta", "expanded"],
)
def test_tensors_that_no_weight_is_are_refused(tmp_path, tensor, says):
    path = tmp_path / "odd.pt"
    torch.save({"weight": tensor}, path)
    with pytest.raises(CorruptCheckpointError, match=says):
        open_tensor_file(path)
