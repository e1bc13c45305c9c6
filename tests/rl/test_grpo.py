"""The formula of GRPO, and the parts of its step, against hand calculation and transformers."""

import json
import math

import pytest
import torch
from omegaconf import OmegaConf

from checkpointing import AdapterConfig
from checkpointing.errors import ConfigError
from checkpointing.export.engines import Completion, Sampling
from checkpointing.rl.completion_batch import completion_batch, completion_logprobs
from checkpointing.rl.grpo import Objective, advantages, losses
from checkpointing.rl.grpo_step import GRPOStep
from checkpointing.rl.prompts import PromptDataset
from checkpointing.rl.reward_function import RewardError, RewardFunction
from checkpointing.rl.rewards import has_format, matches_answer, near_length
from checkpointing.training import ChatTokenizer, DatasetError, add_adapter, build_decoder
from checkpointing.training.adapter_switch import adapter_off
from tests.export.live import shake
from tests.training import peers
from tests.training.tiny_tokenizer import write_tokenizer

# Advantages


def test_advantages_are_those_of_a_calculation_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 4.0, 6.0, 8.0]], dtype=torch.float64)
    # Means 1 and 5; sums of squares 6 and 20, divided by 3.
    centred = [[0.0, -1.0, -1.0, 2.0], [-3.0, -1.0, 1.0, 3.0]]
    stds = [math.sqrt(6 / 3), math.sqrt(20 / 3)]
    expected = [[x / (std + 1e-4) for x in row] for row, std in zip(centred, stds, strict=True)]
    assert advantages(rewards).tolist() == [pytest.approx(row, rel=1e-12) for row in expected]
    assert advantages(rewards, False).tolist() == [pytest.approx(row) for row in centred]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e9])
def test_a_group_of_equal_rewards_has_no_advantage(reward, normalize):
    for size in (2, 3, 7):
        rewards = torch.tensor([[reward] * size, list(range(size))], dtype=torch.float64)
        found = advantages(rewards, normalize)
        assert (found[0] == 0).all()
        assert found.isfinite().all() and found[1].any()


# The loss

# Three completions of 3, 2 and 4 tokens in rows of 5: where they begin differs.
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
ADVANTAGE = [1.3, -0.7, -2.1]
MOST = 11


def example():
    """Log-probabilities by three models; ratios on both sides of what is clipped."""
    generator = torch.Generator().manual_seed(2)
    sampled = torch.randn(MASK.shape, generator=generator, dtype=torch.float64) - 3
    policy = sampled + 0.4 * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)
    reference = sampled + 0.3 * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), sampled, reference


def by_hand(policy, sampled, reference, objective):
    """Loss of each completion and its gradient, token by token."""
    total, gradient = [], torch.zeros_like(policy)
    clipped = torch.zeros_like(MASK)
    low, high = 1 - objective.clip_epsilon, 1 + objective.clip_epsilon
    for row, a in enumerate(ADVANTAGE):
        places = [t for t in range(MASK.shape[1]) if MASK[row, t]]
        length = len(places) if objective.normalize_by_length else MOST
        value = 0.0
        for t in places:
            p, s, r = (float(each[row, t]) for each in (policy, sampled, reference))
            q = math.exp(p - s)
            is_clipped = (a > 0 and q > high) or (a < 0 and q < low)
            k3 = math.exp(r) / math.exp(p) - math.log(math.exp(r) / math.exp(p)) - 1
            gain = a * min(max(q, low), high) if is_clipped else a * q
            value += (gain - objective.kl_coeff * k3) / length
            d_gain = 0.0 if is_clipped else a * q
            d_k3 = 1 - math.exp(r - p)
            gradient[row, t] = -(d_gain - objective.kl_coeff * d_k3) / length
            clipped[row, t] = is_clipped
        total.append(-value)
    return total, gradient, clipped


@pytest.mark.parametrize("normalize_by_length", [True, False])
@pytest.mark.parametrize("kl_coeff", [0.0, 0.3])
def test_the_loss_and_its_gradient_are_those_of_the_formula(kl_coeff, normalize_by_length):
    objective = Objective(0.15, kl_coeff, True, normalize_by_length)
    policy, sampled, reference = example()
    found = losses(
        policy,
        sampled,
        reference,
        MASK,
        torch.tensor(ADVANTAGE, dtype=torch.float64),
        objective,
        MOST,
    )
    total, gradient, clipped = by_hand(policy.detach(), sampled, reference, objective)
    assert found.loss.tolist() == pytest.approx(total, rel=1e-9)
    found.loss.sum().backward()
    assert torch.allclose(policy.grad, gradient, rtol=1e-9, atol=1e-12)
    assert torch.equal(found.clipped, clipped)
    assert 0 < clipped.sum() < MASK.sum()
    assert (found.kl[MASK] > 0).all() and not found.kl[~MASK].any()


@pytest.mark.parametrize(
    ("advantage", "ratio", "gain", "slope"),
    [
        (2.0, 1.0, 2.0, 2.0),
        (2.0, 1.5, 2.4, 0.0),  # good, and likelier already
        (2.0, 0.5, 1.0, 1.0),  # good, and less likely: not clipped
        (-2.0, 0.5, -1.6, 0.0),  # bad, and less likely already
        (-2.0, 1.5, -3.0, -3.0),  # bad, and likelier: not clipped
        (0.0, 1.5, 0.0, 0.0),
    ],
)
def test_only_what_went_far_enough_is_clipped(advantage, ratio, gain, slope):
    policy = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    found = losses(policy, zero, zero, mask, torch.tensor([advantage]), Objective(0.2, 0.0), 5)
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(-gain, abs=1e-6)
    assert policy.grad.item() == pytest.approx(-slope, abs=1e-6)
    assert found.clipped.item() == (slope == 0 and advantage != 0)


def test_a_completion_without_tokens_has_no_loss():
    policy = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3])
    zero = torch.zeros(2, 3)
    found = losses(policy, zero, zero, mask, torch.tensor([1.0, 2.0]), Objective(), 5)
    assert found.loss.tolist() == [0.0, -2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"clip_epsilon": 0}, "clip_epsilon=0"), ({"kl_coeff": -0.1}, "kl_coeff=-0.1")],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Objective(**settings)


# Log-probabilities


@pytest.fixture(scope="module")
def policy():
    """A native model with an adapter, and transformers' model of its base."""
    peer = peers.hf_model(peers.config())
    model = build_decoder(peers.config(), peers.native_weights(peer, peers.config()), torch.float32)
    add_adapter(model, AdapterConfig(4, 6, ("q_proj", "w2")))
    return model, peer


def drawn():
    prompts = [(5, 9, 2, 30), (7,), (1, 2, 3)]
    tokens = [(4, 8), (90, 91, 92, 93, 94), (6, 1, 6)]
    return prompts, [Completion(each, (0.0,) * len(each), 0) for each in tokens]


def test_log_probabilities_are_those_of_transformers_for_each_row_alone(policy):
    model, peer = policy
    prompts, completions = drawn()
    batch = completion_batch(prompts, completions, torch.device("cpu"))
    assert batch.lengths.tolist() == [2, 5, 3]
    with torch.no_grad():
        found = completion_logprobs(model, batch)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids = torch.tensor([[*prompt, *completion.tokens]])
            wide = peer(ids).logits[0].log_softmax(-1)
            expected = [
                wide[len(prompt) - 1 + place, token].item()
                for place, token in enumerate(completion.tokens)
            ]
            assert found[row][batch.mask[row]].tolist() == pytest.approx(expected, abs=1e-5)
            assert not found[row][~batch.mask[row]].any()


def test_the_divergence_is_zero_as_long_as_the_adapter_is_zero(policy):
    model, _ = policy
    batch = completion_batch(*drawn(), torch.device("cpu"))
    values = []
    for _ in range(2):
        with torch.no_grad():
            now = completion_logprobs(model, batch)
            with adapter_off(model):
                reference = completion_logprobs(model, batch)
        advantage = torch.tensor([1.0, -1.0, 0.5])
        values.append(losses(now, now, reference, batch.mask, advantage, Objective(), 5).kl)
        shake(model)
    assert not values[0].any()
    assert (values[1][batch.mask] > 0).all()


# Prompts


def test_prompts_end_where_the_assistant_begins_and_keep_their_row(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path))
    rows = [
        {"prompt": "Name a colour.", "answer": "red"},
        {"instruction": "Name", "input": "a colour.", "output": "red"},
        {
            "messages": [
                {"role": "system", "content": "Rhyme."},
                {"role": "user", "content": "red"},
                {"role": "assistant", "content": "bed"},
                {"role": "user", "content": "blue"},
                {"role": "assistant", "content": "true"},
            ]
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = PromptDataset(tokenizer, tmp_path / "rows.jsonl")
    system = "<|start|>system\nBe brief.<|end|>\n"
    assert [found[n].text for n in range(3)] == [
        f"{system}<|start|>user\nName a colour.<|end|>\n<|start|>assistant\n",
        f"{system}<|start|>user\nName\n\na colour.<|end|>\n<|start|>assistant\n",
        "<|start|>system\nRhyme.<|end|>\n<|start|>user\nred<|end|>\n<|start|>assistant\nbed<|end|>\n"
        "<|start|>user\nblue<|end|>\n<|start|>assistant\n",
    ]
    assert [found[n].row for n in range(3)] == rows
    assert tokenizer.decode(list(found[0].tokens)) == found[0].text
    assert tokenizer.end_id == 2
    shortest = min(len(found[n].tokens) for n in range(3))
    with pytest.warns(UserWarning, match="2 of 3 prompts are left out"):
        assert len(PromptDataset(tokenizer, tmp_path / "rows.jsonl", shortest)) == 1
    with pytest.warns(UserWarning), pytest.raises(DatasetError, match="no prompt is left"):
        PromptDataset(tokenizer, tmp_path / "rows.jsonl", 3)


def test_the_fingerprint_tells_other_answers_and_another_order(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path))
    rows = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}]
    variants = [rows, rows[::-1], [{**rows[0], "answer": 3}, rows[1]], rows]
    prints = []
    for variant in variants:
        (tmp_path / "rows.json").write_text(json.dumps(variant))
        prints.append(PromptDataset(tokenizer, tmp_path / "rows.json").fingerprint())
    assert prints[0] == prints[3] and len(set(prints)) == 3


def test_a_bad_row_is_named(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "fine"}\n{"prompt": 7}\n')
    with pytest.raises(DatasetError, match="line 2: `prompt` must be a text"):
        PromptDataset(tokenizer, tmp_path / "rows.jsonl")


# Rewards


def test_the_rewards_that_come_with_the_package():
    rows = [{"answer": "1,234"}, {"answer": -5}, {"answer": "#### 7.50"}]
    texts = ["so it is 12 * 3 = 1234.", "minus -5 or 6", "7.5"]
    assert matches_answer(["p"] * 3, texts, rows) == [1.0, 0.0, 1.0]
    assert matches_answer(["p"], ["no number"], [{"n": 3}], key="n") == [0.0]
    lengths = near_length(["p"] * 4, ["", "a b", "a b c d", "a b c d e f g h"], [{}] * 4, words=4)
    assert lengths == [0.0, 0.5, 1.0, 0.5]
    texts = ["<a>x\ny</a>", "<a>x</a> and more", "x"]
    assert has_format(["p"] * 3, texts, [{}] * 3, pattern="<a>.*</a>") == [1.0, 0.0, 0.0]


def reward(name, **arguments):
    node = {"_component_": f"tests.rl.grpo_runs.{name}", **arguments}
    return RewardFunction(OmegaConf.create(node))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_too_few", r"grpo_runs\.one_too_few returned 2 numbers for 3 completions"),
        ("not_finite", r"grpo_runs\.not_finite returned nan for completion 2, '33'"),
        ("raising", r"grpo_runs\.raising raised KeyError: 'no such key'"),
    ],
)
def test_a_reward_function_that_fails_is_named(name, message):
    with pytest.raises(RewardError, match=message):
        reward(name)(["p"] * 3, ["1", "a2", "33"], [{}] * 3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("without_rows", {}, r"without_rows\(prompts, completions\) cannot be called"),
        ("share_of_digits", {"words": 3}, "share_of_digits.*words"),
        ("share_of_digit", {}, "did you mean 'share_of_digits'"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused_at_once(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        reward(name, **arguments)


def test_a_reward_gets_the_arguments_of_the_config():
    node = {"_component_": "checkpointing.rl.rewards.near_length", "words": 2}
    assert RewardFunction(OmegaConf.create(node))(["p"], ["one"], [{}]) == [0.5]
    with pytest.raises(ConfigError, match="name a function"):
        RewardFunction(OmegaConf.create({"words": 2}))


def test_a_policy_with_dropout_is_refused(policy):
    _, peer = policy
    config = peers.config()
    model = build_decoder(config, peers.native_weights(peer, config), torch.float32)
    add_adapter(model, AdapterConfig(4, 6, ("q_proj", "w2"), dropout=0.1))
    with pytest.raises(ConfigError, match=r"model\.lora_dropout=0\.1: must be 0"):
        GRPOStep(model, None, None, None, None, Sampling(5), Objective(), seed=1, group_size=3)
