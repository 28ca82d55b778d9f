"""Steps of two processes with a GPU each are those of one, over NCCL; a run goes on on one and back on two."""

import pytest
import torch

from metaplastic.training import training_arguments

from ..evaluation.test_parallel_speed import DEBUG, check_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}"),
]


def test_one_process_takes_one_gpu(tmp_path):
    arguments = training_arguments(tmp_path, per_device_train_batch_size=3)
    assert arguments.n_gpu == 1 and arguments.train_batch_size == 3


def test_two_gpus(tmp_path):
    measured = check_all(tmp_path)
    for way in ("ddp", "fsdp2", "context"):
        assert "waits" in measured[way][f"{DEBUG}, waits"]
