"""An index that does not tell where the tensors are."""

import json

from checkpointing.formats.hf import SAFETENSORS_INDEX
from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import json_files


@cases(60, 1000)
def test_an_index_is_read_or_refused_and_no_file_elsewhere_is_opened(tmp_path, count):
    directory = samples.write_hf_model(tmp_path / "model", max_shard_size="4KB")
    for name in ("secret.safetensors", "secret.json"):
        (tmp_path / name).write_text("{}")
    file = directory / SAFETENSORS_INDEX
    readers = samples.model_readers(directory, "hf")

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, directory)

    fuzz(count, json_files(json.loads(file.read_text())), check)
