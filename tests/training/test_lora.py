import math

import peft
import pytest
import torch

from checkpointing.adapters.config import AdapterConfig
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.training import (
    adapter_config_from_recipe,
    adapter_state_dict,
    add_adapter,
    base_state_dict,
    build_decoder,
    check_same_adapter,
    load_adapter,
)
from tests.training import peers

ALL = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3", "output")
FOREIGN = {native.split(".")[1]: hf.split(".")[1] for hf, native in peers.MODULES.items()}
FOREIGN["output"] = "lm_head"


def peer_with_adapter(cfg, adapter):
    """A model of transformers with PEFT's adapter, all of whose tensors are random."""
    model = peft.get_peft_model(
        peers.hf_model(cfg),
        peft.LoraConfig(
            r=adapter.r,
            lora_alpha=adapter.alpha,
            target_modules=[FOREIGN[name] for name in adapter.target_modules],
            lora_dropout=adapter.dropout,
            use_dora=adapter.use_dora,
            use_rslora=adapter.use_rslora,
        ),
    )
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()


def native_adapter(model, cfg):
    """The adapter tensors of a PEFT model, in native names and order."""
    tensors = {}
    for name, tensor in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items():
        native = peers.native_name(name).replace("lora_A.", "lora_a.").replace("lora_B.", "lora_b.")
        native = native.replace("lora_magnitude_vector", "magnitude")
        out_axis = "lora_a" not in native
        if out_axis and (".q_proj." in native or ".k_proj." in native):
            tensor = peers.pairs_from_halves(tensor, cfg.dims.head_dim)
        tensors[native.replace("magnitude.weight", "magnitude")] = tensor.detach().clone()
    return tensors


def our_model(cfg, adapter, peer):
    base = peers.native_weights(peers.hf_model(cfg), cfg)
    model = build_decoder(cfg, base, torch.float32)
    add_adapter(model, adapter)
    load_adapter(model, native_adapter(peer, cfg))
    return model


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("use_rslora", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "k_proj"), ("w2",)], ids="-".join)
def test_logits_are_those_of_peft(targets, use_rslora, use_dora):
    cfg = peers.config(attention_bias=True, mlp_bias=True)
    adapter = AdapterConfig(5, 12.0, targets, use_dora=use_dora, use_rslora=use_rslora)
    peer = peer_with_adapter(cfg, adapter)
    # In fp64, so that a difference is an error and not noise.
    model = our_model(cfg, adapter, peer).double()
    peer.double()
    tokens = peers.tokens()
    with torch.no_grad():
        expected = peer(tokens).logits
        with peer.disable_adapter():
            assert (expected - peer(tokens).logits).abs().max() > 0.05
        assert (model(tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_gradients_are_those_of_peft(use_dora):
    cfg = peers.config()
    adapter = AdapterConfig(5, 12.0, ALL, use_dora=use_dora)
    peer = peer_with_adapter(cfg, adapter)
    model = our_model(cfg, adapter, peer).double()
    peer.double()
    tokens = peers.tokens()
    peer(tokens).logits.square().mean().backward()
    model(tokens).square().mean().backward()
    for parameter in peer.parameters():
        if parameter.grad is not None:
            parameter.data = parameter.grad
    expected = native_adapter(peer, cfg)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-7), name


def test_dora_with_dropout_is_pefts_formula():
    cfg = peers.config()
    adapter = AdapterConfig(5, 12.0, ("v_proj",), dropout=0.4, use_dora=True)
    peer = peer_with_adapter(cfg, adapter).train()
    model = our_model(cfg, adapter, peer).train()
    x = torch.randn(4, 9, cfg.dims.hidden, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(23)
    expected = peer.base_model.model.model.layers[1].self_attn.v_proj(x)
    torch.manual_seed(23)
    found = model.layers[1].attn.v_proj(x)
    assert not torch.equal(found, model.layers[1].attn.v_proj(x)), "dropout is random"
    assert (found - expected).abs().max() < 1e-5


def test_dora_scales_each_row_to_its_magnitude():
    model = build_decoder(
        cfg := peers.config(), peers.native_weights(peers.hf_model(cfg), cfg), torch.float32
    )
    add_adapter(model, AdapterConfig(3, 6.0, ("w1",), use_dora=True))
    layer = model.layers[0].mlp.w1
    with torch.no_grad():
        layer.lora_b.weight.normal_()
        layer.magnitude.fill_(10.0)
        merged = layer.weight + 2.0 * layer.lora_b.weight @ layer.lora_a.weight
        expected = 10.0 * merged / merged.norm(dim=1, keepdim=True)
        assert torch.allclose(layer(torch.eye(cfg.dims.hidden)).T, expected, atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_fresh_adapter_changes_nothing_and_trains_nothing_else(use_dora):
    cfg = peers.config(attention_bias=True)
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    model = build_decoder(cfg, weights, torch.float64)
    tokens = peers.tokens()
    with torch.no_grad():
        before = model(tokens)
        add_adapter(model, AdapterConfig(5, 12.0, ALL, use_dora=use_dora))
        assert (model(tokens) - before).abs().max() < 1e-5
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == adapter_state_dict(model).keys()
    assert len(trained) == (3 * 7 + 1) * (3 if use_dora else 2)
    base = base_state_dict(model)
    assert base.keys() == weights.keys()
    assert all(torch.equal(base[name], weights[name]) for name in weights)


def test_a_starts_kaiming_uniform_b_at_zero_and_the_magnitude_at_the_row_norms():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float32)
    add_adapter(model, AdapterConfig(16, 12.0, ("w2",), use_dora=True))
    layer = model.layers[2].mlp.w2
    bound = 1 / math.sqrt(cfg.dims.ffn)
    assert layer.lora_a.weight.shape == (16, cfg.dims.ffn)
    assert 0.95 * bound < layer.lora_a.weight.abs().max() <= bound
    assert layer.lora_b.weight.shape == (cfg.dims.hidden, 16)
    assert not layer.lora_b.weight.any()
    assert torch.allclose(layer.magnitude, layer.weight.square().sum(1).sqrt())


def test_the_adapter_of_a_bf16_model_is_fp32():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.bfloat16)
    add_adapter(model, AdapterConfig(3, 6.0, ("w1", "q_proj"), use_dora=True))
    assert {tensor.dtype for tensor in adapter_state_dict(model).values()} == {torch.float32}
    assert {tensor.dtype for tensor in base_state_dict(model).values()} == {torch.bfloat16}
    assert model(peers.tokens()).dtype == torch.bfloat16


def test_rank_and_alpha_patterns_hold_for_single_modules():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float32)
    adapter = AdapterConfig(
        4,
        8.0,
        ("w1",),
        rank_pattern={"layers.1.mlp.w1": 7},
        alpha_pattern={"layers.2.mlp.w1": 3.0},
    )
    add_adapter(model, adapter)
    layers = [layer.mlp.w1 for layer in model.layers]
    assert [layer.lora_a.weight.shape[0] for layer in layers] == [4, 7, 4]
    assert [layer.scale for layer in layers] == [2.0, 8 / 7, 0.75]


def test_an_unknown_target_is_an_error_with_the_nearest_name():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float32)
    with pytest.raises(
        ConfigError, match=r"unknown lora target 'o_proj'.*k_proj, output, output_proj"
    ):
        add_adapter(model, AdapterConfig(4, 8.0, ("o_proj",)))
    with pytest.raises(ConfigError, match=r"rank_pattern.*'layers\.1\.mlp\.w1'"):
        add_adapter(model, AdapterConfig(4, 8.0, ("w1",), rank_pattern={"layer.1.mlp.w1": 7}))


def test_an_adapter_on_a_tied_output_is_refused():
    cfg = peers.config(tied=True)
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float32)
    with pytest.raises(ConfigError, match="tied to its token embedding"):
        add_adapter(model, AdapterConfig(4, 8.0, ("w1", "output")))


def untied_model(dtype=torch.float32, **sizes):
    cfg = peers.config(**sizes)
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    return build_decoder(cfg, weights, dtype, copy=False), weights


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_gradients_of_an_adapted_embedding_are_those_of_peft(use_dora):
    cfg = peers.config()
    peer = peft.get_peft_model(
        peers.hf_model(cfg),
        peft.LoraConfig(r=5, lora_alpha=12, target_modules=["embed_tokens"], use_dora=use_dora),
    )
    theirs = peer.base_model.model.model.embed_tokens
    model, _ = untied_model()
    add_adapter(model, AdapterConfig(5, 12.0, ("tok_embeddings",), use_dora=use_dora))
    ours = model.tok_embeddings
    pairs = [
        (ours.lora_embedding_a.weight, theirs.lora_embedding_A["default"]),
        (ours.lora_embedding_b.weight, theirs.lora_embedding_B["default"]),
    ]
    if use_dora:
        pairs.append(
            (ours.lora_embedding_magnitude, theirs.lora_magnitude_vector["default"].weight)
        )
        assert torch.allclose(pairs[2][0], pairs[2][1])
    torch.manual_seed(13)
    with torch.no_grad():
        for own, other in pairs:
            other.add_(0.1 * torch.randn_like(other))
            own.copy_(other)
    peer.double()(peers.tokens()).logits.square().mean().backward()
    model.double()(peers.tokens()).square().mean().backward()
    for own, other in pairs:
        assert other.grad.abs().max() > 0
        assert torch.allclose(own.grad, other.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_fresh_adapter_on_the_embedding_changes_nothing(use_dora):
    model, _ = untied_model(torch.float64)
    with torch.no_grad():
        before = model(peers.tokens())
        add_adapter(model, AdapterConfig(5, 12.0, ("tok_embeddings",), use_dora=use_dora))
        assert not model.tok_embeddings.lora_embedding_a.weight.any()
        assert model.tok_embeddings.lora_embedding_b.weight.all()
        assert (model(peers.tokens()) - before).abs().max() < 1e-5


WHOLE = ("norm", "layers.1.sa_norm", "k_proj", "tok_embeddings", "output")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_trained_whole_in_fp32_and_the_base_keeps_its_memory(dtype):
    model, weights = untied_model(dtype, attention_bias=True)
    base = {name: tensor.to(dtype) for name, tensor in weights.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(peers.tokens())
    add_adapter(model, AdapterConfig(4, 8.0, ("w1",), modules_to_save=WHOLE))
    with torch.no_grad():
        assert torch.equal(model(peers.tokens()), before)
    expected = {"norm.scale", "layers.1.sa_norm.scale", "tok_embeddings.weight", "output.weight"}
    expected |= {f"layers.{n}.attn.k_proj.{p}" for n in range(3) for p in ("weight", "bias")}
    trained = {name for name in adapter_state_dict(model) if ".lora_" not in name}
    assert trained == expected
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(parameters) == len(expected) + 3 * 2
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    model(peers.tokens()).float().square().mean().backward()
    optimizer.step()
    after = adapter_state_dict(model)
    assert all(not torch.equal(after[name], base[name].float()) for name in expected)
    kept = base_state_dict(model)
    assert kept.keys() == base.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, base[name]), name
        assert tensor.data_ptr() == addresses[name], name
    assert not torch.equal(model(peers.tokens()), before)
    assert model(peers.tokens()).dtype == dtype


def test_the_head_of_a_tied_model_follows_its_trained_embedding():
    model, weights = untied_model(tied=True)
    add_adapter(model, AdapterConfig(4, 8.0, ("w1",), modules_to_save=("tok_embeddings",)))
    with torch.no_grad():
        before = model(peers.tokens())
        dict(model.named_parameters())["tok_embeddings.parametrizations.weight.original"].mul_(2)
        weights["tok_embeddings.weight"] = 2 * weights["tok_embeddings.weight"]
        cfg = peers.config(tied=True)
        expected = build_decoder(cfg, weights, torch.float32)(peers.tokens())
        assert torch.equal(model(peers.tokens()), expected)
        assert not torch.allclose(expected, before)


def test_a_bias_of_b_is_scaled_like_b():
    model, weights = untied_model()
    add_adapter(model, AdapterConfig(4, 10.0, ("w1",), lora_bias=True))
    layer = model.layers[1].mlp.w1
    assert not layer.lora_b.bias.any()
    with torch.no_grad():
        layer.lora_b.bias.copy_(torch.arange(56.0))
        x = torch.randn(5, 42)
        expected = x @ weights["layers.1.mlp.w1.weight"].T + 2.5 * torch.arange(56.0)
        assert torch.allclose(layer(x), expected, atol=1e-4)
    assert "layers.1.mlp.w1.lora_b.bias" in adapter_state_dict(model)
    assert base_state_dict(model).keys() == weights.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ("nrm",)}, r"name in model\.modules_to_save: 'nrm'"),
        ({"modules_to_save": ("w1",)}, r"layers\.0\.mlp\.w1, .*adapter and to be trained whole"),
        ({"target_modules": ("w1", "tok_embeddings"), "lora_bias": True}, "no lora_bias for embed"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(config, message):
    model, _ = untied_model()
    settings = {"r": 4, "alpha": 8.0, "target_modules": ("w1",), **config}
    with pytest.raises(ConfigError, match=message):
        add_adapter(model, AdapterConfig(**settings))
    assert all(parameter.requires_grad for parameter in model.parameters()), "nothing was changed"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ("output",)}, "name tok_embeddings, and both are trained as one"),
        ({"target_modules": ("tok_embeddings",)}, "apply_lora_to_embeddings=False"),
    ],
)
def test_one_side_of_tied_embeddings_is_not_trained_alone(config, message):
    model, _ = untied_model(tied=True)
    settings = {"r": 4, "alpha": 8.0, "target_modules": ("w1",), **config}
    with pytest.raises(ConfigError, match=message):
        add_adapter(model, AdapterConfig(**settings))


def test_an_adapter_of_other_settings_does_not_load():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float32)
    add_adapter(model, AdapterConfig(4, 8.0, ("w1",)))
    saved = adapter_state_dict(model)
    saved["layers.0.mlp.w1.lora_a.weight"] = torch.zeros(5, cfg.dims.hidden)
    saved["layers.0.mlp.w3.lora_a.weight"] = torch.zeros(4, cfg.dims.hidden)
    del saved["layers.2.mlp.w1.lora_b.weight"]
    with pytest.raises(TensorMismatchError) as caught:
        load_adapter(model, saved)
    assert caught.value.problems == (
        "layers.2.mlp.w1.lora_b.weight: missing from the saved adapter",
        "layers.0.mlp.w3.lora_a.weight: not in the adapter of this run",
        "layers.0.mlp.w1.lora_a.weight: saved with shape [5, 42], here [4, 42]",
    )


def test_the_recipe_config_gives_the_adapter():
    section = {
        "lora_attn_modules": ["q_proj", "v_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": True,
        "apply_lora_to_embeddings": True,
        "modules_to_save": ["norm", "sa_norm"],
        "lora_rank": 9,
        "lora_alpha": 27,
        "lora_dropout": 0.1,
        "use_dora": True,
        "use_rslora": True,
    }
    assert adapter_config_from_recipe(section, peers.config()) == AdapterConfig(
        9,
        27.0,
        ("q_proj", "v_proj", "w1", "w2", "w3", "output", "tok_embeddings"),
        0.1,
        use_dora=True,
        use_rslora=True,
        modules_to_save=("norm", "sa_norm"),
    )
    plain = adapter_config_from_recipe({"lora_attn_modules": ["k_proj"]}, peers.config())
    assert plain == AdapterConfig(8, 16.0, ("k_proj",))
    biased = {"lora_attn_modules": ["k_proj"], "lora_bias": True}
    assert adapter_config_from_recipe(biased, peers.config()).lora_bias


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "lora_attn_modules is missing"),
        ({"lora_attn_modules": []}, "no module gets an adapter"),
        ({"lora_attn_modules": ["q_prj"]}, "did you mean 'q_proj'"),
        ({"lora_attn_modules": ["q_proj"], "lora_rnk": 4}, "did you mean 'lora_rank'"),
        ({"lora_attn_modules": ["q_proj"], "lora_rank": 0}, "lora_rank=0"),
        ({"lora_attn_modules": ["q_proj"], "lora_dropout": 1.0}, r"lora_dropout=1\.0"),
        ({"lora_attn_modules": ["q_proj"], "lora_bias": True, "use_dora": True}, "no DoRA with a"),
    ],
)
def test_a_wrong_recipe_section_is_a_clear_error(section, message):
    with pytest.raises(ConfigError, match=message):
        adapter_config_from_recipe(section, peers.config())


def test_a_resumed_run_must_mean_the_same_by_its_adapter():
    config = AdapterConfig(4, 8.0, ("w1",), dropout=0.1)
    check_same_adapter(AdapterConfig(4, 8.0, ("w1",)).to_state(), config)
    with pytest.raises(ConfigError, match=r"lora_alpha was 16\.0 and is 8\.0; use_rslora was True"):
        check_same_adapter(AdapterConfig(4, 16.0, ("w1",), use_rslora=True).to_state(), config)
