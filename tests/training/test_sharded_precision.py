"""A model that is sharded computes in what autocast chooses, as one that is not."""

import torch


def products(trainer):
    with trainer.compute_loss_context_manager():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_bf16_of_a_sharded_model(build):
    trainer = build(bf16=True)
    assert products(trainer) == torch.float32  # accelerate wraps the model
    trainer.is_fsdp_enabled = True
    assert products(trainer) == torch.bfloat16
    trainer = build()
    trainer.is_fsdp_enabled = True
    assert products(trainer) == torch.float32
