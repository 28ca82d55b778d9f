"""How a run is computed, whatever its data: what is computed again, the form of its loss, the length of its rows."""

import json

import pytest
import torch
from safetensors.torch import load_file

from metaplastic.ops import cross_entropy
from metaplastic.training import train

from .test_run import OWN_SIZES, Stop, assert_same_run
from .test_streaming import stop_at


def test_what_is_computed_again_decides_nothing(tiny, tmp_path, monkeypatch, undisturbed):
    """A run may go on with another choice."""
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            train(tiny(checkpointing="full"), tmp_path / "run")
    train(tiny(checkpointing="selective"), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.skipif(cross_entropy.choose("cpu", torch.float32) is None, reason="needs PyTorch 2.13")
def test_a_fused_run_is_a_plain_one_within_rounding(tiny, tmp_path, undisturbed):
    found = train(tiny(loss="fused"), tmp_path / "run")["measurements"]
    plain = json.loads((undisturbed / "results.json").read_text())["measurements"]
    assert found["eval_loss"] != plain["eval_loss"]  # it is another sum
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-4)
    assert found["eval_tokens"] == plain["eval_tokens"]
    assert (found["loss_fused_by"], plain["loss_fused_by"]) == ("torch", None)  # what really ran
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert not any("loss" in name for name in config)


def test_a_loss_that_cannot_be_fused_claims_no_folder(tiny, tmp_path):
    with pytest.raises(ValueError, match="loss: got 'fused', which cannot be here: .*bfloat16"):
        train(tiny(loss="fused", bf16=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_saved_model_goes_on_with_longer_rows(tiny, tmp_path):
    """Of every kind of memory, and of attention: nothing in a model depends on the length it was trained with."""
    mixers = "palimpsa_d,mamba2,gated_deltanet,bayesian,attention"
    short = tiny(mixer=mixers, layers=5, steps=1, accumulation=1, eval_every=0, save_every=0)
    train(short, tmp_path / "short")
    long = tiny(
        model=str(tmp_path / "short"),
        block_length=256,
        batch_size=1,
        steps=1,
        accumulation=1,
        warmup=0,
        save_every=0,
        **OWN_SIZES,
    )
    result = train(long, tmp_path / "long")["measurements"]
    assert result["tokens_seen"] == 256 and result["eval_tokens"] > 200 and result["eval_loss"] < 6
    before, after = (load_file(tmp_path / n / "final" / "model.safetensors") for n in ("short", "long"))
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in after.items()}
    assert not all(torch.equal(before[name], after[name]) for name in before)
