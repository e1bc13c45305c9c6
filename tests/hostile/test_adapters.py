"""An adapter_config.json that says anything."""

import json

import pytest

from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import json_files

_FIELDS = (
    *("bias", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
    *("layers_to_transform", "modules_to_save", "use_dora", "lora_bias", "init_lora_weights"),
    *("target_parameters", "base_model_name_or_path", "ensure_weight_tying", "use_rslora"),
)


@cases(80, 1500)
def test_an_adapter_config_is_read_or_refused_with_its_name(tmp_path, count):
    base, adapter = samples.write_peft_adapter(tmp_path)
    file = adapter / "adapter_config.json"
    readers = samples.adapter_readers(base, adapter)

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, tmp_path)

    fuzz(count, json_files(json.loads(file.read_text()), _FIELDS), check)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "(a|.)*(b|.)*(.*)*" * 20 + "x"},
        {"exclude_modules": ".*" * 300 + "x"},
        {"rank_pattern": {"(.+)+" * 30 + "x": 4}},
        {"alpha_pattern": {f"(.+)+x{n}": 4.0 for n in range(300)}},
        {"rank_pattern": {f"x{n}": 4 for n in range(50_000)}},
        {"target_modules": [f"x{n}" for n in range(500_000)]},
    ],
    ids=["targets", "excluded", "rank", "alphas", "ranks", "names"],
)
def test_patterns_made_to_take_for_ever_do_not(tmp_path, changes):
    base, adapter = samples.write_peft_adapter(tmp_path)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    for read in samples.adapter_readers(base, adapter):
        survives(read, tmp_path)
