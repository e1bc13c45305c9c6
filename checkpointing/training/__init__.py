"""A small native trainer: what the recipes are made of."""

from checkpointing.training.batches import Batch, BatchLoader
from checkpointing.training.components import instantiate
from checkpointing.training.data import InstructDataset, demo_dataset
from checkpointing.training.decoder import TransformerDecoder, build_decoder, empty_decoder
from checkpointing.training.distributed import (
    DataShare,
    data_share,
    first_rank_first,
    from_first_rank,
    is_first_rank,
    process_group,
)
from checkpointing.training.lora import (
    DoRALinear,
    LoRALinear,
    adapter_config_from_recipe,
    adapter_state_dict,
    add_adapter,
    base_state_dict,
    check_same_adapter,
    init_adapter,
    load_adapter,
)
from checkpointing.training.metric_logging import (
    DiskLogger,
    MetricLogger,
    NullLogger,
    StdoutLogger,
    TensorBoardLogger,
    WandBLogger,
)
from checkpointing.training.options import TrainingOptions
from checkpointing.training.parallel import make_mesh, materialize, parallelize
from checkpointing.training.quantize import base_rounding, quantize_base
from checkpointing.training.report import next_steps
from checkpointing.training.resume_check import check_resume
from checkpointing.training.rng import set_seed, set_seed_of_share
from checkpointing.training.rows import DatasetError
from checkpointing.training.run_record import run_record
from checkpointing.training.schedule import (
    Schedule,
    get_cosine_schedule_with_warmup,
    make_schedule,
)
from checkpointing.training.settings import (
    get_device,
    get_dtype,
    get_seed,
    require,
    training_options,
)
from checkpointing.training.signals import StoppedBySignal
from checkpointing.training.tokenizer import ChatTokenizer
from checkpointing.training.trainer import NonFiniteLossError, Trainer

__all__ = [
    "Batch",
    "BatchLoader",
    "ChatTokenizer",
    "DataShare",
    "DatasetError",
    "DiskLogger",
    "DoRALinear",
    "InstructDataset",
    "LoRALinear",
    "MetricLogger",
    "NonFiniteLossError",
    "NullLogger",
    "Schedule",
    "StdoutLogger",
    "StoppedBySignal",
    "TensorBoardLogger",
    "Trainer",
    "TrainingOptions",
    "TransformerDecoder",
    "WandBLogger",
    "adapter_config_from_recipe",
    "adapter_state_dict",
    "add_adapter",
    "base_rounding",
    "base_state_dict",
    "build_decoder",
    "check_resume",
    "check_same_adapter",
    "data_share",
    "demo_dataset",
    "empty_decoder",
    "first_rank_first",
    "from_first_rank",
    "get_cosine_schedule_with_warmup",
    "get_device",
    "get_dtype",
    "get_seed",
    "init_adapter",
    "instantiate",
    "is_first_rank",
    "load_adapter",
    "make_mesh",
    "make_schedule",
    "materialize",
    "next_steps",
    "parallelize",
    "process_group",
    "quantize_base",
    "require",
    "run_record",
    "set_seed",
    "set_seed_of_share",
    "training_options",
]
