"""Encoders and the vision model: native names and values are those of torchtune 0.6.1."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from checkpointing import FullModelHFCheckpointer
from tests.families.weights_only import VARIANTS, as_released, output, write
from tests.peers.models import HF, weight_files
from tests.tiny import assert_same_tensors

MODEL_TYPES = {"clip_text_model": "CLIP_TEXT", "t5": "T5_ENCODER", "mllama": "LLAMA3_VISION"}
NAMES = [name for name, (family, _) in VARIANTS.items() if family in MODEL_TYPES]


def arguments(directory, name, output_dir):
    return {
        "checkpoint_dir": str(directory),
        "checkpoint_files": weight_files(directory),
        "model_type": MODEL_TYPES[VARIANTS[name][0]],
        "output_dir": str(output_dir),
    }


def add_copy_of_embedding(file):
    """torchtune reads T5's embedding under the name of its copy, which not all files hold."""
    tensors = load_file(file)
    copy = {"encoder.embed_tokens.weight": tensors["shared.weight"].clone()}
    save_file({**tensors, **copy}, file)


@pytest.mark.parametrize("name", NAMES)
def test_both_read_a_release_alike(torchtune, tmp_path, name):
    write(name, tmp_path / "base")
    if name == "t5":
        add_copy_of_embedding(tmp_path / "base" / "model.safetensors")
    options = arguments(tmp_path / "base", name, tmp_path / "out")

    found = FullModelHFCheckpointer(**options).load_checkpoint()["model"]

    assert_same_tensors(found, torchtune.load(HF, **options)["model"])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mllama")])
def test_a_vision_model_that_torchtune_writes_is_the_one_that_is_written_here(
    torchtune, tmp_path, name
):
    model = write(name, tmp_path / "base")
    options = arguments(tmp_path / "base", name, tmp_path / "out")
    native = torchtune.load(HF, **options)["model"]
    torchtune.save(HF, {"model": native}, options)
    theirs = tmp_path / "out" / "epoch_0"
    ours = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "ours").save_checkpoint(
        {"model": native}, epoch=0
    )

    (file,) = ours.glob("model-*.safetensors")
    written = {}
    for name_of_file in weight_files(theirs):
        written.update(load_file(theirs / name_of_file))
    assert_same_tensors(load_file(file), written)
    assert torch.equal(output(type(model).from_pretrained(ours), name), output(model, name))


@pytest.mark.parametrize("name", ["mllama"])
def test_the_native_weights_of_a_vision_model_fit_torchtunes_module_exactly(
    torchtune, tmp_path, name
):
    # torchtune's encoder has feed-forward layers of four times its width.
    write("mllama, as torchtune can build it", tmp_path)
    native = FullModelHFCheckpointer(tmp_path).load_checkpoint()["model"]
    text, vision = (
        json.loads((tmp_path / "config.json").read_text())[part]
        for part in ("text_config", "vision_config")
    )
    torchtune.fits_vision_model(
        encoder={
            "patch_size": vision["patch_size"],
            "num_heads": vision["attention_heads"],
            "clip_embed_dim": vision["hidden_size"],
            "clip_num_layers": vision["num_hidden_layers"],
            "clip_hidden_states": vision["intermediate_layers_indices"],
            "num_layers_projection": vision["num_global_layers"],
            "decoder_embed_dim": text["hidden_size"],
            "tile_size": vision["image_size"],
            "max_num_tiles": vision["max_num_tiles"],
            "in_channels": vision["num_channels"],
        },
        decoder={
            "vocab_size": text["vocab_size"],
            "num_layers": text["num_hidden_layers"] - len(text["cross_attention_layers"]),
            "fusion_interval": 2,
            "num_special_tokens": 8,
            "num_heads": text["num_attention_heads"],
            "num_kv_heads": text["num_key_value_heads"],
            "embed_dim": text["hidden_size"],
            "max_seq_len": 64,
            "encoder_max_seq_len": 64,
            "intermediate_dim": text["intermediate_size"],
        },
        weights=dict(native),
    )


def random_weights(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            weight.copy_(is_scale + 0.2 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def test_torchtunes_clip_gives_the_output_of_transformers(torchtune, tmp_path):
    # torchtune finds the end of a text by the token of that number, and knows just this width.
    end = 49407
    sizes = {"vocab_size": end + 1, "hidden_size": 12, "num_hidden_layers": 2}
    counts = {"num_attention_heads": 3, "max_position_embeddings": 7, "intermediate_size": 48}
    model = random_weights(CLIPTextModel(CLIPTextConfig(**sizes, **counts)))
    model.save_pretrained(tmp_path)
    as_released(tmp_path / "model.safetensors")
    native = FullModelHFCheckpointer(tmp_path).load_checkpoint()["model"]
    tokens = torch.tensor([[5, 77, 4, 901, 3, end, 0], [6, 8, end, 0, 0, 0, 0]])

    found = torchtune.encode(
        "clip_text_encoder",
        {
            "embed_dim": 12,
            "num_heads": 3,
            "num_layers": 2,
            "vocab_size": end + 1,
            "max_seq_len": 7,
        },
        dict(native),
        tokens,
    )

    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens).pooler_output, rtol=1e-5, atol=1e-5)


def test_torchtunes_t5_encoder_gives_the_output_of_transformers(torchtune, tmp_path):
    # torchtune computes gelu exactly, and T5 1.1 approximates it.
    config = T5Config(
        vocab_size=131,
        d_model=24,
        d_kv=8,
        num_heads=3,
        d_ff=56,
        num_layers=2,
        relative_attention_num_buckets=10,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu_python",
    )
    model = random_weights(T5EncoderModel(config))
    model.save_pretrained(tmp_path)
    native = FullModelHFCheckpointer(tmp_path).load_checkpoint()["model"]
    tokens = torch.randint(1, 131, (2, 11), generator=torch.Generator().manual_seed(3))

    found = torchtune.encode(
        "t5_encoder",
        {
            "embed_dim": 24,
            "mlp_dim": 56,
            "num_heads": 3,
            "head_dim": 8,
            "num_layers": 2,
            "rel_pos_num_buckets": 10,
            "rel_pos_max_dist": 16,
            "vocab_size": 131,
            "norm_eps": 1e-6,
            "max_seq_len": 11,
        },
        dict(native),
        tokens,
    )

    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens).last_hidden_state, rtol=1e-5, atol=1e-5)
