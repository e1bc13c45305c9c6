"""Every kind of adapter that PEFT has, made by PEFT and carried on natively, and the other way."""

import logging
import math

import peft
import pytest
import torch

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.adapters.lora import trained_tensors
from checkpointing.adapters.peft import to_peft
from checkpointing.adapters.peft_in import from_peft
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import StateDictSource, as_source
from checkpointing.training import add_adapter, build_decoder, load_adapter
from tests.adapters.test_peft_in import files, layout_of, save_peft
from tests.families import variants
from tests.tiny import assert_same_tensors, write_hf
from tests.training.peers import config, hf_model, native_weights, tokens

UNTIED = config(attention_bias=True, mlp_bias=True)
TIED = config(tied=True)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]
PATTERNS = {"rank_pattern": {"embed_tokens": 7, "lm_head": 3}, "alpha_pattern": {"embed_tokens": 5}}
SAVED = {"target_modules": ["q_proj", "up_proj"]}
QUERY = {"target_modules": ["q_proj"]}

KINDS = {
    "embedding": (UNTIED, {"target_modules": ["v_proj", "embed_tokens"]}),
    "embedding and head, patterns": (
        UNTIED,
        {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True, **PATTERNS},
    ),
    "embedding, DoRA": (
        UNTIED,
        {"target_modules": ["k_proj", "embed_tokens"], "use_dora": True, **PATTERNS},
    ),
    "norms saved": (UNTIED, {**SAVED, "modules_to_save": ["norm"]}),
    "one norm saved": (UNTIED, {**SAVED, "modules_to_save": ["layers.1.input_layernorm"]}),
    "biased linear saved": (UNTIED, {**SAVED, "modules_to_save": ["k_proj", "o_proj"]}),
    "embedding and head saved": (UNTIED, {**SAVED, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied embedding saved": (
        TIED,
        {**SAVED, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "bias of B": (UNTIED, {"target_modules": ALL, "lora_bias": True}),
    "bias of B, no bias in the base": (
        TIED,
        {"target_modules": ALL, "lora_bias": True, "use_rslora": True},
    ),
    "all at once": (
        UNTIED,
        {
            "target_modules": [*ALL, "embed_tokens", "lm_head"],
            "modules_to_save": ["norm", "input_layernorm", "lm_head"],
            "rank_pattern": {"down_proj": 5},
            "use_rslora": True,
        },
    ),
    "bias of B, head and norm saved": (
        UNTIED,
        {
            "target_modules": [*ALL, "lm_head"],
            "modules_to_save": ["model.norm", "input_layernorm", "lm_head"],
            "lora_bias": True,
        },
    ),
}


def made_by_peft(tmp_path, model_config, settings):
    """PEFT's model, and what it saved."""
    peer = save_peft(tmp_path, model_config, **settings)
    return peer, *files(tmp_path)


def native_form(tensors, peft_config, model_config):
    """The adapter, its config, and the base's weights, in native form."""
    base = native_weights(hf_model(model_config), model_config)
    found = from_peft(
        StateDictSource(tensors), peft_config, layout_of(model_config), "it", as_source(base)
    )
    return *found, base


def decoder(model_config, base, adapter, adapter_config):
    model = build_decoder(model_config, base, torch.float32)
    add_adapter(model, adapter_config, like=adapter)
    load_adapter(model, adapter)
    # In fp64, so that a difference is an error and not noise.
    return model.double().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_decoder_and_the_merged_one_compute_what_peft_computes(tmp_path, kind):
    model_config, settings = KINDS[kind]
    peer, tensors, peft_config = made_by_peft(tmp_path, model_config, settings)
    adapter, adapter_config, base = native_form(tensors, peft_config, model_config)
    ids = tokens()
    with torch.no_grad():
        expected = peer.double()(ids).logits
        with peer.disable_adapter():
            assert (expected - peer(ids).logits).abs().max() > 0.05
        found = decoder(model_config, base, adapter, adapter_config)(ids)
        assert (found - expected).abs().max() < 1e-5
        wide = {name: tensor.double() for name, tensor in base.items()}
        if kind == "bias of B, no bias in the base":
            with pytest.raises(TensorMismatchError, match=r"attn\.q_proj: has no bias"):
                MergedStateDict(wide, adapter, adapter_config)
            return
        merged = dict(MergedStateDict(wide, adapter, adapter_config))
        native = build_decoder(model_config, merged, torch.float64)
        assert (native(ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_out_bit_for_bit_and_peft_loads_it(tmp_path, kind):
    model_config, settings = KINDS[kind]
    peer, tensors, peft_config = made_by_peft(tmp_path / "in", model_config, settings)
    adapter, adapter_config, _ = native_form(tensors, peft_config, model_config)
    base = write_hf(hf_model(model_config), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out", adapter_form="exact")
    state = {"adapter": dict(adapter), "adapter_config": adapter_config.to_state()}
    saved = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    # PEFT's copies of the base's embeddings, which it saves with an adapter on one of them.
    own = {name: tensor for name, tensor in tensors.items() if ".base_layer." not in name}
    assert_same_tensors(files(saved)[0], own)
    again = peft.PeftModel.from_pretrained(hf_model(model_config), saved).double().eval()
    with torch.no_grad():
        difference = again(tokens()).logits - peer.double()(tokens()).logits
    assert difference.abs().max() < 1e-5
    # Read once more, it is the same adapter.
    second, second_config, _ = native_form(*files(saved), model_config)
    assert_same_tensors(dict(second), dict(adapter))
    for module in {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name}:
        assert second_config.scale(module) == adapter_config.scale(module)


def native_adapter(weights, adapter_config):
    """An adapter for a base's native weights, all of whose tensors are random."""
    torch.manual_seed(17)
    tensors = {}
    for name, weight in weights.items():
        module, _, last = name.rpartition(".")
        if adapter_config.saves(module):
            tensors[name] = weight.float() + 0.1 * torch.randn(weight.shape)
        elif last == "weight" and module.rpartition(".")[2] in adapter_config.target_modules:
            rank = adapter_config.rank(module)
            is_table = module == "tok_embeddings"
            out, in_ = reversed(weight.shape) if is_table else weight.shape
            stem = "lora_embedding_" if is_table else "lora_"
            tensors[f"{module}.{stem}a.weight"] = 0.1 * torch.randn(rank, in_)
            tensors[f"{module}.{stem}b.weight"] = 0.1 * torch.randn(out, rank)
            if adapter_config.lora_bias:
                tensors[f"{module}.lora_b.bias"] = 0.1 * torch.randn(out)
            if adapter_config.use_dora:
                norms = weight.norm(dim=0 if is_table else 1)
                name = "lora_embedding_magnitude" if is_table else "magnitude"
                tensors[f"{module}.{name}"] = norms * (1 + 0.3 * torch.rand(out))
    return tensors


def saved_natively(tmp_path, variant, adapter_config, form="portable", adapter_only=False):
    """A model of transformers, the native one with an adapter, and the checkpoint of both."""
    peer = variants.write(variant, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base", output_dir=tmp_path / "out", adapter_form=form
    )
    weights = checkpointer.load_checkpoint()["model"]
    adapter = native_adapter(weights, adapter_config)
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    if not adapter_only:
        state["model"] = MergedStateDict(weights, adapter, adapter_config)
    saved = checkpointer.save_checkpoint(state, 0, adapter_only=adapter_only)
    model = build_decoder(checkpointer.model_config, weights, torch.float32)
    add_adapter(model, adapter_config)
    load_adapter(model, adapter)
    return peer, model.double().eval(), saved


ALL_NATIVE = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")
HEAD_AND_TABLE = ("output", "tok_embeddings")
NORMS = ("sa_norm", "norm")
NATIVE_KINDS = {
    "embedding": AdapterConfig(4, 6, ("q_proj", "tok_embeddings")),
    "embedding, rsLoRA": AdapterConfig(
        4,
        6,
        (*ALL_NATIVE, *HEAD_AND_TABLE),
        use_rslora=True,
        rank_pattern={"tok_embeddings": 7},
        alpha_pattern={"output": 11},
    ),
    "embedding, DoRA": AdapterConfig(4, 6, (*ALL_NATIVE, "tok_embeddings"), use_dora=True),
    "saved": AdapterConfig(4, 6, ("v_proj",), modules_to_save=(*NORMS, "output")),
    "all parts of fused modules saved": AdapterConfig(
        4, 6, ("output_proj",), modules_to_save=("q_proj", "k_proj", "v_proj", "w1", "w3")
    ),
    "one layer saved": AdapterConfig(
        4, 6, ("v_proj", "w1"), modules_to_save=("layers.1.mlp.w2", "tok_embeddings")
    ),
    "bias of B": AdapterConfig(4, 6, ("q_proj", "v_proj", "w2"), lora_bias=True),
    "bias of B, ranks": AdapterConfig(
        4,
        6,
        ALL_NATIVE,
        lora_bias=True,
        use_rslora=True,
        rank_pattern={"layers.1.attn.k_proj": 3},
        alpha_pattern={"layers.2.mlp.w3": 5},
    ),
}
UNTIED_VARIANTS = ["llama, biases", "gemma, untied", "qwen2", "phi3"]


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("variant", UNTIED_VARIANTS)
def test_peft_and_the_merged_model_compute_what_the_native_one_computes(tmp_path, variant, kind):
    adapter_config = NATIVE_KINDS[kind]
    # Only where every module has a bias can the merged model hold one of B.
    merges = not adapter_config.lora_bias or variant == "llama, biases"
    peer, native, saved = saved_natively(tmp_path, variant, adapter_config, adapter_only=not merges)
    ids = variants.tokens()
    with torch.no_grad():
        expected = native(ids)
        if merges:
            merged = type(peer).from_pretrained(saved / "merged").double().eval()
            assert (merged(ids).logits - expected).abs().max() < 1e-5
        base_logits = peer.double()(ids).logits
        again = peft.PeftModel.from_pretrained(peer.float(), saved).double().eval()
        assert (expected - base_logits).abs().max() > 0.05
        assert (again(ids).logits - expected).abs().max() < 1e-5


PLAIN = AdapterConfig(
    4,
    6,
    ("q_proj", "v_proj", "w2"),
    use_rslora=True,
    rank_pattern={"layers.1.attn.q_proj": 7},
    alpha_pattern={"layers.2.mlp.w2": 11},
)


@pytest.mark.parametrize("variant", ["llama", "phi3"])
def test_the_exact_form_has_the_adapters_own_ranks_and_modules_and_computes_the_same(
    tmp_path, variant
):
    peer, native, saved = saved_natively(tmp_path, variant, PLAIN, "exact")
    tensors, peft_config = files(saved)
    again = peft.PeftModel.from_pretrained(peer, saved).double().eval()
    with torch.no_grad():
        ids = variants.tokens()
        assert (again(ids).logits - native(ids)).abs().max() < 1e-5
    assert (peft_config["r"], peft_config["lora_alpha"]) == (4, 6)
    assert peft_config["use_rslora"] is True
    if variant == "llama":
        assert peft_config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
        assert peft_config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 7}
        assert peft_config["alpha_pattern"] == {"model.layers.2.mlp.down_proj": 11}
        assert len(tensors) == 2 * 3 * 3
    else:
        # q and v in one module of rank 4 + 4, of which rsLoRA's scale is alpha / sqrt(8).
        assert peft_config["rank_pattern"]["model.layers.0.self_attn.qkv_proj"] == 8
        alpha = peft_config["alpha_pattern"]["model.layers.0.self_attn.qkv_proj"]
        assert alpha / math.sqrt(8) == pytest.approx(6 / math.sqrt(4), rel=1e-15)


def made_for(variant, directory, **settings):
    """An adapter that PEFT made for a model of some family, all of whose tensors are random."""
    made = peft.get_peft_model(
        variants.peer(variant),
        peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings),
    )
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or ".modules_to_save." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    return made.double().eval()


FOR_FAMILIES = {
    # In transformers Mixtral's router has another name than in its checkpoints.
    "router of Mixtral saved": ("mixtral", {**QUERY, "modules_to_save": ["gate"]}),
    "router saved": ("qwen3_moe", {**QUERY, "modules_to_save": ["mlp.gate"]}),
    "fused modules": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_rslora": True}),
    "fused modules, bias of B": ("phi3", {"target_modules": ["qkv_proj"], "lora_bias": True}),
    "fused modules saved": (
        "phi3",
        {"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj", "gate_up_proj"]},
    ),
    "scaled embedding": ("gemma, untied", {"target_modules": ["embed_tokens"]}),
}


@pytest.mark.parametrize("form", ["portable", "exact"])
@pytest.mark.parametrize("kind", FOR_FAMILIES)
def test_adapters_of_other_families_come_in_and_go_out_with_the_same_logits(tmp_path, kind, form):
    variant, settings = FOR_FAMILIES[kind]
    made = made_for(variant, tmp_path / "adapter", **settings)
    variants.write(variant, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base",
        output_dir=tmp_path / "out",
        adapter_checkpoint=tmp_path / "adapter",
        adapter_form=form,
    )
    state = checkpointer.load_checkpoint()
    native = build_decoder(checkpointer.model_config, state["model"], torch.float32)
    add_adapter(native, AdapterConfig.from_state(state["adapter_config"]))
    load_adapter(native, state["adapter"])
    saved = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    with torch.no_grad():
        ids = variants.tokens()
        expected = made(ids).logits
        with made.disable_adapter():
            assert (made(ids).logits - expected).abs().max() > 0.05
        assert (native.double().eval()(ids) - expected).abs().max() < 1e-5
        again = peft.PeftModel.from_pretrained(variants.peer(variant), saved).double().eval()
        assert (again(ids).logits - expected).abs().max() < 1e-5
    if form == "exact":
        tensors, _ = files(tmp_path / "adapter")
        own = {name: tensor for name, tensor in tensors.items() if ".base_layer." not in name}
        assert_same_tensors(files(saved)[0], own)


def test_experts_are_not_saved_whole(tmp_path):
    adapter_config = AdapterConfig(4, 6, ("q_proj",), modules_to_save=("experts",))
    variants.write("qwen3_moe", tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    adapter = native_adapter(weights, adapter_config)
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    with pytest.raises(TensorMismatchError, match=r"experts\.gate_proj: experts are trained whole"):
        checkpointer.save_checkpoint(state, 0, adapter_only=True)


def test_an_unknown_form_is_refused_with_the_known_ones(tmp_path):
    write_hf(hf_model(UNTIED), tmp_path / "base")
    with pytest.raises(ConfigError, match=r"'exakt' is unknown, did you mean 'exact'.*portable"):
        FullModelHFCheckpointer(tmp_path / "base", adapter_form="exakt")


@pytest.mark.parametrize(
    ("adapter_config", "says"),
    [
        (AdapterConfig(4, 6, ("q_proj",), use_dora=True), "DoRA"),
        (AdapterConfig(4, 6, ("q_proj",), lora_bias=True), "lora_bias"),
        (AdapterConfig(4, 6, ("q_proj",), modules_to_save=("norm",)), "modules_to_save"),
    ],
)
def test_what_only_peft_reads_is_said_to_be_so_and_the_merged_model_is_offered(
    tmp_path, caplog, adapter_config, says
):
    with caplog.at_level(logging.WARNING, "checkpointing"):
        saved_natively(tmp_path, "llama, biases", adapter_config, adapter_only=True)
    (message,) = [record.getMessage() for record in caplog.records]
    assert says in message and "no inference engine" in message and "tune merge" in message


def test_a_bias_that_no_merged_model_can_hold_is_not_said_to_be_merged(tmp_path, caplog):
    adapter_config = AdapterConfig(4, 6, ("q_proj",), lora_bias=True)
    with caplog.at_level(logging.WARNING, "checkpointing"):
        saved_natively(tmp_path, "llama", adapter_config, adapter_only=True)
    assert "nor could a merged model hold it" in caplog.records[0].getMessage()


def test_names_of_saved_modules_mean_just_these_to_peft_which_compares_the_ends(tmp_path):
    adapter_config = AdapterConfig(4, 6, ("q_proj",), modules_to_save=("norm", "sa_norm", "output"))
    _, _, saved = saved_natively(tmp_path, "qwen3", adapter_config)
    tensors, peft_config = files(saved)
    assert peft_config["modules_to_save"] == ["input_layernorm", "model.norm", "lm_head"]
    whole = {name for name in tensors if ".lora_" not in name}
    layers = {f"base_model.model.model.layers.{n}.input_layernorm.weight" for n in range(3)}
    assert whole == layers | {
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.weight",
    }


def test_a_part_of_a_fused_module_is_not_saved_alone(tmp_path):
    adapter_config = AdapterConfig(4, 6, ("w2",), modules_to_save=("q_proj", "v_proj"))
    with pytest.raises(TensorMismatchError, match=r"qkv_proj: is fused .* name .*attn\.k_proj"):
        saved_natively(tmp_path, "phi3", adapter_config)
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_one_side_of_tied_embeddings_goes_neither_out_nor_into_a_merge():
    base = native_weights(hf_model(TIED), TIED)
    adapter_config = AdapterConfig(4, 6, ("tok_embeddings",))
    adapter = native_adapter(base, adapter_config)
    for attempt in (
        lambda: to_peft(as_source(adapter), adapter_config, layout_of(TIED), "a base"),
        lambda: MergedStateDict(base, adapter, adapter_config),
    ):
        with pytest.raises(TensorMismatchError, match=r"tok_embeddings: the output projection"):
            attempt()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["embed_tokens"]}, r"output projection is its embed_tokens.*untied"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"the base's lm_head is its embedding.*untied"),
        ({**SAVED, "modules_to_save": ["embed_tokens"]}, "ensure_weight_tying is false.*untied"),
        ({**SAVED, "modules_to_save": ["lm_head"]}, "was trained apart from the embedding"),
        ({**SAVED, "modules_to_save": ["embed_tokens", "lm_head"]}, "was trained apart from the"),
    ],
)
def test_what_peft_trains_apart_in_a_tied_model_is_refused(tmp_path, settings, message):
    _, tensors, peft_config = made_by_peft(tmp_path, TIED, settings)
    with pytest.raises(TensorMismatchError, match=message):
        native_form(tensors, peft_config, TIED)


def test_a_trained_module_may_be_named_as_in_peft_models_own_state(tmp_path):
    settings = {**SAVED, "modules_to_save": ["lm_head", "input_layernorm"]}
    peer, tensors, peft_config = made_by_peft(tmp_path, UNTIED, settings)
    adapter, adapter_config, _ = native_form(tensors, peft_config, UNTIED)
    own = {
        name: tensor
        for name, tensor in peer.state_dict().items()
        if "lora_" in name or "modules_to_save" in name or "original_module" in name
    }
    assert any("lm_head.original_module.weight" in name for name in own)
    assert any("lm_head.modules_to_save.default.weight" in name for name in own)
    again, again_config, _ = native_form(own, peft_config, UNTIED)
    assert again_config == adapter_config
    assert_same_tensors(dict(again), dict(adapter))
    assert set(trained_tensors(adapter)) == {"output", *(f"layers.{n}.sa_norm" for n in range(3))}


def test_all_that_is_wrong_with_whole_modules_is_said_at_once_by_their_names_in_the_file(tmp_path):
    settings = {**SAVED, "modules_to_save": ["input_layernorm", "o_proj"], "lora_bias": True}
    _, tensors, peft_config = made_by_peft(tmp_path, UNTIED, settings)
    layer = "base_model.model.model.layers."
    del tensors[f"{layer}0.input_layernorm.weight"]
    del tensors[f"{layer}1.self_attn.o_proj.bias"]
    tensors[f"{layer}2.self_attn.o_proj.weight"] = torch.ones(42, 83)
    tensors[f"{layer}1.input_layernorm.modules_to_save.weight"] = torch.ones(42)
    tensors[f"{layer}1.post_attention_layernorm.weight"] = torch.ones(42)
    del tensors[f"{layer}0.self_attn.q_proj.lora_B.bias"]
    tensors[f"{layer}0.self_attn.q_proj.lora_A.bias"] = torch.ones(4)
    tensors["base_model.model.model.embed_tokens.lora_A.weight"] = torch.ones(4, 131)
    tensors[f"{layer}0.mlp.up_proj.lora_embedding_A"] = torch.ones(4, 42)
    with pytest.raises(TensorMismatchError) as caught:
        native_form(tensors, peft_config, UNTIED)
    assert sorted(caught.value.problems) == sorted(
        [
            f"{layer}0.input_layernorm.weight: missing, expected [42]",
            f"{layer}1.self_attn.o_proj.bias: missing, expected [42]",
            f"{layer}2.self_attn.o_proj.weight: [42, 83], where the base has [42, 84]: it was "
            "resized; start from the base that it belongs to",
            f"{layer}2.self_attn.o_proj.weight: missing, expected [42, 84]",
            f"{layer}1.input_layernorm.modules_to_save.weight: the same tensor as "
            f"{layer}1.input_layernorm.weight",
            f"{layer}1.post_attention_layernorm.weight: differs from the base's: it was trained, "
            "and modules_to_save does not name it; start from a base that holds it",
            f"{layer}0.self_attn.q_proj.lora_B.bias: missing, expected [84]",
            f"{layer}0.self_attn.q_proj.lora_A.bias: lora_A.bias on such a module is not trained "
            "natively",
            "base_model.model.model.embed_tokens.lora_A.weight: the base has no such linear module",
            f"{layer}0.mlp.up_proj.lora_embedding_A: the base has no such embedding",
        ]
    )


def test_a_bias_of_b_without_lora_bias_is_refused_and_without_the_field_it_is_read(tmp_path):
    _, tensors, peft_config = made_by_peft(
        tmp_path, UNTIED, {"target_modules": ["q_proj"], "lora_bias": True}
    )
    with pytest.raises(TensorMismatchError, match=r"lora_B\.bias: a bias of B, but lora_bias is"):
        native_form(tensors, {**peft_config, "lora_bias": False}, UNTIED)
    del peft_config["lora_bias"]
    assert native_form(tensors, peft_config, UNTIED)[1].lora_bias


def test_a_classifiers_head_goes_with_the_adapter_as_peft_always_has_it(tmp_path):
    peer, native, saved = saved_natively(
        tmp_path, "llama_classifier", AdapterConfig(4, 6, ("q_proj",))
    )
    tensors, peft_config = files(saved)
    assert peft_config["modules_to_save"] == ["score"]
    head = tensors["base_model.model.score.weight"]
    assert torch.equal(head, peer.score.weight.to(head.dtype))
    again = peft.PeftModel.from_pretrained(peer, saved).double().eval()
    with torch.no_grad():
        ids = variants.tokens()
        assert variants.compared(native(ids), again(ids).logits).abs().max() < 1e-5


def test_a_classifiers_head_leaves_the_form_portable(tmp_path, caplog):
    adapter_config = AdapterConfig(4, 6, ("q_proj",), modules_to_save=("output",))
    with caplog.at_level(logging.WARNING, "checkpointing"):
        peer, native, saved = saved_natively(tmp_path, "llama_classifier", adapter_config)
    assert not caplog.records
    peft_config = files(saved)[1]
    assert peft_config["task_type"] == "SEQ_CLS" and peft_config["modules_to_save"] == ["score"]
    assert "v_proj" in peft_config["target_modules"], "all of a group that engines fuse"
    again = peft.PeftModel.from_pretrained(peer, saved).double().eval()
    with torch.no_grad():
        ids = variants.tokens()
        assert variants.compared(native(ids), again(ids).logits).abs().max() < 1e-5
