import torch

from checkpointing.families.llama import LLAMA
from checkpointing.mapping.padding import padded, unpadded, vocabulary_tensors
from checkpointing.mapping.tensors import StateDictSource

TENSORS = {
    "embedding.word_embeddings.weight": torch.randn(11, 4, dtype=torch.bfloat16),
    "output_layer.weight": torch.randn(11, 4),
    "decoder.final_layernorm.weight": torch.randn(4),
}


def test_the_vocabulary_is_filled_up_with_zeros_and_cut_to_what_it_was():
    names = vocabulary_tensors(LLAMA, "megatron")
    assert set(names) == {"embedding.word_embeddings.weight", "output_layer.weight"}
    source = StateDictSource(TENSORS)
    longer = padded(source, names, 8)
    for name in names:
        tensor = longer.read(name)
        assert longer.metas[name].shape == tuple(tensor.shape) == (16, 4)
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor[:11], TENSORS[name]) and not tensor[11:].any()
        # A few rows at a time, over the end of the vocabulary.
        assert torch.equal(longer.rows(name).read(9, 14), tensor[9:14])
    same = unpadded(longer, names, 11)
    for name, tensor in TENSORS.items():
        assert same.metas[name] == source.metas[name]
        assert torch.equal(same.read(name), tensor)


def test_what_divides_evenly_stays_as_it_is():
    source = StateDictSource(TENSORS)
    for name, tensor in padded(source, ["output_layer.weight"], 11).items():
        assert torch.equal(tensor, TENSORS[name])
    for name, tensor in unpadded(source, ["output_layer.weight"], 11).items():
        assert torch.equal(tensor, TENSORS[name])
