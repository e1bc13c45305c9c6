"""Megatron-core's layout; expected are tensors that were laid out by hand."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpointing.cli.main import main
from checkpointing.convert import plan_conversion, write_model
from checkpointing.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    TensorMismatchError,
    WriteError,
)
from checkpointing.families import FAMILIES
from checkpointing.formats.detect import find_model
from checkpointing.formats.megatron_names import plain_name
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.plan import plan_to_foreign, plan_to_native
from checkpointing.mapping.tensors import LazyTensors, StateDictSource
from tests.families.variants import IN_FP64, tokens
from tests.formats.megatron_model import (
    config_of,
    hf_weights,
    megatron_weights,
    rank_weights,
    split,
    with_padding,
    write_hf,
    write_megatron,
    write_rank,
    write_root,
)
from tests.tiny import assert_same_tensors

FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, four layers": ("llama", {"num_hidden_layers": 4}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", FOUR_EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models of transformers, made when they are asked for."""
    root = tmp_path_factory.mktemp("models")

    def model(name):
        directory = root / re.sub(r"\W+", "_", name)
        model_type, options = MODELS[name]
        return directory if directory.is_dir() else write_hf(directory, model_type, **options)

    return model


def native(directory):
    source = find_model(directory).open().native
    return {name: source.read(name) for name in source.metas}


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **IN_FP64).eval()
    with torch.inference_mode():
        return model(input_ids=tokens()).logits


def test_the_rows_of_queries_keys_and_values_lie_by_key_value_head():
    # 4 heads of width 8 in 2 groups: [q0 q1 k0 v0 | q2 q3 k1 v1].
    sizes = {"layers": 1, "vocab": 11, "hidden": 20, "ffn": 14, "heads": 4, "kv_heads": 2}
    layout = Layout(FAMILIES["qwen2"], "megatron", Dims(**sizes, head_dim=8, attention_bias=True))
    tensors = {name: torch.randn(shape) for name, shape in layout.native_shapes().items()}
    source = StateDictSource(tensors)
    foreign = plan_to_foreign(layout, source.metas, "test").over(source)
    for kind in ("weight", "bias"):
        q, k, v = (tensors[f"layers.0.attn.{each}_proj.{kind}"] for each in "qkv")
        fused = foreign[f"decoder.layers.0.self_attention.linear_qkv.{kind}"]
        assert torch.equal(torch.cat([fused[0:16], fused[32:48]]), q)
        assert torch.equal(torch.cat([fused[16:24], fused[48:56]]), k)
        assert torch.equal(torch.cat([fused[24:32], fused[56:64]]), v)
        # A few rows at a time too, also where the pieces of two parts meet.
        rows = foreign.rows(f"decoder.layers.0.self_attention.linear_qkv.{kind}")
        assert torch.equal(rows.read(13, 27), fused[13:27])
    gate, up = (tensors[f"layers.0.mlp.{each}.weight"] for each in ("w1", "w3"))
    fc1 = foreign["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[:14], gate) and torch.equal(fc1[14:], up)
    back = plan_to_native(layout, foreign.metas, "test").over(foreign)
    assert_same_tensors(dict(back), tensors)


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        # As the parameters of a model with adapters are called, and as its state dict has them.
        ("to_wrap.weight", "weight"),
        ("weight", "weight"),
        ("adapter.linear_in.weight", "adapter.linear_in.weight"),
        ("to_wrap._extra_state", None),
    ],
)
@pytest.mark.parametrize("wrapper", ["", "module.", "module.module."])
def test_names_of_a_wrapped_model_are_those_of_the_model(wrapper, stored, plain):
    start = "decoder.layers.3.self_attention.linear_proj."
    expected = None if plain is None else start + plain
    assert plain_name(wrapper + start + stored) == expected


@pytest.mark.parametrize("local", [False, True], ids=["norms fused", "norms apart"])
@pytest.mark.parametrize(
    ("name", "grouped"),
    [(name, False) for name in MODELS]
    + [(name, True) for name in MODELS if name.startswith(("mixtral", "qwen3_moe"))],
)
def test_a_checkpoint_of_one_rank_holds_the_same_model(models, tmp_path, name, local, grouped):
    found = write_megatron(tmp_path / "megatron", models(name), local=local, grouped=grouped)
    assert find_model(found).format.name == "megatron"
    assert_same_tensors(native(found), native(models(name)))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", {"tensor": 2}),
        ("llama", {"pipeline": 3}),
        ("llama, four layers", {"tensor": 2, "pipeline": 2, "chunks": 2}),
        ("llama, tied", {"tensor": 2, "pipeline": 3}),
        ("llama, biases", {"tensor": 2}),
        ("qwen2", {"tensor": 2, "pipeline": 3}),
        ("qwen2, tied", {"pipeline": 3}),
        ("qwen3", {"tensor": 2}),
        ("mixtral", {"expert": 2}),
        ("mixtral", {"tensor": 2, "expert": 2}),
        ("mixtral", {"tensor": 2, "expert": 4, "whole_experts": True}),
        ("qwen3_moe", {"tensor": 2, "pipeline": 3, "expert": 2, "grouped": True}),
        ("qwen3_moe, some layers dense", {"pipeline": 2, "expert": 2}),
    ],
    ids=str,
)
def test_the_shards_of_many_ranks_are_joined(models, tmp_path, name, parts):
    found = write_megatron(tmp_path / "megatron", models(name), **parts)
    assert_same_tensors(native(found), native(models(name)))


def test_gate_and_up_of_two_ranks_do_not_stay_interleaved(models, tmp_path):
    found = write_megatron(tmp_path / "megatron", models("llama"), tensor=2)
    ranks = [
        torch.load(found / f"iter_0000012/mp_rank_0{rank}/model_optim_rng.pt", weights_only=False)[
            "model"
        ]["decoder.layers.1.mlp.linear_fc1.weight"]
        for rank in range(2)
    ]
    (g0, u0), (g1, u1) = (rank.chunk(2) for rank in ranks)
    own = native(found)
    assert torch.equal(own["layers.1.mlp.w1.weight"], torch.cat([g0, g1]))
    assert torch.equal(own["layers.1.mlp.w3.weight"], torch.cat([u0, u1]))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", Parallel()),
        ("llama, biases", Parallel(tensor=2)),
        ("qwen2", Parallel(tensor=2, pipeline=3)),
        ("qwen3", Parallel(pipeline=3)),
        ("mixtral", Parallel(tensor=2, expert=2)),
        ("qwen3_moe, some layers dense", Parallel(tensor=2, pipeline=2, expert=2)),
    ],
    ids=str,
)
def test_what_is_written_is_what_megatron_would_save(models, tmp_path, name, parallel):
    hf = models(name)
    write_model(plan_conversion(hf, "megatron", parallel=parallel), tmp_path / "out")
    config = config_of(hf)
    weights = megatron_weights(hf_weights(hf), config["num_key_value_heads"])
    # 131 tokens: 256 rows for one or for two ranks.
    weights = with_padding(weights, 256)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    files = list((tmp_path / "out" / "release").rglob("*.pt"))
    assert len(files) == parallel.tensor * parallel.pipeline * parallel.expert
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    for stage, layers in enumerate(split(config["num_hidden_layers"], parallel.pipeline)):
        for expert, own in enumerate(split(experts, parallel.expert)):
            for rank in range(parallel.tensor):
                directory = f"mp_rank_{rank:02d}"
                directory += f"_{stage:03d}" if parallel.pipeline > 1 else ""
                directory += f"_{expert:03d}" if parallel.expert > 1 else ""
                file = tmp_path / "out" / "release" / directory / "model_optim_rng.pt"
                expected = rank_weights(
                    weights,
                    tensor=(parallel.tensor, rank),
                    layers=layers,
                    first=stage == 0,
                    last=stage == parallel.pipeline - 1,
                    experts=own if experts else None,
                )
                content = torch.load(file, weights_only=True)
                assert_same_tensors(content["model"], expected)
                assert content["args"]["tensor_model_parallel_size"] == parallel.tensor
                assert content["args"]["padded_vocab_size"] == 256
    assert_same_tensors(native(tmp_path / "out"), native(hf))


def test_the_last_stage_of_a_tied_model_has_the_embedding_over_again(models, tmp_path):
    plan = plan_conversion(models("llama, tied"), "megatron", parallel=Parallel(pipeline=3))
    write_model(plan, tmp_path / "out")
    ranks = [
        torch.load(
            tmp_path / f"out/release/mp_rank_00_00{stage}/model_optim_rng.pt", weights_only=True
        )["model"]
        for stage in range(3)
    ]
    embedding = ranks[0]["embedding.word_embeddings.weight"]
    assert torch.equal(ranks[2]["output_layer.weight"], embedding)
    assert not any("output_layer.weight" in rank for rank in ranks[:2])
    assert find_model(tmp_path / "out").open().config.dims.tied


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "qwen3", "mixtral"])
def test_transformers_computes_the_same_with_what_one_command_makes_of_it(models, tmp_path, name):
    parts = {"tensor": 2, "expert": 2} if name == "mixtral" else {"tensor": 2, "pipeline": 3}
    found = write_megatron(tmp_path / "megatron", models(name), **parts)
    assert main(["convert", str(found), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert_same_tensors(hf_weights(tmp_path / "hf"), hf_weights(models(name)))
    assert torch.equal(logits(tmp_path / "hf"), logits(models(name)))
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }


def test_one_command_gives_metas_and_the_native_format_too(models, tmp_path):
    hf = models("llama")
    found = write_megatron(tmp_path / "megatron", hf, tensor=2)
    for to in ("meta", "tune"):
        assert main(["convert", str(found), str(tmp_path / to), "--to", to]) == 0
        assert main(["convert", str(hf), str(tmp_path / f"{to}2"), "--to", to]) == 0
        assert_same_tensors(native(tmp_path / to), native(tmp_path / f"{to}2"))
    # And from Meta's, of which config.json is made.
    command = ["convert", str(tmp_path / "meta"), str(tmp_path / "back"), "--to", "megatron"]
    assert main([*command, "--tensor-parallel", "2"]) == 0
    assert_same_tensors(native(tmp_path / "back"), native(hf))


def test_the_other_commands_read_it(models, tmp_path, capsys):
    hf = models("mixtral")
    assert main(["convert", str(hf), str(tmp_path / "out"), "--to", "megatron", "--dry-run"]) == 0
    assert "release/mp_rank_00/model_optim_rng.pt" in capsys.readouterr().out
    command = ["convert", str(hf), str(tmp_path / "out"), "--to", "megatron"]
    assert main([*command, "--tensor-parallel", "2", "--expert-parallel", "4"]) == 0
    assert main(["diff", str(hf), str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["model"]
    assert (facts["format"], facts["family"], len(facts["files"])) == ("megatron", "mixtral", 8)
    file = tmp_path / "out/release/mp_rank_01_002/model_optim_rng.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert "mp_rank_01_002/model_optim_rng.pt" in capsys.readouterr().out


def test_the_directory_of_an_iteration_can_be_given_itself(models, tmp_path):
    found = write_megatron(tmp_path / "megatron", models("llama"))
    iteration = found / "iter_0000012"
    (found / "config.json").rename(iteration / "config.json")
    assert_same_tensors(native(iteration), native(models("llama")))


class StopsOnce(LazyTensors):
    """A source that has no room for one of its tensors, the first time that it is read."""

    def __init__(self, source, name):
        super().__init__(source.metas, {}, source.copies)
        self.source, self.name, self.read_names = source, name, []

    def rows(self, name):
        self.read_names.append(name)
        if name == self.name:
            self.name = None
            raise WriteError("no room")
        return self.source.rows(name)


def test_a_conversion_that_was_cut_short_goes_on_from_the_ranks_that_were_finished(
    models, tmp_path
):
    plan = plan_conversion(models("llama"), "megatron", parallel=Parallel(tensor=2, pipeline=3))
    source = StopsOnce(plan.tensors, "decoder.layers.2.mlp.linear_fc1.weight")
    with pytest.raises(WriteError, match="4 of 6 weight files are finished"):
        write_model(replace(plan, tensors=source), tmp_path / "out")
    (partial,) = tmp_path.glob(".out.partial-*")
    finished = partial / "release/mp_rank_01_001/model_optim_rng.pt"
    (finished.parent / "left").write_text("of a dead process")
    source.read_names.clear()
    write_model(replace(plan, tensors=source), tmp_path / "out")
    assert {name for name in source.read_names if "layers.0" in name or "layers.1" in name} == set()
    assert_same_tensors(native(tmp_path / "out"), native(models("llama")))
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out/release/mp_rank_01_001/left").exists()


def test_rows_behind_the_vocabulary_are_cut_off_only_where_megatron_fills_it_up(models, tmp_path):
    hf = models("llama")
    weights = megatron_weights(hf_weights(hf), 2)
    iteration = write_root(tmp_path / "megatron", hf)
    # 131 tokens are filled up to 256 rows; 259 would be those of 128 tokens more.
    write_rank(iteration / "mp_rank_00", with_padding(weights, 259))
    with pytest.raises(TensorMismatchError, match="259 rows, for the 131 tokens"):
        native(tmp_path / "megatron")
    other = write_root(tmp_path / "other", hf)
    write_rank(other / "mp_rank_00", with_padding(weights, 260), make_vocab_size_divisible_by=130)
    assert_same_tensors(native(tmp_path / "other"), native(hf))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_attention_heads": 12}, "num_attention_heads is 12, not 6"),
        ({"group_query_attention": False, "num_attention_heads": 6}, "num_query_groups is 6"),
        ({"kv_channels": 7}, "kv_channels is 7, not 14"),
        ({"rotary_base": 500000}, "rotary_base is 500000, not 10000"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"num_experts": 8}, "num_experts is 8, not 0"),
    ],
    ids=str,
)
def test_settings_of_another_model_than_the_configs_are_refused(models, tmp_path, settings, says):
    found = write_megatron(tmp_path / "megatron", models("llama"), settings=settings)
    with pytest.raises(ConfigError, match=says):
        native(found)


def test_a_rank_that_is_missing_and_one_of_another_checkpoint_are_told(models, tmp_path):
    found = write_megatron(tmp_path / "megatron", models("llama"), tensor=2, pipeline=3)
    missing = found / "iter_0000012/mp_rank_00_002/model_optim_rng.pt"
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(CheckpointNotFoundError, match="tensor rank 0 of stage 2"):
        native(found)
    other = write_megatron(tmp_path / "other", models("llama"), pipeline=3)
    source = other / "iter_0000012/mp_rank_00_002/model_optim_rng.pt"
    missing.write_bytes(source.read_bytes())
    with pytest.raises(TensorMismatchError, match=r"linear_qkv.weight: \[210, 42\], expected"):
        native(found)
    missing.write_bytes(content)
    tracker = found / "latest_checkpointed_iteration.txt"
    tracker.write_text("13")
    with pytest.raises(CheckpointNotFoundError, match="names iter_0000013, which is not there"):
        find_model(found)
    tracker.write_text("../../elsewhere")
    with pytest.raises(CheckpointNotFoundError):
        find_model(found)


def test_a_norm_that_differs_between_ranks_is_refused(models, tmp_path):
    found = write_megatron(tmp_path / "megatron", models("llama"), tensor=2)
    file = found / "iter_0000012/mp_rank_01/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(content, file)
    with pytest.raises(TensorMismatchError, match="differs between the shards"):
        native(found)


def test_what_megatron_core_did_not_write_is_refused(models, tmp_path):
    hf = models("llama")
    iteration = write_root(tmp_path / "old", hf)
    (iteration / "mp_rank_00").mkdir(parents=True)
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    torch.save({"model": {name: torch.ones(3)}}, iteration / "mp_rank_00/model_optim_rng.pt")
    with pytest.raises(CorruptCheckpointError, match="has no model with Megatron-core's names"):
        native(tmp_path / "old")
    found = write_megatron(tmp_path / "megatron", hf)
    (found / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json"):
        native(found)


def test_sizes_that_cannot_be_divided_and_families_without_rules_are_refused(models, tmp_path):
    parallel = Parallel(tensor=4, pipeline=2, expert=3)
    with pytest.raises(ConfigError) as caught:
        plan_conversion(models("mixtral"), "megatron", parallel=parallel)
    text = str(caught.value)
    assert "tensor-parallel 4 does not divide heads (6)" in text
    assert "tensor-parallel 4 does not divide key-value heads (2)" in text
    assert "pipeline-parallel 2 does not divide layers (3)" in text
    assert "expert-parallel 3 does not divide experts (4)" in text
    with pytest.raises(ConfigError, match="only Megatron's format"):
        plan_conversion(models("mixtral"), "tune", parallel=Parallel(tensor=2))
    gemma = write_hf(tmp_path / "gemma", "gemma")
    for parallel in (Parallel(), Parallel(pipeline=5)):
        with pytest.raises(ConfigError, match="Megatron's layout of gemma is not known"):
            plan_conversion(gemma, "megatron", parallel=parallel)
