"""A safetensors file whose header or data is not what it should be."""

from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import safetensors_files


@cases(60, 1500)
def test_a_model_is_read_or_refused_with_its_name(tmp_path, count):
    directory = samples.write_hf_model(tmp_path / "model")
    file = directory / "model.safetensors"
    readers = samples.model_readers(directory, "hf")

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, tmp_path)

    fuzz(count, safetensors_files(file.read_bytes()), check)


@cases(40, 700)
def test_an_adapter_is_read_or_refused_with_its_name(tmp_path, count):
    base, adapter = samples.write_peft_adapter(tmp_path)
    file = adapter / "adapter_model.safetensors"
    readers = samples.adapter_readers(base, adapter)

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, tmp_path)

    fuzz(count, safetensors_files(file.read_bytes()), check)
