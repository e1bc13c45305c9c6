import pytest
import torch

from checkpointing.training import ChatTokenizer
from tests.training.tiny_tokenizer import write_tokenizer


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Sums are in another order, and so not equal bit for bit, on another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return ChatTokenizer(tokenizer_dir)


@pytest.fixture
def not_compiled():
    """torchao compiles its step for every shape, which would take most of the time of a test."""
    with torch.compiler.set_stance("force_eager"):
        yield
