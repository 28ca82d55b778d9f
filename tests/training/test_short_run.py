"""Rung 6 of the numerics ladder, quick version: two-pair recall is learnt by both mixers in under a minute."""

import pytest

from metaplastic.recipes.mqar import RecallRun, run_recall


@pytest.mark.parametrize("mixer", ["palimpsa_d", "palimpsa_d_additive"])
def test_easy_recall_is_learnt(mixer, tmp_path):
    run = RecallRun(
        mixer=mixer, sequence_length=12, pairs=2, vocabulary=16, hidden_size=32, heads=2, key_size=8, value_size=8,
        steps=300, train_rows=9600, test_rows=400, measure_every=300,
    )  # fmt: skip
    assert run_recall(run, tmp_path, progress=False)["measurements"]["accuracy"] > 0.9
