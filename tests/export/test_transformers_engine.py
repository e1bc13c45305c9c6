"""A transformers model as a rollout engine: it computes what the native model computes."""

import pytest
import torch
from torch import Tensor

from checkpointing import AdapterConfig
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.export import adapter_stream, merged_stream
from checkpointing.export.engines import Sampling, sync
from checkpointing.export.engines.transformers_engine import TransformersEngine
from tests.export.live import KINDS, live_model, shake, snapshot
from tests.families.variants import peer

FAMILIES = ("llama", "llama, tied", "qwen2", "phi3", "gemma2", "olmo2")
# Of several lengths, so that some are padded.
SEQUENCES = [[5, 9, 77, 31, 4], [11, 3, 130], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]

ENDS = tuple(range(20, 50))


def native_logprobs(model) -> list[Tensor]:
    """One by one, without padding."""
    found = []
    with torch.no_grad():
        for sequence in SEQUENCES:
            logits = model(torch.tensor([sequence]))[0, :-1].float()
            found.append(logits.log_softmax(-1)[range(len(sequence) - 1), sequence[1:]])
    return found


def differences(engine, model) -> float:
    pairs = zip(engine.logprobs(SEQUENCES), native_logprobs(model), strict=True)
    return max(float((found - expected).abs().max()) for found, expected in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["merged", "adapter"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_after_every_sync_it_computes_what_the_model_computes(tmp_path, variant, way, kind):
    model = live_model(tmp_path, variant, KINDS[kind])
    engine = TransformersEngine(peer(variant))
    assert differences(engine, model) > 0.01
    for version in (0, 1, 5):
        shake(model, version)
        before = snapshot(model)
        sent = sync(model, engine, way, version, base=tmp_path)
        assert sent.is_complete and engine.version == sent.version == version
        assert differences(engine, model) < 1e-4
        assert snapshot(model) == before
    shake(model, 6)
    assert differences(engine, model) > 0.01


def test_an_adapter_leaves_no_older_one_behind(tmp_path):
    model = live_model(tmp_path)
    engine = TransformersEngine(peer("llama"))
    sizes = set()
    for version in range(4):
        shake(model, version)
        sync(model, engine, "adapter", version, base=tmp_path)
        sizes.add(sum(1 for _ in engine._model.parameters()))
    assert len(sizes) == 1


def test_a_stream_of_another_model_changes_nothing(tmp_path):
    model = live_model(tmp_path / "one")
    engine = TransformersEngine(peer("llama"))
    sync(model, engine, "merged", 0)
    biased = live_model(tmp_path / "other", "llama, biases")
    for act in (
        lambda: sync(biased, engine, "merged", 1),
        lambda: engine.load_merged(merged_stream(biased, version=1)),
    ):
        with pytest.raises(TensorMismatchError, match=r"q_proj\.bias: the engine has none"):
            act()
    assert engine.version == 0 and differences(engine, model) < 1e-4


def test_an_adapter_that_does_not_fit_is_not_loaded(tmp_path):
    deeper = live_model(tmp_path / "mixtral", "mixtral", AdapterConfig(4, 6, ("q_proj",)))
    model = live_model(tmp_path / "one", "llama", AdapterConfig(4, 6, ("q_proj", "w1")))
    engine = TransformersEngine(peer("llama"))
    stream = adapter_stream(model, tmp_path)
    stream.adapter_config["target_modules"] = ["q_proj"]
    with pytest.raises(TensorMismatchError, match="PEFT has no place for it"):
        engine.load_adapter(stream)
    stream = adapter_stream(deeper, tmp_path)
    stream.adapter_config["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with pytest.raises(TensorMismatchError, match=r"o_proj\..*missing"):
        engine.load_adapter(stream)
    for version in (3, 4):
        shake(model, version)
        sync(model, engine, "adapter", version, base=tmp_path)
        assert differences(engine, model) < 1e-4
        stream = adapter_stream(deeper, tmp_path, version=9)
        stream.adapter_config["target_modules"] = ["q_proj", "down_proj"]
        with pytest.raises(TensorMismatchError, match=r"down_proj\..*missing"):
            engine.load_adapter(stream)
        assert differences(engine, model) < 1e-4 and engine.version == version


def test_merged_weights_are_not_put_under_an_adapter(tmp_path):
    model = live_model(tmp_path)
    engine = TransformersEngine(peer("llama"))
    sync(model, engine, "adapter", 0, base=tmp_path)
    with pytest.raises(ConfigError, match="would get it twice"):
        sync(model, engine, "merged", 1)
    with pytest.raises(ConfigError, match="count up"):
        sync(model, engine, "adapter", 0, base=tmp_path)
    with pytest.raises(ConfigError, match="'delta' is unknown"):
        sync(model, engine, "delta", 1)


def test_completions_have_the_logprobs_of_the_model_that_wrote_them(tmp_path):
    model = live_model(tmp_path)
    engine = TransformersEngine(peer("llama"))
    sync(model, engine, "merged", 2)
    sampling = Sampling(7, temperature=1.3, seed=5, stop_token_ids=ENDS)
    groups = engine.generate(SEQUENCES, 3, sampling)
    assert [len(group) for group in groups] == [3, 3, 3]
    lengths = set()
    for prompt, group in zip(SEQUENCES, groups, strict=True):
        for one in group:
            lengths.add(len(one.tokens))
            assert one.version == 2 and len(one.tokens) == len(one.logprobs)
            assert len(one.tokens) == 7 or one.tokens[-1] in ENDS
            assert not set(one.tokens[:-1]) & set(ENDS)
            whole = [*prompt, *one.tokens]
            with torch.no_grad():
                values = model(torch.tensor([whole]))[0, :-1].log_softmax(-1)
            expected = values[range(len(whole) - 1), whole[1:]][len(prompt) - 1 :]
            assert (torch.tensor(one.logprobs) - expected).abs().max() < 1e-4
    assert len(lengths) > 1
    state = torch.get_rng_state()
    assert engine.generate(SEQUENCES, 3, sampling) == groups
    assert torch.equal(torch.get_rng_state(), state)
    other = engine.generate(SEQUENCES, 3, Sampling(7, 1.3, seed=6, stop_token_ids=ENDS))
    assert other != groups
    greedy = engine.generate(SEQUENCES, 2, Sampling(4, temperature=0))
    assert all(one == other for one, other in greedy)


def test_what_the_checkpoint_proposes_for_chats_is_not_the_policy():
    sampling = Sampling(9, temperature=0)
    plain = TransformersEngine(peer("llama")).generate(SEQUENCES, 1, sampling)
    model = peer("llama")
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.suppress_tokens = [plain[0][0].tokens[0]]
    assert TransformersEngine(model).generate(SEQUENCES, 1, sampling) == plain


def test_an_error_in_a_stream_is_told_and_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = live_model(tmp_path)
    engine = TransformersEngine(peer("llama"))
    sync(model, engine, "merged", 0)
    before = snapshot(model)
    with pytest.raises(TypeError):
        engine.load_merged(BreakingStream(merged_stream(model, version=1)))
    assert snapshot(model) == before
    # It holds two versions now, and says so until it has all of one.
    for act in (lambda: engine.logprobs(SEQUENCES), lambda: engine.generate([[1]], 1, Sampling(2))):
        with pytest.raises(ConfigError, match="a sync was cut short"):
            act()
    sync(model, engine, "merged", 2)
    assert differences(engine, model) < 1e-4


class BreakingStream:
    def __init__(self, stream):
        self._stream = stream
        self.version = stream.version

    def check_expected(self, *arguments):
        self._stream.check_expected(*arguments)

    def __iter__(self):
        for number, pair in enumerate(self._stream):
            if number == 5:
                raise TypeError("the reader fails")
            yield pair
