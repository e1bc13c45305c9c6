"""Servers of vLLM and SGLang: they compute what the model computes, and keep no old versions.

SGLang's is one that answers as its documentation says; vLLM's is the real one.
"""

import json
import re
import socket

import pytest
import torch
from safetensors.torch import load_file

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.errors import ConfigError, RemoteError
from checkpointing.export import adapter_stream, merged_stream
from checkpointing.export.engines import Sampling, sync
from checkpointing.export.engines.dialects import VLLM
from checkpointing.export.engines.json_server import JsonServer
from checkpointing.export.engines.server_engine import ServerEngine
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.adapter_switch import adapter_off
from tests.export.live import KINDS, live_model, shake
from tests.export.sglang_server import MODEL, sglang_server
from tests.export.vllm_environment import vllm_environment
from tests.export.vllm_server import vllm_server
from tests.families.variants import SIZES, random_model
from tests.peers.environment import build_wheel
from tests.training.tiny_tokenizer import write_tokenizer

ADAPTER = AdapterConfig(4, 6, ("q_proj", "v_proj", "output_proj", "w1", "w2"))
SEQUENCES = [[5, 9, 3, 77, 30, 4, 120], [8, 2, 8]]


@pytest.fixture
def model(tmp_path):
    return live_model(tmp_path / "base", "llama", ADAPTER)


@pytest.fixture
def server(tmp_path, model):
    with sglang_server(tmp_path / "base") as running:
        yield running


def engine_of(server, tmp_path, **options):
    return ServerEngine(server.url, "sglang", None, tmp_path / "adapters", **options)


def native_logprobs(model, sequences=SEQUENCES):
    found = []
    with torch.no_grad():
        for sequence in sequences:
            values = model(torch.tensor([sequence]))[0, :-1].double().log_softmax(-1)
            found.append(values.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0])
    return found


def check_same(engine, model, tolerance=1e-5):
    for found, expected in zip(engine.logprobs(SEQUENCES), native_logprobs(model), strict=True):
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert (found - expected).abs().max() < tolerance


def directories(tmp_path):
    return {path.name for path in (tmp_path / "adapters").glob("*/*")}


def test_the_server_computes_what_the_model_computes_after_every_sync(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    with torch.no_grad(), adapter_off(model):
        check_same(engine, model)
    assert (engine.version, engine.served, engine.request_model) == (-1, None, MODEL)
    names = []
    for version in (1, 2, 5):
        shake(model, version)
        sync(model, engine, "adapter", version, base="tiny/base")
        check_same(engine, model)
        names.append(engine.served)
        assert engine.version == version
        assert list(server.adapters) == [engine.served]
        assert directories(tmp_path) == {engine.served}
        assert engine.request_model == f"{MODEL}:{engine.served}"
    assert len(set(names)) == 3 and engine.replaced == (names[1],)
    # An adapter that was served before has its name again, and so what was computed with it.
    shake(model, 1)
    sync(model, engine, "adapter", 6, base="tiny/base")
    assert engine.served == names[0]
    check_same(engine, model)
    engine.close()
    assert server.adapters == {} and directories(tmp_path) == set()


def test_what_is_written_is_the_stream(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    stream = sync(model, engine, "adapter", 3, base="tiny/base")
    expected = adapter_stream(model, "tiny/base")
    place = server.adapters[engine.served]
    found = load_file(f"{place}/adapter_model.safetensors")
    assert {n: t.tolist() for n, t in expected} == {n: t.tolist() for n, t in found.items()}
    with open(f"{place}/adapter_config.json") as file:
        assert json.load(file) == stream.adapter_config
    assert stream.is_complete


def test_a_new_process_replaces_what_an_earlier_one_left(tmp_path, model, server):
    sync(model, engine_of(server, tmp_path), "adapter", 7, base="tiny/base")
    other = engine_of(server, tmp_path, name="policy-2")
    sync(model, other, "adapter", 1, base="tiny/base")
    assert len(server.adapters) == 2
    shake(model, 8)
    engine = engine_of(server, tmp_path)
    sync(model, engine, "adapter", 1, base="tiny/base")
    assert set(server.adapters) == {engine.served, other.served} == directories(tmp_path)
    # The same again is there already.
    asked = len(server.asked)
    again = engine_of(server, tmp_path)
    sync(model, again, "adapter", 1, base="tiny/base")
    assert again.served == engine.served and again.replaced == ()
    assert "/load_lora_adapter" not in [path for path, _ in server.asked[asked:]]
    check_same(again, model)


def test_completions_are_drawn_by_the_weights_that_are_served(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    sync(model, engine, "adapter", 4, base="tiny/base")
    prompts = [[5, 9, 3], [77]]
    sampling = Sampling(6, temperature=0.7, seed=11)
    found = engine.generate(prompts, 3, sampling)
    assert [len(group) for group in found] == [3, 3]
    for prompt, group in zip(prompts, found, strict=True):
        assert len({completion.tokens for completion in group}) == 3
        for completion in group:
            assert len(completion.tokens) == 6 and completion.version == 4
            (expected,) = native_logprobs(model, [[*prompt, *completion.tokens]])
            written = torch.tensor(completion.logprobs)
            assert (written - expected[len(prompt) - 1 :]).abs().max() < 1e-5
    assert engine.generate(prompts, 3, sampling) == found
    assert engine.generate(prompts, 3, Sampling(6, temperature=0.7, seed=50)) != found
    end = found[0][0].tokens[2]
    until = Sampling(6, temperature=0.7, seed=11, stop_token_ids=(end,))
    whole = found[0][0].tokens
    assert engine.generate(prompts[:1], 1, until)[0][0].tokens == whole[: whole.index(end) + 1]
    asked = [body["sampling_params"] for path, body in server.asked if path == "/generate"]
    drawn = [each for each in asked if each["max_new_tokens"]]
    assert {each["ignore_eos"] for each in drawn if not each["stop_token_ids"]} == {True}
    assert {each["ignore_eos"] for each in drawn if each["stop_token_ids"]} == {False}


def refused(engine, model, version=2):
    served, adapters = engine.served, engine.version
    with pytest.raises(RemoteError) as caught:
        sync(model, engine, "adapter", version, base="tiny/base")
    assert (engine.served, engine.version) == (served, adapters)
    return str(caught.value)


def test_what_the_server_refuses_is_told_and_the_old_version_stays(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    sync(model, engine, "adapter", 1, base="tiny/base")
    first, before = engine.served, native_logprobs(model)
    shake(model, 9)
    server.max_rank = 3
    message = refused(engine, model)
    assert "400: LoRA adapter policy-" in message and "with rank 4 is incompatible" in message
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules q_proj" in message
    assert str(tmp_path / "adapters") in message
    assert list(server.adapters) == [first] and directories(tmp_path) == {first}
    for found, expected in zip(engine.logprobs(SEQUENCES), before, strict=True):
        assert (found - expected).abs().max() < 1e-5
    server.max_rank, server.lists = 8, False
    assert "is not in /v1/models" in refused(engine, model)


def test_an_older_version_that_stays_loaded_is_told(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    sync(model, engine, "adapter", 1, base="tiny/base")
    shake(model, 9)
    server.unloads = False
    with pytest.raises(RemoteError, match=r"was not unloaded.*cannot be unloaded"):
        sync(model, engine, "adapter", 2, base="tiny/base")
    assert engine.version == 2
    check_same(engine, model)
    server.unloads = True
    shake(model, 10)
    sync(model, engine, "adapter", 3, base="tiny/base")
    assert list(server.adapters) == [engine.served] and len(engine.replaced) == 2


def test_the_server_may_see_the_directory_by_another_path(tmp_path, model, server):
    (tmp_path / "mounted").symlink_to(tmp_path / "adapters")
    engine = engine_of(server, tmp_path, server_directory=tmp_path / "mounted")
    sync(model, engine, "adapter", 1, base="tiny/base")
    assert server.adapters[engine.served].startswith(f"{tmp_path}/mounted/")
    check_same(engine, model)
    wrong = engine_of(server, tmp_path, name="wrong", server_directory="/nowhere")
    assert "it must see /nowhere/" in refused(wrong, model)


SERVED_BY_NONE = {
    "dora": "DoRA",
    "modules trained whole": "modules_to_save",
}


@pytest.mark.parametrize("kind", SERVED_BY_NONE)
def test_what_no_engine_computes_is_refused_before_anything_is_written(tmp_path, kind):
    model = live_model(tmp_path / "base", "llama", KINDS[kind])
    with sglang_server(tmp_path / "base") as server:
        engine = engine_of(server, tmp_path)
        with pytest.raises(ConfigError, match=SERVED_BY_NONE[kind]):
            sync(model, engine, "adapter", 1, base="tiny/base")
        assert server.adapters == {} and directories(tmp_path) == set()


def test_the_exact_form_is_refused_where_engines_would_compute_otherwise(tmp_path):
    model = live_model(tmp_path / "base", "llama", KINDS["rslora, patterns"])
    with sglang_server(tmp_path / "base") as server:
        engine = engine_of(server, tmp_path)
        exact = adapter_stream(model, "tiny/base", form="exact", version=1)
        with pytest.raises(ConfigError, match=r"use_rslora and rank_pattern.*portable"):
            engine.load_adapter(exact)
        sync(model, engine, "adapter", 1, base="tiny/base")
        check_same(engine, model)


def test_vllm_that_does_not_know_the_request_is_told(tmp_path, model, server):
    server.owner = "vllm"
    engine = ServerEngine(server.url, None, None, tmp_path / "adapters")
    message = refused(engine, model)
    assert "404" in message and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in message
    assert "--max-lora-rank 8 or more" in message and directories(tmp_path) == set()


def test_scores_that_are_no_raw_logprobs_are_refused():
    answers = [
        {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [value]}}]}
        for token, value in ((9, -0.5), (3, -2.25))
    ]
    assert VLLM().scores(answers, [5, 9, 3]) == [-0.5, -2.25]
    with pytest.raises(ValueError, match="other tokens"):
        VLLM().scores(answers, [5, 9, 4])
    for answer in answers:
        # As if what was allowed had been all there is.
        answer["choices"][0]["logprobs"]["token_logprobs"] = [0.0]
    with pytest.raises(ValueError, match="--logprobs-mode raw_logprobs"):
        VLLM().scores(answers, [5, 9, 3])


def test_merged_weights_are_refused_with_what_can_be_done(tmp_path, model, server):
    engine = engine_of(server, tmp_path)
    with pytest.raises(ConfigError, match=r"tune export --merged --to dir.*update_weights"):
        sync(model, engine, "merged", 1)
    with pytest.raises(ConfigError, match="no adapter"):
        engine.load_adapter(merged_stream(model))


def test_the_kind_is_asked_for_and_a_wrong_one_is_told(tmp_path, model, server):
    asked = ServerEngine(server.url, None, None, tmp_path)
    assert asked.name == f"SGLang at {server.url}"
    assert ServerEngine(f"{server.url}/v1/", None, MODEL, tmp_path).base == MODEL
    for arguments, message in {
        ("vllm", None): "is a server of SGLang, not vllm",
        ("vlm", None): "'vlm' is unknown",
        (None, "tiny/bass"): "serves no model 'tiny/bass', did you mean 'tiny/base'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            ServerEngine(server.url, *arguments, tmp_path)
    with pytest.raises(ConfigError, match="name: 'a:b'"):
        ServerEngine(server.url, None, None, tmp_path, name="a:b")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000", "http://", "http://host:port", "http://a@b"]
)
def test_other_urls_are_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="no server's URL"):
        ServerEngine(url, None, None, tmp_path)


def test_access_needs_the_key_and_other_servers_are_told_apart(tmp_path, model, server):
    server.api_key = "secret"
    with pytest.raises(RemoteError, match=r"access was refused \(401: Unauthorized\)"):
        engine_of(server, tmp_path)
    engine = engine_of(server, tmp_path, api_key="secret\n")
    sync(model, engine, "adapter", 1, base="tiny/base")
    check_same(engine, model)
    with pytest.raises(RemoteError, match=r"404: .*Not Found"):
        ServerEngine(f"{server.url}/else", "sglang", None, tmp_path, api_key="secret")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RemoteError, match=r"cannot be reached: .*refused"):
            ServerEngine(url, None, None, tmp_path)


VLLM_SIZES = {**SIZES, "hidden_size": 96, "head_dim": 32, "vocab_size": 303}


@pytest.fixture(scope="module")
def vllm_python(tmp_path_factory):
    return vllm_environment(build_wheel(tmp_path_factory.getbasetemp() / "wheel"))


@pytest.fixture(scope="module")
def vllm_base(tmp_path_factory):
    """A model with heads of a width that vLLM computes on a CPU."""
    directory = tmp_path_factory.mktemp("vllm") / "base"
    random_model("llama", VLLM_SIZES).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def vllm_model(base, config):
    checkpointer = FullModelHFCheckpointer(base)
    weights = checkpointer.load_checkpoint()["model"]
    model = build_decoder(checkpointer.model_config, weights, torch.float32)
    add_adapter(model, config)
    shake(model)
    return model.eval()


@pytest.mark.slow
def test_vllm_computes_what_the_model_computes_after_every_sync(tmp_path, vllm_python, vllm_base):
    model = vllm_model(vllm_base, ADAPTER)
    log = tmp_path / "log"
    with vllm_server(vllm_python, vllm_base, log, "--enable-lora", "--max-lora-rank", "8") as url:
        engine = ServerEngine(url, None, None, tmp_path / "adapters")
        assert (engine.name, engine.base_root) == (f"vLLM at {url}", str(vllm_base))
        with torch.no_grad(), adapter_off(model):
            check_same(engine, model, 1e-4)
        names = []
        for version in (1, 2):
            shake(model, version)
            sync(model, engine, "adapter", version, base=vllm_base)
            check_same(engine, model, 1e-4)
            names.append(engine.served)
            assert {card["id"] for card in models(url)} == {"tiny", engine.served}
            assert directories(tmp_path) == {engine.served} == {engine.request_model}
        assert engine.replaced == (names[0],) != (names[1],)

        prompts = [[5, 9, 3], [77]]
        sampling = Sampling(6, temperature=0.7, top_p=0.95, seed=11)
        found = engine.generate(prompts, 2, sampling)
        for prompt, group in zip(prompts, found, strict=True):
            assert len({completion.tokens for completion in group}) == 2
            for completion in group:
                (expected,) = native_logprobs(model, [[*prompt, *completion.tokens]])
                written = torch.tensor(completion.logprobs)
                assert len(written) == 6
                assert (written - expected[len(prompt) - 1 :]).abs().max() < 1e-4
        assert [[c.tokens for c in group] for group in engine.generate(prompts, 2, sampling)] == [
            [c.tokens for c in group] for group in found
        ]
        greedy = engine.generate(prompts, 1, Sampling(4, temperature=0.0))
        for prompt, (completion,) in zip(prompts, greedy, strict=True):
            text = list(prompt)
            for token in completion.tokens:
                with torch.no_grad():
                    assert token == model(torch.tensor([text]))[0, -1].argmax()
                text.append(token)
        whole = found[0][0].tokens
        until = Sampling(6, 0.7, 0.95, seed=11, stop_token_ids=(whole[2],))
        (stopped,) = engine.generate(prompts[:1], 1, until)[0]
        assert stopped.tokens == whole[: whole.index(whole[2]) + 1]

        served = engine.served
        large = vllm_model(vllm_base, AdapterConfig(9, 6, ("q_proj",)))
        message = refused(ServerEngine(url, "vllm", "tiny", tmp_path / "adapters"), large)
        assert re.search(
            r"vLLM at .*: the adapter was not loaded.*rank.*--max-lora-rank 16", message
        )
        assert {card["id"] for card in models(url)} == {"tiny", served}
        assert directories(tmp_path) == {served}
        check_same(engine, model, 1e-4)


@pytest.mark.slow
def test_vllm_that_takes_no_adapters_is_told(tmp_path, vllm_python, vllm_base):
    model = vllm_model(vllm_base, ADAPTER)
    with vllm_server(vllm_python, vllm_base, tmp_path / "log") as url:
        engine = ServerEngine(url, "vllm", None, tmp_path / "adapters")
        message = refused(engine, model)
        assert "LoRA is not enabled" in message
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in message and "--enable-lora" in message
        assert directories(tmp_path) == set()


def models(url):
    return JsonServer(url, None, 60.0).ask("/v1/models").content["data"]
