import json

import pytest
import torch
from torch import Tensor

from checkpointing import FullModelMetaCheckpointer
from checkpointing.mapping.rope_scaling import Llama3RopeScaling
from tests.tiny import assert_same_tensors, random_native
from tests.training.peers import config

CONFIG = config()
DIMS = CONFIG.dims
PARAMS = {
    "dim": DIMS.hidden,
    "n_layers": DIMS.layers,
    "n_heads": DIMS.heads,
    "n_kv_heads": DIMS.kv_heads,
    "head_dim": DIMS.head_dim,
    "vocab_size": DIMS.vocab,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
# Dimension along which Meta's model-parallel shards are cut, by the end of the name; a norm is
# whole in every shard (github.com/meta-llama/llama: ColumnParallelLinear 0, RowParallelLinear 1).
CUTS = {
    "attention.wq.weight": 0,
    "attention.wk.weight": 0,
    "attention.wv.weight": 0,
    "attention.wo.weight": 1,
    "feed_forward.w1.weight": 0,
    "feed_forward.w2.weight": 1,
    "feed_forward.w3.weight": 0,
    "output.weight": 0,
}


def meta_weights(native: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by Meta's names, which keep the native order of rows."""
    renames = (
        ("attn.q_proj", "attention.wq"),
        ("attn.k_proj", "attention.wk"),
        ("attn.v_proj", "attention.wv"),
        ("attn.output_proj", "attention.wo"),
        ("mlp.w", "feed_forward.w"),
        ("sa_norm.scale", "attention_norm.weight"),
        ("mlp_norm.scale", "ffn_norm.weight"),
        ("norm.scale", "norm.weight"),
    )
    result = {}
    for name, tensor in native.items():
        for old, new in renames:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def write_meta(directory, weights: dict[str, Tensor], ranks: int, embedding_cut: int, params):
    directory.mkdir()
    (directory / "params.json").write_text(json.dumps(params))
    (directory / "tokenizer.model").write_text("tokens")
    cuts = {**CUTS, "tok_embeddings.weight": embedding_cut}
    for rank in range(ranks):
        shard = {}
        for name, tensor in weights.items():
            cut = next((dim for end, dim in cuts.items() if name.endswith(end)), None)
            part = tensor if cut is None else tensor.chunk(ranks, cut)[rank].clone()
            shard[name] = part
        torch.save(shard, directory / f"consolidated.{rank:02d}.pth")
    return directory


@pytest.mark.parametrize("embedding_cut", [0, 1], ids=["as Llama 3", "as Llama 2"])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_every_number_of_shards_loads_and_is_saved_again_as_it_was(tmp_path, ranks, embedding_cut):
    # Sizes that 1, 2 and 7 divide, and none equal to another or to a shard of another.
    dims = {"hidden": 84, "ffn": 112, "vocab": 154, "heads": 14, "kv_heads": 14, "head_dim": 10}
    cfg = config(**dims)
    params = {
        **PARAMS,
        "dim": 84,
        "n_heads": 14,
        "n_kv_heads": 14,
        "head_dim": 10,
        "vocab_size": 154,
    }
    native = random_native(cfg, torch.bfloat16)
    base = write_meta(tmp_path / "base", meta_weights(native), ranks, embedding_cut, params)
    checkpointer = FullModelMetaCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native)

    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    for rank in range(ranks):
        name = f"consolidated.{rank:02d}.pth"
        assert_same_tensors(torch.load(saved / name), torch.load(base / name))
        # No shard may drag the whole tensor's storage along.
        assert (saved / name).stat().st_size < 1.1 * (base / name).stat().st_size
    assert {path.name for path in saved.iterdir()} == {
        *(path.name for path in base.iterdir()),
        "manifest.json",
    }


def test_files_may_be_listed_in_any_order(tmp_path):
    native = random_native(config(vocab=132))
    base = write_meta(tmp_path / "base", meta_weights(native), 2, 0, {**PARAMS, "vocab_size": 132})
    files = ["consolidated.01.pth", "consolidated.00.pth"]
    loaded = FullModelMetaCheckpointer(base, files).load_checkpoint()["model"]
    assert_same_tensors(loaded, native)


def test_tied_embeddings_are_stored_twice_by_meta_and_once_natively(tmp_path):
    cfg = config(tied=True)
    native = random_native(cfg)
    meta = meta_weights(native)
    meta["output.weight"] = meta["tok_embeddings.weight"].clone()
    base = write_meta(tmp_path / "base", meta, 1, 0, PARAMS)
    checkpointer = FullModelMetaCheckpointer(base, output_dir=tmp_path / "out")
    assert checkpointer.model_config.dims.tied
    weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native)
    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    loaded = torch.load(saved / "consolidated.00.pth", mmap=True)
    assert_same_tensors(loaded, meta)
    # One storage for both, as torch.save has it for tied weights.
    assert loaded["output.weight"].data_ptr() == loaded["tok_embeddings.weight"].data_ptr()


def test_params_json_says_what_the_decoder_needs(tmp_path):
    params = {**PARAMS, "rope_theta": 500000.0, "use_scaled_rope": True, "vocab_size": -1}
    base = write_meta(tmp_path / "base", meta_weights(random_native(CONFIG)), 1, 0, params)
    found = FullModelMetaCheckpointer(base).model_config
    assert found.dims == DIMS
    assert (found.norm_eps, found.rope_theta) == (1e-5, 500000.0)
    # Llama 3.1's factor is 8; Llama 3.2's small models have 32, which params.json does not say.
    assert found.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    small = FullModelMetaCheckpointer(base, model_type="LLAMA3_2").model_config
    assert small.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_rope_tables_of_llama_2_are_left_out(tmp_path):
    native = random_native(CONFIG)
    meta = meta_weights(native) | {"rope.freqs": torch.rand(7)}
    base = write_meta(tmp_path / "base", meta, 1, 1, PARAMS)
    assert_same_tensors(FullModelMetaCheckpointer(base).load_checkpoint()["model"], native)
