"""Configs are read, changed from the command line, checked, and turned into objects."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from checkpointing.errors import ConfigError
from checkpointing.training.config import instantiate, load_config, validate
from checkpointing.training.overrides import parse_override

CONFIG = """
output_dir: out/run
batch_size: 4
limit: 3e-4
model:
  lora_rank: 16
  lora_attn_modules: [q_proj, v_proj]
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
  weight_decay: 0.01
logger:
  log_dir: ${output_dir}/logs
lr_scheduler: null
"""
KEYS = frozenset(
    {
        "output_dir",
        "batch_size",
        "limit",
        "model",
        "model.lora_rank",
        "model.lora_attn_modules",
        "model.lora_alpha",
        "optimizer",
        "logger",
        "lr_scheduler",
        "clip_grad_norm",
    }
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3))]


# Reading


def test_numbers_without_a_dot_before_the_exponent_are_floats(path: Path) -> None:
    config = load_config(path)
    assert config.limit == 0.0003
    assert isinstance(config.limit, float)


def test_a_file_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["a: [1", "- a\n- b", "a: 1\na: 2", "a: *b"])
def test_a_file_that_is_not_a_mapping_in_yaml_is_an_error_with_its_path(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(file)


def test_an_unknown_key_of_the_file_is_an_error_with_the_nearest_key(path: Path) -> None:
    path.write_text(CONFIG + "clip_grad_nrom: 1.0\nepocs: 1\n")
    with pytest.raises(ConfigError, match=r"clip_grad_nrom.*'clip_grad_norm'") as caught:
        load_config(path, known_keys=KEYS)
    assert "epocs" in str(caught.value)


def test_an_unknown_nested_key_of_the_file_is_an_error_with_the_nearest_key(path: Path) -> None:
    path.write_text(CONFIG.replace("lora_rank:", "lora_rnk:"))
    with pytest.raises(ConfigError, match=r"model\.lora_rnk.*'lora_rank'"):
        load_config(path, known_keys=KEYS)


def test_an_unknown_key_of_the_file_can_be_deleted_from_the_command_line(path: Path) -> None:
    path.write_text(CONFIG + "profiler: {enabled: false}\n")
    assert "profiler" not in load_config(path, ["~profiler"], known_keys=KEYS)


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("batch_size=8", "batch_size", 8),
        ("limit=3e-4", "limit", 0.0003),
        ("limit=1E5", "limit", 100000.0),
        ("output_dir=a=b=c", "output_dir", "a=b=c"),
        ("output_dir=s3://bucket/x?y=1", "output_dir", "s3://bucket/x?y=1"),
        ("output_dir='3e-4'", "output_dir", "3e-4"),
        ("output_dir=null", "output_dir", None),
        ("output_dir=", "output_dir", None),
        ("batch_size=true", "batch_size", True),
        ("model.lora_rank=4", "model.lora_rank", 4),
        (
            "model.lora_attn_modules=[k_proj,q_proj]",
            "model.lora_attn_modules",
            ["k_proj", "q_proj"],
        ),
        ("model.lora_attn_modules=[]", "model.lora_attn_modules", []),
        ("model.lora_attn_modules.1=k_proj", "model.lora_attn_modules", ["q_proj", "k_proj"]),
        ("model={lora_rank: 2}", "model.lora_rank", 2),
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("optimizer.betas=[0.8,0.95]", "optimizer.betas", [0.8, 0.95]),
        ("model.lora_alpha=32", "model.lora_alpha", 32),
        ("clip_grad_norm=0.5", "clip_grad_norm", 0.5),
        ("logger.log_dir=${output_dir}/x", "logger.log_dir", "out/run/x"),
    ],
)
def test_an_override_sets_a_key(path: Path, override: str, key: str, value: object) -> None:
    config = load_config(path, [override], known_keys=KEYS)
    found = OmegaConf.select(config, key)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == value
    assert type(found) is type(value)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_any_quoted_text_is_a_value_whatever_signs_are_in_it(value: str) -> None:
    quoted = value.replace("'", "''").replace("$", "")
    override = parse_override(f"a.b='{quoted}'")
    assert (override.key, override.value) == ("a.b", value.replace("$", ""))


@given(st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=2, max_size=5))
def test_only_the_first_equals_sign_separates_key_and_value(parts: list[str]) -> None:
    override = parse_override("key=" + "=".join(parts))
    assert (override.key, override.value) == ("key", "=".join(parts))


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_number_written_as_python_writes_it_is_that_number(value: float) -> None:
    read = parse_override(f"key={value!r}").value
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text", ["batch_size", "=3", "a..b=1", "--x=1", "~", "~a=", "~a..b", "+", "a b=1"]
)
def test_what_is_no_override_is_an_error_that_shows_the_forms(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        load_config(path, [text])


@pytest.mark.parametrize("text", ["output_dir=[a", "output_dir=@x", "output_dir=${x"])
def test_a_value_that_is_not_yaml_is_an_error_that_shows_the_override(
    path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        load_config(path, [text])


def test_of_two_overrides_of_a_key_the_later_counts(path: Path) -> None:
    assert load_config(path, ["batch_size=1", "batch_size=2"]).batch_size == 2


@pytest.mark.parametrize("key", ["batch_size", "optimizer.weight_decay", "model", "lr_scheduler"])
def test_a_tilde_deletes_a_key(path: Path, key: str) -> None:
    config = load_config(path, [f"~{key}"], known_keys=KEYS)
    parent, _, name = key.rpartition(".")
    assert name not in (config[parent] if parent else config)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("batchsize", "batch_size"), ("optimizer.weightdecay", "weight_decay"), ("modl.x", "model")],
)
def test_deleting_what_is_not_there_is_an_error_with_the_nearest_key(
    path: Path, key: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{nearest}'"):
        load_config(path, [f"~{key}"])


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("bach_size=8", "batch_size"),
        ("clip_grad_nrom=1", "clip_grad_norm"),
        ("model.lora_rnk=8", "lora_rank"),
        ("model.lora_alfa=8", "lora_alpha"),
        ("optimiser.lr=1", "optimizer"),
        ("optimizer.bettas=[0.1,0.2]", "betas"),
    ],
)
def test_an_override_of_an_unknown_key_is_an_error_with_the_nearest_key(
    path: Path, override: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{nearest}'") as caught:
        load_config(path, [override], known_keys=KEYS)
    assert override in str(caught.value)


def test_a_value_has_no_keys_inside(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_size\.x=1: batch_size is 4"):
        load_config(path, ["batch_size.x=1"])


def test_without_declared_keys_an_override_names_a_key_of_the_file(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'batch_size'\?.*\+batchsize=8"):
        load_config(path, ["batchsize=8"])


def test_without_declared_keys_a_plus_adds_a_key_at_any_depth(path: Path) -> None:
    config = load_config(path, ["+my_key=8", "+a.b.c=[1]", "+model.d=2"])
    assert (config.my_key, config.a.b.c, config.model.d) == (8, [1], 2)


def test_a_plus_does_not_add_what_the_recipe_does_not_know(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my_key"):
        load_config(path, ["+my_key=8"], known_keys=KEYS)


def test_a_bare_name_replaces_the_class_of_a_component_and_keeps_its_arguments(
    path: Path,
) -> None:
    config = load_config(path, ["optimizer=torch.optim.SGD"])
    assert config.optimizer == {
        "_component_": "torch.optim.SGD",
        "lr": 0.0003,
        "weight_decay": 0.01,
    }


def test_null_switches_a_component_off(path: Path) -> None:
    assert load_config(path, ["optimizer=null"]).optimizer is None


@pytest.mark.parametrize(
    "switch", ["optimizer=torch.optim.SGD", "optimizer._component_=torch.optim.SGD"]
)
def test_an_argument_is_checked_against_the_class_of_the_same_command_line(
    path: Path, switch: str
) -> None:
    config = load_config(path, ["optimizer.momentum=0.9", switch], known_keys=KEYS)
    assert config.optimizer.momentum == 0.9
    with pytest.raises(ConfigError, match="SGD has no argument 'betas'"):
        load_config(path, ["optimizer.betas=[0.8,0.9]", switch], known_keys=KEYS)


def test_a_component_can_be_given_where_the_file_has_none(path: Path) -> None:
    overrides = [
        "lr_scheduler.step_size=3",
        "lr_scheduler._component_=torch.optim.lr_scheduler.StepLR",
    ]
    config = load_config(path, overrides, known_keys=KEYS)
    assert config.lr_scheduler.step_size == 3


# Components


def test_a_component_gets_positional_arguments_and_the_keys_of_its_node(path: Path) -> None:
    optimizer = instantiate(load_config(path).optimizer, parameters())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 0.0003
    assert optimizer.defaults["weight_decay"] == 0.01


def test_an_argument_of_the_call_goes_before_that_of_the_node(path: Path) -> None:
    optimizer = instantiate(load_config(path).optimizer, params=parameters(), lr=1.0)
    assert optimizer.defaults["lr"] == 1.0


def test_a_node_that_is_null_gives_none() -> None:
    assert instantiate(None) is None


def test_references_are_resolved_and_collections_are_plain() -> None:
    config = OmegaConf.create(
        {
            "sizes": [1, 2],
            "node": {"_component_": "builtins.dict", "a": "${sizes}", "b": {"c": "${sizes.0}"}},
        }
    )
    made = instantiate(config.node)
    assert made == {"a": [1, 2], "b": {"c": 1}}
    assert type(made["a"]) is list
    assert type(made["b"]) is dict


def test_components_inside_a_component_are_made_first() -> None:
    config = OmegaConf.create(
        {
            "_component_": "builtins.dict",
            "one": {"_component_": "fractions.Fraction", "numerator": 3, "denominator": 4},
            "many": [{"_component_": "fractions.Fraction", "numerator": 1}],
        }
    )
    made = instantiate(config)
    assert str(made["one"]) == "3/4"
    assert made["many"] == [1]


def test_a_module_of_the_same_name_does_not_hide_what_its_package_offers() -> None:
    # The package `datetime` offers a class of its own name.
    assert instantiate({"_component_": "datetime.datetime", "year": 2000, "month": 1, "day": 2})


def test_an_unknown_argument_is_an_error_with_the_nearest(path: Path) -> None:
    config = load_config(path, ["+optimizer.weigth_decay=1", "+optimizer.amsgrd=true"])
    with pytest.raises(ConfigError, match=r"AdamW.*'weigth_decay'.*'weight_decay'") as caught:
        instantiate(config.optimizer, parameters())
    assert "'amsgrad'" in str(caught.value)


def test_required_arguments_that_miss_are_all_named() -> None:
    node = {"_component_": "torch.optim.lr_scheduler.OneCycleLR"}
    with pytest.raises(ConfigError, match=r"'optimizer' is missing(.|\n)*'max_lr' is missing"):
        instantiate(node)


def test_a_node_without_a_component_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="_component_"):
        instantiate({"lr": 1})


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("torch.optim.AdmW", "torch.optim has no 'AdmW'; did you mean 'Adam"),
        ("torch.optm.AdamW", "torch has no 'optm'; did you mean 'optim'"),
        ("torch.optim.adamw", "did you mean|not a class"),
        ("no_such_package.Thing", "'no_such_package' is not installed"),
        ("AdamW", "not the dotted path"),
        ("torch..AdamW", "not the dotted path"),
        ("torch.optim", "a module, not a class"),
        (3, "not the dotted path"),
    ],
)
def test_a_component_that_does_not_exist_is_an_error_that_says_why(
    component: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        instantiate({"_component_": component})


def test_a_module_that_needs_an_absent_package_is_not_taken_for_absent_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_module.py").write_text("import package_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the package 'package_that_is_absent'"):
        instantiate({"_component_": "own_module.Thing"})


# Validation


def test_a_good_config_is_valid(path: Path) -> None:
    validate(load_config(path))


def test_validation_reports_all_problems_together(path: Path) -> None:
    path.write_text(
        CONFIG
        + """
a: {_component_: torch.optim.AdmW}
b: {_component_: no_such_package.Thing}
c: {_component_: torch.optim.SGD, momentm: 0.9}
d: ${nowhere}
e: ???
f: [{g: {_component_: torch.nn.Linear, in_feature: 3}}]
"""
    )
    with pytest.raises(ConfigError) as caught:
        validate(load_config(path))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("6 problems")
    for line, words in zip(
        lines[1:],
        [
            ("d:", "nowhere"),
            ("e:", "mandatory"),
            ("a:", "'AdmW'"),
            ("b:", "not installed"),
            ("c:", "'momentm'", "'momentum'"),
            ("f.0.g:", "'in_feature'", "'in_features'"),
        ],
        strict=True,
    ):
        assert all(word in line for word in words), (line, words)
