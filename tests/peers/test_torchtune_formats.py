"""Weights that travel between torchtune 0.6.1 and this project, bit for bit."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpointing
from tests.peers.models import (
    HF,
    LLAMA2,
    LLAMA3,
    LLAMA3_2,
    META,
    MODELS,
    TUNE,
    WIDE_HEADS,
    base_for,
    hf_base,
    meta_base,
    ours,
    weight_files,
)
from tests.peers.torchtune_process import TorchtuneError
from tests.tiny import assert_same_tensors, random_native

DTYPES = (torch.float32, torch.bfloat16)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
every_format = pytest.mark.parametrize("checkpointer", [HF, META, TUNE])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@every_model
@every_format
def test_a_model_that_torchtune_writes_loads_here(checkpointer, model, dtype, torchtune, tmp_path):
    base = base_for(checkpointer, tmp_path / "base", model, torchtune, dtype)
    native = random_native(model.config, dtype)
    torchtune.save(checkpointer, {"model": native}, base.arguments(tmp_path / "out"))
    written = tmp_path / "out" / "epoch_0"

    loaded = ours(checkpointer, written, weight_files(written), model.model_type).load_checkpoint()

    assert_same_tensors(loaded["model"], native)


@every_dtype
@every_model
@every_format
def test_a_model_that_is_written_here_loads_in_torchtune(
    checkpointer, model, dtype, torchtune, tmp_path
):
    base = base_for(checkpointer, tmp_path / "base", model, torchtune, dtype)
    native = random_native(model.config, dtype)
    nbytes = sum(tensor.nbytes for tensor in native.values())
    shards = {"max_shard_size": math.ceil(0.45 * nbytes)} if checkpointer == HF else {}
    written = ours(checkpointer, **base.arguments(tmp_path / "out")).save_checkpoint(
        {"model": native}, epoch=0, **shards
    )
    expected_files = {
        HF: [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)],
        META: ["consolidated.00.pth"],
        TUNE: ["model-00001-of-00001.bin"],
    }
    assert weight_files(written) == expected_files[checkpointer]

    loaded = torchtune.load(
        checkpointer,
        checkpoint_dir=written,
        checkpoint_files=weight_files(written),
        model_type=model.model_type,
        output_dir=tmp_path / "other",
    )

    assert_same_tensors(loaded["model"], native)


@every_model
@every_format
def test_both_read_a_release_alike(checkpointer, model, torchtune, tmp_path):
    arguments = base_for(checkpointer, tmp_path / "base", model, torchtune).arguments(
        tmp_path / "out"
    )

    found = ours(checkpointer, **arguments).load_checkpoint()

    assert_same_tensors(found["model"], torchtune.load(checkpointer, **arguments)["model"])


def test_the_files_of_torchtune_are_found_by_their_index(torchtune, tmp_path):
    native = random_native(LLAMA3.config)
    base = hf_base(tmp_path / "base", LLAMA3)
    for safe, index in (
        (True, "model.safetensors.index.json"),
        (False, "pytorch_model.bin.index.json"),
    ):
        out = tmp_path / f"safe_{safe}"
        arguments = base.arguments(out, safe_serialization=safe)
        torchtune.save(HF, {"model": native}, arguments)
        assert (out / "epoch_0" / index).is_file()

        loaded = checkpointing.FullModelHFCheckpointer(out / "epoch_0").load_checkpoint()

        assert_same_tensors(loaded["model"], native)


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        (LLAMA2, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (LLAMA3_2, "lm_head.weight"),
    ],
    ids=["RoPE table", "copy of the embedding"],
)
def test_an_index_of_torchtune_may_name_what_it_did_not_write(model, extra, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", model)
    tensors = {n: t for name in base.files for n, t in load_file(base.directory / name).items()}
    tensors[extra] = (
        tensors["model.embed_tokens.weight"].clone() if "head" in extra else torch.rand(4)
    )
    for name in base.files:
        (base.directory / name).unlink()
    (base.directory / "model.safetensors.index.json").unlink()
    save_file(tensors, base.directory / "model.safetensors")
    native = random_native(model.config)
    arguments = base.arguments(tmp_path / "out", checkpoint_files=["model.safetensors"])
    torchtune.save(HF, {"model": native}, arguments)
    written = tmp_path / "out" / "epoch_0"
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert extra in index["weight_map"]

    loaded = checkpointing.FullModelHFCheckpointer(written).load_checkpoint()

    assert_same_tensors(loaded["model"], native)


def test_bin_files_that_are_written_here_load_in_torchtune(torchtune, tmp_path):
    native = random_native(LLAMA3.config)
    arguments = hf_base(tmp_path / "base", LLAMA3).arguments(tmp_path / "out")
    written = checkpointing.FullModelHFCheckpointer(
        **arguments, safe_serialization=False
    ).save_checkpoint({"model": native}, epoch=0, max_shard_size="100KB")
    files = weight_files(written)
    assert len(files) > 1 and all(name.endswith(".bin") for name in files)

    loaded = torchtune.load(
        HF,
        **{
            **arguments,
            "checkpoint_dir": written,
            "checkpoint_files": files,
            "output_dir": tmp_path / "other",
        },
    )

    assert_same_tensors(loaded["model"], native)


def test_torchtunes_decoder_gives_the_logits_of_transformers(torchtune, tmp_path):
    reference = LLAMA3.transformers_model(torch.float32)
    base = hf_base(tmp_path / "base", LLAMA3)
    weights = checkpointing.FullModelHFCheckpointer(base.directory).load_checkpoint()["model"]
    tokens = torch.arange(26).reshape(2, 13) * 5
    dims = LLAMA3.dims
    sizes = {
        "vocab_size": dims.vocab,
        "num_layers": dims.layers,
        "num_heads": dims.heads,
        "num_kv_heads": dims.kv_heads,
        "embed_dim": dims.hidden,
        "intermediate_dim": dims.ffn,
        "max_seq_len": 64,
        "rope_base": 10000,
    }

    logits = torchtune.logits(sizes, dict(weights), tokens)

    with torch.no_grad():
        torch.testing.assert_close(logits, reference(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [LLAMA2, LLAMA3, LLAMA3_2], ids=["MHA", "GQA", "tied"])
def test_three_fields_of_config_json_are_enough(model, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", model)
    fields = {
        "hidden_size": model.dims.hidden,
        "num_attention_heads": model.dims.heads,
        "num_key_value_heads": model.dims.kv_heads,
    }
    (base.directory / "config.json").write_text(json.dumps(fields))
    native = random_native(model.config)
    arguments = base.arguments(tmp_path / "out")
    checkpointer = checkpointing.FullModelHFCheckpointer(**arguments)

    assert_same_tensors(
        checkpointer.load_checkpoint()["model"], torchtune.load(HF, **arguments)["model"]
    )

    written = checkpointer.save_checkpoint({"model": native}, epoch=0)
    again = {"checkpoint_dir": written, "checkpoint_files": weight_files(written)}
    theirs = torchtune.load(HF, **{**arguments, **again, "output_dir": tmp_path / "other"})
    assert_same_tensors(theirs["model"], native)


def test_a_head_of_its_own_beside_tied_embeddings_is_dropped_by_torchtune_and_kept_here(
    torchtune, tmp_path
):
    native = random_native(LLAMA3.config)
    base = meta_base(tmp_path / "base", LLAMA3_2, torchtune.to_meta(native))
    arguments = base.arguments(tmp_path / "out")

    assert "output.weight" not in torchtune.load(META, **arguments)["model"]

    found = checkpointing.FullModelMetaCheckpointer(**arguments).load_checkpoint()["model"]
    assert_same_tensors(found, native)


def test_a_head_that_training_untied_is_refused_by_torchtune_and_saved_here(torchtune, tmp_path):
    native = random_native(LLAMA3.config)
    arguments = hf_base(tmp_path / "base", LLAMA3_2).arguments(tmp_path / "out")

    with pytest.raises(TorchtuneError, match=r"KeyError: 'lm_head\.weight'"):
        torchtune.save(HF, {"model": native}, arguments)

    written = checkpointing.FullModelHFCheckpointer(**arguments).save_checkpoint(
        {"model": native}, epoch=1
    )
    found = checkpointing.FullModelHFCheckpointer(written).load_checkpoint()["model"]
    assert_same_tensors(found, native)


def test_a_release_in_several_shards_is_refused_by_torchtune_and_loads_here(torchtune, tmp_path):
    model = replace(LLAMA3, dims=replace(LLAMA3.dims, vocab=134))
    native = random_native(model.config)
    whole = torchtune.to_meta(native)
    # Norms stand in every shard, row-parallel weights are cut along dim 1, all others along dim 0.
    row_parallel = ("wo.weight", "w2.weight")
    ranks = [
        {
            name: weight
            if "norm" in name
            else weight.chunk(2, 1 if name.endswith(row_parallel) else 0)[rank].clone()
            for name, weight in whole.items()
        }
        for rank in (0, 1)
    ]
    base = meta_base(tmp_path / "base", model, ranks[0])
    torch.save(ranks[1], base.directory / "consolidated.01.pth")
    files = ["consolidated.00.pth", "consolidated.01.pth"]
    arguments = base.arguments(tmp_path / "out", checkpoint_files=files)

    with pytest.raises(TorchtuneError, match="single checkpoint file"):
        torchtune.load(META, **arguments)

    found = checkpointing.FullModelMetaCheckpointer(**arguments).load_checkpoint()["model"]
    assert_same_tensors(found, native)


@every_format
def test_the_state_dict_of_the_caller_is_taken_apart_by_torchtune_and_left_alone_here(
    checkpointer, torchtune, tmp_path
):
    base = base_for(checkpointer, tmp_path / "base", WIDE_HEADS, torchtune)
    state = {"model": random_native(WIDE_HEADS.config), "epochs_run": 1, "seed": 7}
    arguments = base.arguments(tmp_path / "out")
    left = torchtune.save(checkpointer, state, arguments, intermediate_checkpoint=True)
    assert "model" not in left

    ours(checkpointer, **arguments).save_checkpoint(state, epoch=1, intermediate_checkpoint=True)

    assert list(state) == ["model", "epochs_run", "seed"]
    assert_same_tensors(state["model"], random_native(WIDE_HEADS.config))
