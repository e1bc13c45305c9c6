"""Families without a native decoder: their files come back as they were, from every format."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.adapters.lora import adapter_modules
from checkpointing.cli.main import main
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES, MODEL_TYPES
from checkpointing.mapping.layout import Layout
from checkpointing.training import build_decoder
from tests.cli.test_convert import convert, weights
from tests.families.weights_only import (
    CLIP,
    LLAMA4,
    T5,
    VARIANTS,
    WEIGHTS_ONLY,
    listed,
    output,
    peer,
    tile_tables,
    write,
)
from tests.tiny import ATTENTION, EXPERTS, MLP, assert_same_tensors, random_adapter

MODEL_TYPE_OF = {family: name for name, family in MODEL_TYPES.items()}


def load(directory, **options):
    return FullModelHFCheckpointer(directory, **options).load_checkpoint()["model"]


@pytest.mark.parametrize("name", VARIANTS)
def test_to_native_and_back_keeps_every_bit_and_every_key(tmp_path, name):
    model = write(name, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base", model_type=MODEL_TYPE_OF[VARIANTS[name][0]], output_dir=tmp_path / "out"
    )
    native = checkpointer.load_checkpoint()["model"]
    saved = checkpointer.save_checkpoint({"model": native}, epoch=0)
    assert_same_tensors(weights(saved), weights(tmp_path / "base"))
    assert json.loads((saved / "config.json").read_text()) == json.loads(
        (tmp_path / "base" / "config.json").read_text()
    )
    again, report = type(model).from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(output(again, name), output(model, name))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_native_format_holds_the_same_model(tmp_path, name):
    write(name, tmp_path / "base")
    hf = FullModelHFCheckpointer(tmp_path / "base")
    native = hf.load_checkpoint()["model"]
    (tmp_path / "native").mkdir()
    torch.save(native, tmp_path / "native" / "model.bin")
    config = (tmp_path / "base" / "config.json").read_text()
    (tmp_path / "native" / "config.json").write_text(config)
    tune = FullModelTorchTuneCheckpointer(tmp_path / "native", output_dir=tmp_path / "out")
    assert tune.model_config == hf.model_config
    assert_same_tensors(tune.load_checkpoint()["model"], native)
    saved = tune.save_checkpoint({"model": native}, epoch=0)
    assert_same_tensors(FullModelTorchTuneCheckpointer(saved).load_checkpoint()["model"], native)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_command_converts_to_tune_and_back_with_the_same_bits_and_config(tmp_path, name):
    write(name, tmp_path / "base")
    assert convert(tmp_path / "base", tmp_path / "tune", "tune") == 0
    assert_same_tensors(weights(tmp_path / "tune"), load(tmp_path / "base"))
    assert convert(tmp_path / "tune", tmp_path / "hf", "hf") == 0
    assert_same_tensors(weights(tmp_path / "hf"), weights(tmp_path / "base"))
    first, second = ((tmp_path / each / "config.json").read_text() for each in ("base", "hf"))
    assert json.loads(first) == json.loads(second)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_command_tells_the_sizes_and_finds_no_difference_between_formats(
    tmp_path, capsys, name
):
    write(name, tmp_path / "base")
    assert convert(tmp_path / "base", tmp_path / "tune", "tune") == 0
    capsys.readouterr()
    for directory in ("base", "tune"):
        assert main(["inspect", str(tmp_path / directory), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)["model"]
        assert facts["family"] == VARIANTS[name][0]
        assert facts["dims"]["vocab"] == 131
        assert facts["config"]["unsupported"]
    assert main(["diff", str(tmp_path / "base"), str(tmp_path / "tune")]) == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_such_a_model_is_refused_by_name_where_a_decoder_must_be_built(tmp_path, name):
    write(name, tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    native = checkpointer.load_checkpoint()["model"]
    with pytest.raises(ConfigError, match=f"this {VARIANTS[name][0]} model cannot be trained here"):
        build_decoder(checkpointer.model_config, native, torch.float32)


@pytest.mark.parametrize("name", ["llama4", "mllama", "clip_text_model", "t5"])
def test_sizes_that_the_config_leaves_out_are_those_of_transformers(name):
    # The release that has all default sizes is too large for a test: the defaults are compared.
    family = FAMILIES[name if name in FAMILIES else "llama4_text"]
    config = peer(name).config
    own = type(config)()
    for part in ("text_config", "vision_config") if name == "mllama" else (None,):
        default = own if part is None else getattr(own, part)
        defaults = family.hf_defaults if part is None else family.hf_defaults[part]
        for key, value in defaults.items():
            if key == "rope_theta":
                assert value == default.default_theta
            elif hasattr(default, key):
                assert getattr(default, key) == value, key
            else:
                assert key in {"mlp_bias", "n_positions"}, key


def test_llama4_experts_are_halves_of_the_packed_tensor(tmp_path):
    # torchtune's main branch cuts gate_up_proj in two along its last dimension.
    model = write("llama4", tmp_path)
    native = load(tmp_path)
    packed = model.model.layers[1].feed_forward.experts.gate_up_proj.detach()
    assert torch.equal(native["layers.1.mlp.experts.gate_proj"], packed[..., :24])
    assert torch.equal(native["layers.1.mlp.experts.up_proj"], packed[..., 24:])
    down = model.model.layers[3].feed_forward.experts.down_proj.detach()
    assert torch.equal(native["layers.3.mlp.experts.down_proj"], down)
    assert not any(name.startswith("layers.0.mlp.experts") for name in native)


def test_a_table_of_tiles_that_the_native_layout_cannot_hold_is_refused_by_name(tmp_path):
    model = peer("mllama")
    with torch.no_grad():
        tile_tables(model)[0][0][5, 3] += 1
    model.save_pretrained(tmp_path)
    with pytest.raises(TensorMismatchError, match=r"pre_tile.*embedding\.weight: the same tile"):
        load(tmp_path)


def test_tiles_that_no_image_has_are_not_lost_without_a_word(tmp_path):
    write("mllama", tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    native = dict(checkpointer.load_checkpoint()["model"])
    name = "encoder.clip.token_pos_embedding.global_token_positional_embedding"
    native[name] = native[name].clone()
    native[name][3, 3] = 1.0
    with pytest.raises(TensorMismatchError, match=f"{name}: not zero for tiles that no image has"):
        checkpointer.save_checkpoint({"model": native}, epoch=0)
    assert not list((tmp_path / "out").iterdir())


def test_native_tiles_have_the_embedding_of_their_row_and_column(tmp_path):
    model = write("mllama", tmp_path)
    native = load(tmp_path)["encoder.clip.pre_tile_pos_embed.embedding"]
    shapes = model.config.vision_config.supported_aspect_ratios
    assert torch.equal(listed(native, shapes), tile_tables(model)[0][0])
    assert native[2, 0].abs().min() > 0  # a tile of the shape (3, 1)
    assert native[1, 2].abs().max() == 0  # of none


@pytest.mark.parametrize("layers", [[2, 3], [5]])
def test_cross_attention_that_no_layer_follows_is_refused(tmp_path, layers):
    write("mllama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["cross_attention_layers"] = layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="must be followed by a layer with self-attention"):
        load(tmp_path)


def test_a_whole_t5_is_refused_with_what_to_save_instead(tmp_path):
    T5ForConditionalGeneration(T5Config(**T5)).save_pretrained(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"has a decoder .* transformers' T5EncoderModel"):
        load(tmp_path / "whole")
    encoder = T5EncoderModel.from_pretrained(tmp_path / "whole")
    encoder.save_pretrained(tmp_path / "encoder")
    assert torch.equal(load(tmp_path / "encoder")["token_embedding.weight"], encoder.shared.weight)


def test_a_t5_whose_feed_forward_is_not_gated_is_refused(tmp_path):
    T5EncoderModel(T5Config(**{**T5, "feed_forward_proj": "relu"})).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"feed_forward_proj is 'relu'; only T5 1\.1"):
        load(tmp_path)


def test_the_copy_of_t5s_embedding_that_some_files_hold_must_be_one(tmp_path):
    write("t5", tmp_path)
    file, copy = tmp_path / "model.safetensors", "encoder.embed_tokens.weight"
    tensors = load_file(file)
    native = load(tmp_path)
    save_file({**tensors, copy: tensors["shared.weight"].clone()}, file)
    assert_same_tensors(load(tmp_path), native)
    save_file({**tensors, copy: tensors["shared.weight"] + 1}, file)
    with pytest.raises(ConfigError, match=f"{copy} differs from shared.weight"):
        load(tmp_path)


def test_clip_is_refused_where_it_is_more_than_a_text_encoder(tmp_path):
    text = CLIPTextConfig(**CLIP)
    vision = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 14, "patch_size": 7}
    both = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision))
    both.save_pretrained(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"'clip' is a multimodal .* CLIPTextModel, and save"):
        load(tmp_path / "both")
    CLIPTextModel.from_pretrained(tmp_path / "both").save_pretrained(tmp_path / "text")
    assert load(tmp_path / "text")["position_embedding"].shape == (23, 42)

    CLIPTextModelWithProjection(text).save_pretrained(tmp_path / "projection")
    with pytest.raises(ConfigError, match=r"text_projection\.weight.* transformers' CLIPTextModel"):
        load(tmp_path / "projection")


def test_names_of_clip_without_their_prefix_are_read_and_saved_with_it(tmp_path):
    write("clip_text_model", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    released, native = load_file(file), load(tmp_path / "base")
    save_file({name.removeprefix("text_model."): t for name, t in released.items()}, file)
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    found = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(found, native)
    saved = checkpointer.save_checkpoint({"model": found}, epoch=0)
    assert_same_tensors(weights(saved), released)


ADAPTERS = {
    "lora": AdapterConfig(4, 6, (*ATTENTION, *MLP)),
    "dora": AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=True),
    "rslora with patterns": AdapterConfig(
        4,
        6,
        ("k_proj", "w2"),
        use_rslora=True,
        rank_pattern={"layers.1.mlp.shared_expert.w2": 3},
        alpha_pattern={"layers.2.mlp.w2": 11},
    ),
}


def linear_adapter(config, directory):
    """Random tensors of an adapter on every linear module of the targets' names."""
    model_config = FullModelHFCheckpointer(directory).model_config
    layout = Layout(FAMILIES[model_config.family], "hf", model_config.dims)
    generator = torch.Generator().manual_seed(11)
    return {
        parameter.native_name(pair.native): 0.3
        * torch.randn(pair.native_shape(parameter, config.rank(pair.native)), generator=generator)
        for pair in layout.pairs
        if pair.native.rpartition(".")[2] in config.target_modules
        for parameter in config.parameters(pair.module.adapter)
    }


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_and_merged_model_of_llama4_compute_the_same_in_peft(tmp_path, kind):
    config = ADAPTERS[kind]
    model = write("llama4, biases", tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    native = checkpointer.load_checkpoint()["model"]
    adapter = linear_adapter(config, tmp_path / "base")
    assert {"layers.0.mlp.w2", "layers.1.mlp.shared_expert.w2"} <= set(adapter_modules(adapter))
    state = {
        "model": MergedStateDict(native, adapter, config),
        "adapter": adapter,
        "adapter_config": config.to_state(),
    }
    saved = checkpointer.save_checkpoint(state, epoch=0)
    merged = type(model).from_pretrained(saved / "merged").double()
    base = output(model.double(), "llama4")
    adapted = PeftModel.from_pretrained(model, saved).double()
    expected = output(adapted, "llama4")
    assert (expected - base).abs().max() > 0.05
    assert (output(merged, "llama4") - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["mllama", "clip_text_model", "t5"])
def test_an_adapter_of_another_family_is_merged_and_not_written_for_peft(tmp_path, caplog, name):
    write(name, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    native = checkpointer.load_checkpoint()["model"]
    config = AdapterConfig(4, 6, ("v_proj", "w2"))
    adapter = linear_adapter(config, tmp_path / "base")
    merged = MergedStateDict(native, adapter, config)
    state = {"model": merged, "adapter": adapter, "adapter_config": config.to_state()}
    saved = checkpointer.save_checkpoint(state, epoch=0)
    assert "not written for PEFT" in caplog.text
    assert not (saved / "adapter_config.json").exists()
    assert_same_tensors(torch.load(saved / "adapter_model.pt", weights_only=True), adapter)
    assert_same_tensors(load(saved / "merged"), dict(merged))


@pytest.mark.parametrize("targets", [EXPERTS, ("up_proj",), ("down_proj",)])
def test_an_adapter_on_the_experts_of_llama4_computes_the_same_in_peft(tmp_path, targets):
    model = write("llama4", tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    native = checkpointer.load_checkpoint()["model"]
    config = AdapterConfig(4, 6, targets, rank_pattern={"layers.3.mlp.experts.up_proj": 3})
    if "up_proj" not in targets:
        config = replace(config, rank_pattern={})
    adapter = random_adapter(checkpointer.model_config.dims, config)
    merged = MergedStateDict(native, adapter, config)
    state = {"model": merged, "adapter": adapter, "adapter_config": config.to_state()}
    saved = checkpointer.save_checkpoint(state, epoch=0)
    plain = type(model).from_pretrained(saved / "merged").double()
    base = output(model.double(), "llama4")
    adapted = output(PeftModel.from_pretrained(model, saved).double(), "llama4")
    assert (adapted - base).abs().max() > 0.05
    assert (adapted - output(plain, "llama4")).abs().max() < 1e-5
    for name in ("adapter_model.pt", "manifest.json"):
        (saved / name).unlink()
    back = FullModelHFCheckpointer(tmp_path / "base", adapter_checkpoint=saved).load_checkpoint()
    again = MergedStateDict(
        native, back["adapter"], AdapterConfig.from_state(back["adapter_config"])
    )
    for name in merged:
        torch.testing.assert_close(again[name], merged[name])


def test_a_llama4_that_sees_is_refused_with_what_to_save_instead(tmp_path):
    vision = {"hidden_size": 12, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 14, "patch_size": 7}
    vision |= dict.fromkeys(("vision_output_dim", "projector_input_dim"), 20)
    vision |= {"projector_output_dim": 20}
    config = Llama4Config(text_config=LLAMA4, vision_config=vision, pad_token_id=0)
    whole = Llama4ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(
        ConfigError, match=r"'llama4' is a multimodal .* Llama4ForCausalLM, and sav"
    ):
        load(tmp_path / "whole")
    Llama4ForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    norm = whole.language_model.model.norm.weight
    assert torch.equal(load(tmp_path / "text")["norm.scale"], norm)


@pytest.mark.parametrize("model_type", [MODEL_TYPE_OF[family] for family in sorted(WEIGHTS_ONLY)])
def test_a_release_in_metas_format_is_refused_by_name(tmp_path, model_type):
    (tmp_path / "params.json").write_text(json.dumps({"dim": 42, "n_layers": 3, "n_heads": 6}))
    torch.save({"norm.weight": torch.ones(42)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(ConfigError, match=f"layout of {model_type} in Meta's format is not known"):
        FullModelMetaCheckpointer(tmp_path, model_type=model_type).load_checkpoint()
