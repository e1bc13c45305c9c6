"""Adapters that PEFT itself saved, carried on natively."""

import itertools
import json
import logging

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
)
from checkpointing.adapters.peft import to_peft
from checkpointing.adapters.peft_in import from_peft, read_peft
from checkpointing.errors import CheckpointNotFoundError, ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.tensors import StateDictSource, as_source
from checkpointing.training import (
    adapter_state_dict,
    add_adapter,
    build_decoder,
    check_same_adapter,
    load_adapter,
)
from tests.tiny import assert_same_tensors, random_adapter, write_hf
from tests.training import runs
from tests.training.peers import config, hf_model, native_weights, tokens

CONFIGS = {
    "llama": config(attention_bias=True, mlp_bias=True),
    "llama-tied": config(tied=True),
    "mistral": config(family="mistral", sliding_window=9),
}
ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTN, "gate_proj", "down_proj", "up_proj"]
PATTERNS = {
    "rank_pattern": {"down_proj": 7, r"^model\.layers\.1\.self_attn\.[qk]_proj": 2},
    "alpha_pattern": {r"layers\.2\..*proj": 11, "model.layers.0.self_attn.q_proj": 3},
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": PATTERNS,
    "rsdora-patterns": {**PATTERNS, "use_dora": True, "use_rslora": True},
}
TARGETS = {
    "q-down": ["q_proj", "down_proj"],
    "regex": r".*\.(q_proj|down_proj)",
    "all-linear": "all-linear",
    "all-head": [*ALL, "lm_head"],
}


def peft_model(model, **settings):
    """A model of transformers with PEFT's adapter, all of whose tensors are random."""
    model = peft.get_peft_model(
        model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings)
    )
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif ".modules_to_save." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_peft(directory, model_config=CONFIGS["llama"], safe=True, **settings):
    """A model with an adapter, saved as PEFT saves it; the model."""
    model = peft_model(hf_model(model_config), **settings)
    model.save_pretrained(directory, safe_serialization=safe)
    return model


def layout_of(model_config=CONFIGS["llama"]):
    return Layout(FAMILIES[model_config.family], "hf", model_config.dims)


def files(directory):
    return (
        load_file(directory / "adapter_model.safetensors"),
        json.loads((directory / "adapter_config.json").read_text()),
    )


def read(tensors, peft_config, model_config=CONFIGS["llama"], base=None):
    return from_peft(
        StateDictSource(tensors), peft_config, layout_of(model_config), "an adapter", base
    )


def deltas(tensors, peft_config):
    """What PEFT's formula adds to each module's weight: ``alpha / r * B A`` (Hu et al. 2021)."""
    found = {}
    for name, lora_a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            lora_b = tensors[f"{module}.lora_B.weight"]
            scale = peft_config["lora_alpha"] / lora_a.shape[0]
            found[module] = scale * lora_b.double() @ lora_a.double()
    return found


CASES = [
    case
    for case in itertools.product(CONFIGS, KINDS, TARGETS)
    if case[::2] != ("llama-tied", "all-head")
]


@pytest.mark.parametrize(("name", "kind", "targets"), CASES)
def test_the_native_decoder_computes_what_peft_computes(tmp_path, name, kind, targets):
    model_config = CONFIGS[name]
    safe = kind != "dora"
    peer = save_peft(
        tmp_path, model_config, safe, target_modules=TARGETS[targets], **KINDS[kind]
    ).double()
    base = native_weights(hf_model(model_config), model_config)
    adapter, adapter_config = read_peft(tmp_path, layout_of(model_config), as_source(base))
    native = build_decoder(model_config, base, torch.float32)
    add_adapter(native, adapter_config)
    load_adapter(native, adapter)
    # In fp64, so that a difference is an error and not noise.
    native.double()
    ids = tokens()
    with torch.no_grad():
        expected = peer(ids).logits
        with peer.disable_adapter():
            assert (expected - peer(ids).logits).abs().max() > 0.05
        assert (native(ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("targets", [ATTN[:3], ["gate_proj", "up_proj"], "all-linear"])
def test_plain_lora_comes_back_out_bit_for_bit(tmp_path, targets):
    save_peft(tmp_path, target_modules=targets)
    tensors, peft_config = files(tmp_path)
    adapter, adapter_config = read(tensors, peft_config)
    again = to_peft(adapter, adapter_config, layout_of(), "a base")
    assert_same_tensors(dict(again.tensors), tensors)
    assert set(again.config["target_modules"]) == set(ALL if targets == "all-linear" else targets)
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        assert again.config[key] == peft_config[key]


def test_dora_with_patterns_comes_back_out_bit_for_bit(tmp_path):
    peer = save_peft(tmp_path / "in", target_modules=ALL, **KINDS["rsdora-patterns"])
    tensors, peft_config = files(tmp_path / "in")
    again = to_peft(*read(tensors, peft_config), layout_of(), "a base")
    assert_same_tensors(dict(again.tensors), tensors)
    (tmp_path / "out").mkdir()
    save_file(dict(again.tensors), tmp_path / "out" / "adapter_model.safetensors")
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(again.config))
    loaded = peft.PeftModel.from_pretrained(hf_model(CONFIGS["llama"]), tmp_path / "out")
    with torch.no_grad():
        difference = loaded.double()(tokens()).logits - peer.double()(tokens()).logits
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["lora", "rslora", "patterns"])
@pytest.mark.parametrize("targets", ["q-down", "all-linear"])
def test_every_module_gets_the_same_delta_when_lora_comes_back_out(tmp_path, kind, targets):
    peer = save_peft(tmp_path, target_modules=TARGETS[targets], **KINDS[kind])
    again = to_peft(*read(*files(tmp_path)), layout_of(), "a base")
    written = deltas(dict(again.tensors), again.config)
    carried = 0
    for name, module in peer.named_modules():
        if hasattr(module, "get_delta_weight"):
            carried += 1
            expected = module.get_delta_weight("default")
            assert expected.abs().max() > 0.01
            assert (written.pop(name) - expected).abs().max() < 1e-6
    assert carried == (6 if targets == "q-down" else 21)
    assert not any(delta.any() for delta in written.values()), "the rest of a fused group is zero"


def renamed(key, prefix, name, magnitude):
    module, _, rest = key.removeprefix("base_model.model.model.").rpartition(".lora_")
    for matrix in ("A", "B"):
        if rest == f"{matrix}.weight":
            return f"{prefix}{module}.lora_{matrix}{name}.weight"
    assert rest == "magnitude_vector"
    return f"{prefix}{module}.lora_magnitude_vector{name}{magnitude}"


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "base_model.model.",
        "base_model.model.base_model.model.model.",
        "base_model.model.model.model.",
        "model.",
        "",
    ],
)
@pytest.mark.parametrize("name", ["", ".default", ".my-adapter_2"])
@pytest.mark.parametrize("magnitude", ["", ".weight"])
def test_keys_may_have_any_prefix_and_the_name_of_the_adapter(tmp_path, prefix, name, magnitude):
    save_peft(tmp_path, target_modules=ALL, **KINDS["rsdora-patterns"])
    tensors, peft_config = files(tmp_path)
    expected, expected_config = read(tensors, peft_config)
    other = {renamed(key, prefix, name, magnitude): tensor for key, tensor in tensors.items()}
    found, found_config = read(other, peft_config)
    assert found_config == expected_config
    assert expected_config.rank("layers.1.attn.q_proj") == 2
    assert list(found) == list(expected)
    assert_same_tensors(dict(found), dict(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_keep_their_dtype(tmp_path, dtype):
    save_peft(tmp_path, target_modules=ALL)
    tensors, peft_config = files(tmp_path)
    adapter, _ = read({name: tensor.to(dtype) for name, tensor in tensors.items()}, peft_config)
    assert {meta.dtype for meta in adapter.metas.values()} == {dtype}
    assert {tensor.dtype for tensor in adapter.values()} == {dtype}


def test_the_config_is_read_in_native_names(tmp_path):
    save_peft(tmp_path, target_modules=["down_proj", "q_proj"], lora_dropout=0.25, **PATTERNS)
    _, adapter_config = read(*files(tmp_path))
    down = {f"layers.{layer}.mlp.w2": 7 for layer in range(3)}
    layer_2 = {"layers.2.attn.q_proj": 11, "layers.2.mlp.w2": 11}
    assert adapter_config == AdapterConfig(
        4,
        6.0,
        ("q_proj", "w2"),
        dropout=0.25,
        rank_pattern={**down, "layers.1.attn.q_proj": 2},
        alpha_pattern={**layer_2, "layers.0.attn.q_proj": 3},
    )


def test_torchtunes_config_leaves_dora_to_the_tensors(tmp_path):
    save_peft(tmp_path, target_modules=["q_proj"], use_dora=True)
    tensors, _ = files(tmp_path)
    torchtunes = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "peft_type": "LORA"}
    adapter, adapter_config = read(tensors, torchtunes)
    assert adapter_config.use_dora
    assert adapter.metas["layers.0.attn.q_proj.magnitude"].shape == (84,)


def test_an_adapter_on_some_layers_only_computes_what_peft_computes(tmp_path):
    model_config = CONFIGS["mistral"]
    peer = save_peft(tmp_path, model_config, target_modules=ATTN, layers_to_transform=[0, 2])
    base = native_weights(hf_model(model_config), model_config)
    adapter, adapter_config = read_peft(tmp_path, layout_of(model_config))
    native = build_decoder(model_config, base, torch.float32)
    add_adapter(native, adapter_config, like=adapter)
    assert {name.split(".")[1] for name in adapter_state_dict(native)} == {"0", "2"}
    load_adapter(native, adapter)
    with torch.no_grad():
        difference = native.double()(tokens()) - peer.double()(tokens()).logits
    assert difference.abs().max() < 1e-5


def test_a_targeted_module_without_tensors_is_a_warning_as_in_peft(tmp_path, caplog):
    save_peft(tmp_path, target_modules=ATTN, layers_to_transform=[0, 2])
    tensors, peft_config = files(tmp_path)
    with caplog.at_level(logging.WARNING, "checkpointing"):
        read(tensors, peft_config)
        assert not caplog.records
        read(tensors, {**peft_config, "layers_to_transform": None})
    (record,) = caplog.records
    assert "4 modules more" in record.getMessage()
    assert "model.layers.1.self_attn.q_proj" in record.getMessage()


def test_a_copy_of_the_bases_head_is_left_out_but_not_one_that_was_trained(tmp_path):
    model_config = CONFIGS["llama"]
    save_peft(tmp_path, target_modules=["lm_head"])
    tensors, peft_config = files(tmp_path)
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in tensors, "PEFT saves the layer beside its adapter"
    base = as_source(native_weights(hf_model(model_config), model_config))
    adapter, _ = read(tensors, peft_config, base=base)
    assert set(adapter) == {"output.lora_a.weight", "output.lora_b.weight"}
    tensors[copy][5, 3] += 0.5
    with pytest.raises(TensorMismatchError, match="it was trained") as caught:
        read(tensors, peft_config, base=base)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [copy]
    tensors[copy] = torch.zeros(134, 42)
    with pytest.raises(TensorMismatchError, match=r"\[134, 42\], where the base has \[131, 42\]"):
        read(tensors, peft_config)


def test_all_that_is_wrong_with_the_tensors_is_said_at_once_by_their_names_in_the_file(tmp_path):
    save_peft(tmp_path, target_modules=ATTN)
    tensors, peft_config = files(tmp_path)
    layer = "base_model.model.model.layers.1."
    del tensors[f"{layer}self_attn.k_proj.lora_B.weight"]
    tensors[f"{layer}self_attn.v_proj.lora_A.weight"] = torch.ones(5, 42)
    tensors[f"{layer}self_attn.q_proj.lora_A.other.weight"] = torch.ones(4, 42)
    tensors[f"{layer}self_attn.q_proj.lora_magnitude_vector"] = torch.ones(84)
    tensors[f"{layer}self_attn.q_proj.lora_B.bias"] = torch.ones(84)
    tensors[f"{layer}self_attn.qkv_proj.lora_A.weight"] = torch.ones(4, 42)
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 42)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(4, 131)
    tensors["base_model.model.score.weight"] = torch.ones(3, 42)
    tensors["something"] = torch.ones(1)
    with pytest.raises(TensorMismatchError) as caught:
        read(tensors, peft_config)
    assert sorted(caught.value.problems) == sorted(
        [
            f"{layer}self_attn.k_proj.lora_B.weight: missing, expected [28, 4]",
            f"{layer}self_attn.v_proj.lora_A.weight: [5, 42], expected [4, 42]",
            f"{layer}self_attn.q_proj.lora_A.other.weight: the same tensor as "
            f"{layer}self_attn.q_proj.lora_A.weight",
            f"{layer}self_attn.q_proj.lora_magnitude_vector: a DoRA magnitude, but use_dora is "
            "false",
            f"{layer}self_attn.q_proj.lora_B.bias: a bias of B, but lora_bias is false",
            f"{layer}self_attn.qkv_proj.lora_A.weight: the base has no such linear module",
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight: the base has no such "
            "linear module",
            "base_model.model.model.embed_tokens.lora_embedding_B: missing, expected [42, 4]",
            "base_model.model.score.weight: unexpected, [3, 42]",
            "something: unexpected, [1]",
        ]
    )


def test_an_adapter_on_a_tied_head_and_an_empty_file_are_refused():
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["lm_head"]}
    head = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 42)}
    with pytest.raises(TensorMismatchError, match="lm_head is its embedding"):
        read(head, settings, CONFIGS["llama-tied"])
    with pytest.raises(TensorMismatchError, match="no tensor of an adapter at all"):
        read({}, settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [3, 5]),
        ("target_parameters", "experts.gate_up_proj"),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [7]),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"rank": 3}),
        ("monteclora_config", {"n": 3}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("use_next_years_lora", True),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", -1),
        ("lora_dropout", 1.5),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"(q_proj": 3}),
        ("target_modules", "(q_proj"),
        ("target_modules", [3]),
        ("layers_to_transform", ["1"]),
    ],
)
def test_what_a_native_adapter_cannot_be_is_refused_by_name(field, value):
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], field: value}
    with pytest.raises(ConfigError, match=rf"an adapter: cannot be .*\n  - {field}"):
        read({}, settings)


def test_dora_with_a_bias_of_b_is_refused_as_in_peft():
    settings = {"peft_type": "LORA", "r": 4, "use_dora": True, "lora_bias": True}
    with pytest.raises(ConfigError, match="lora_bias=True: there is no DoRA with a bias of B"):
        read({}, settings)


@pytest.mark.parametrize("method", ["IA3", "LOHA", "ADALORA", None])
def test_another_method_is_refused_by_name(method):
    with pytest.raises(ConfigError, match=f"peft_type is {method!r}"):
        read({}, {"peft_type": method})


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva", None])
def test_a_start_that_leaves_the_base_alone_is_taken(tmp_path, start):
    save_peft(tmp_path, target_modules=ATTN)
    tensors, peft_config = files(tmp_path)
    read(tensors, {**peft_config, "init_lora_weights": start, "eva_config": {"rho": 2.0}})


def test_no_field_of_pefts_config_is_unknown(tmp_path):
    save_peft(tmp_path, target_modules=ATTN)
    tensors, peft_config = files(tmp_path)
    assert len(peft_config) > 30
    for field in peft_config.keys() - {"peft_type"}:
        try:
            read(tensors, {**peft_config, field: "something"})
        except (ConfigError, TensorMismatchError) as error:
            assert "not known here" not in str(error)


@pytest.fixture
def base(tmp_path):
    return write_hf(hf_model(CONFIGS["llama"]), tmp_path / "base")


def test_adapter_checkpoint_takes_a_peft_directory_or_its_weights_file(tmp_path, base):
    save_peft(tmp_path / "peft", target_modules=[*ATTN, "lm_head"], safe=False, use_dora=True)
    expected, adapter_config = read_peft(tmp_path / "peft", layout_of())
    for path in (tmp_path / "peft", tmp_path / "peft" / "adapter_model.bin"):
        state = FullModelHFCheckpointer(base, adapter_checkpoint=path).load_checkpoint()
        assert state.keys() == {"model", "adapter", "adapter_config"}
        assert_same_tensors(state["adapter"], dict(expected))
        assert AdapterConfig.from_state(state["adapter_config"]) == adapter_config


def test_bases_in_metas_and_in_the_native_format_take_a_peft_directory(tmp_path):
    model_config = config()
    weights = native_weights(hf_model(model_config), model_config)
    save_peft(tmp_path / "peft", model_config, target_modules=ALL)
    expected, _ = read_peft(tmp_path / "peft", layout_of(model_config))
    tune, meta = tmp_path / "tune", tmp_path / "meta"
    write_hf(hf_model(model_config), tmp_path / "hf")
    for directory in (tune, meta):
        directory.mkdir()
    torch.save(weights, tune / "model.pt")
    (tune / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    metas = {
        ".attn.q_proj": ".attention.wq",
        ".attn.k_proj": ".attention.wk",
        ".attn.v_proj": ".attention.wv",
        ".attn.output_proj": ".attention.wo",
        ".mlp.": ".feed_forward.",
        "sa_norm.scale": "attention_norm.weight",
        "mlp_norm.scale": "ffn_norm.weight",
        "norm.scale": "norm.weight",
    }
    consolidated = {}
    for name, tensor in weights.items():
        for old, new in metas.items():
            name = name.replace(old, new)
        consolidated[name] = tensor
    torch.save(consolidated, meta / "consolidated.00.pth")
    params = {"dim": 42, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 14}
    (meta / "params.json").write_text(json.dumps(params))
    for checkpointer in (
        FullModelTorchTuneCheckpointer(tune, adapter_checkpoint=tmp_path / "peft"),
        FullModelMetaCheckpointer(meta, adapter_checkpoint=tmp_path / "peft"),
    ):
        assert_same_tensors(checkpointer.load_checkpoint()["adapter"], dict(expected))


def test_without_a_config_of_the_base_a_peft_directory_is_refused(tmp_path):
    save_peft(tmp_path / "peft", target_modules=ALL)
    (tmp_path / "tune").mkdir()
    torch.save(native_weights(hf_model(config()), config()), tmp_path / "tune" / "model.pt")
    checkpointer = FullModelTorchTuneCheckpointer(
        tmp_path / "tune", adapter_checkpoint=tmp_path / "peft"
    )
    with pytest.raises(ConfigError, match=r"neither config\.json nor params\.json"):
        checkpointer.load_checkpoint()


def test_of_our_own_checkpoint_the_native_adapter_is_taken(tmp_path, base):
    adapter_config = AdapterConfig(4, 6.0, ("q_proj",), use_rslora=True)
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config)
    checkpoint = FullModelHFCheckpointer(base, output_dir=tmp_path / "out").save_checkpoint(
        {"adapter": adapter, "adapter_config": adapter_config.to_state()}, 0, adapter_only=True
    )
    state = FullModelHFCheckpointer(base, adapter_checkpoint=checkpoint).load_checkpoint()
    assert_same_tensors(state["adapter"], adapter)
    assert state["adapter_config"] == adapter_config.to_state()
    # Without its manifest the alpha is in PEFT's config alone, in the form that engines read.
    (checkpoint / "manifest.json").unlink()
    state = FullModelHFCheckpointer(base, adapter_checkpoint=checkpoint).load_checkpoint()
    assert state["adapter_config"]["use_rslora"] is False
    assert len(state["adapter"]) == 3 * 3 * 2


def test_a_directory_without_an_adapter_is_refused(tmp_path, base):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"neither adapter_model\.pt nor adapter_con"):
        FullModelHFCheckpointer(base, adapter_checkpoint=tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    checkpointer = FullModelHFCheckpointer(base, adapter_checkpoint=tmp_path / "empty")
    with pytest.raises(CheckpointNotFoundError, match=r"neither adapter_model\.safetensors nor"):
        checkpointer.load_checkpoint()


def test_a_run_takes_over_the_patterns_of_the_adapter_and_any_order_of_its_targets():
    loaded = AdapterConfig(4, 6.0, ("q_proj", "w2"), rank_pattern={"layers.1.mlp.w2": 7})
    asked = AdapterConfig(4, 6.0, ("w2", "q_proj"), dropout=0.1)
    continued = check_same_adapter(loaded.to_state(), asked)
    assert continued == AdapterConfig(
        4, 6.0, ("w2", "q_proj"), dropout=0.1, rank_pattern={"layers.1.mlp.w2": 7}
    )


RECIPE_TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def recipe_base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


def test_the_recipe_starts_from_a_peft_adapter_and_resumes_from_its_own(tmp_path, recipe_base):
    start = tmp_path / "peft"
    settings = {"r": 3, "lora_alpha": 7, "rank_pattern": {"layers.1.mlp.down_proj": 5}}
    save_peft(
        start,
        runs.MODEL,
        target_modules=RECIPE_TARGETS,
        layers_to_transform=[0, 1],
        **settings,
    )
    given = dict(read_peft(start, layout_of(runs.MODEL))[0])
    overrides = [f"checkpointer.adapter_checkpoint={start}", "epochs=1", "max_steps_per_epoch=1"]
    # With a learning rate of nothing, the adapter that is saved is the one that was loaded.
    out = tmp_path / "still"
    runs.run("lora", recipe_base, out, *overrides, "optimizer.lr=0")
    still = torch.load(out / "epoch_0" / "adapter_model.pt", weights_only=True)
    assert_same_tensors(still, given)
    out = tmp_path / "trained"
    runs.run("lora", recipe_base, out, *overrides, "lr_scheduler.num_warmup_steps=0")
    trained = torch.load(out / "epoch_0" / "adapter_model.pt", weights_only=True)
    assert trained.keys() == given.keys()
    changes = [(trained[name] - tensor).abs().max() for name, tensor in given.items()]
    assert 0 < max(changes) < 0.01
    checkpointer = FullModelHFCheckpointer(
        recipe_base,
        output_dir=out,
        adapter_checkpoint=start,
        should_load_recipe_state=True,
    )
    assert_same_tensors(checkpointer.load_checkpoint()["adapter"], trained)


def test_the_recipe_refuses_a_peft_adapter_of_other_settings(tmp_path, recipe_base):
    save_peft(tmp_path / "peft", runs.MODEL, target_modules=RECIPE_TARGETS, r=5, lora_alpha=6)
    with pytest.raises(
        ConfigError,
        match=r"r was 5 and is 3; lora_alpha was 6\.0 and is 7\.0\. Set section `model`",
    ):
        runs.run(
            "lora",
            recipe_base,
            tmp_path / "out",
            f"checkpointer.adapter_checkpoint={tmp_path / 'peft'}",
        )
