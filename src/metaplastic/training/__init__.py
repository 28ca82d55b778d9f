"""Fitting: the Hugging Face Trainer with exact evaluation, atomic checkpoints and the right weight-decay groups."""

from .checkpoint import last_checkpoint
from .config import TrainConfig
from .run import train
from .trainer import MetaplasticTrainer, training_arguments

__all__ = ["MetaplasticTrainer", "TrainConfig", "last_checkpoint", "train", "training_arguments"]
