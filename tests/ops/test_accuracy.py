"""What a case asks of a backend: its variance, the gradient of its final state, its decays."""

import dataclasses

import torch

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case


def test_the_gradient_of_the_final_state_is_there_or_not():
    inputs = accuracy.example("palimpsa", Case(length=5), torch.float64)
    whole = accuracy.results("palimpsa", "chunked", inputs)
    output = accuracy.results("palimpsa", "chunked", inputs, final=False)
    assert whole.keys() == output.keys()
    assert torch.equal(whole["gradient of q"], output["gradient of q"])
    assert not torch.allclose(whole["gradient of w"], output["gradient of w"])


def test_a_case_without_variance():
    errors = accuracy.measure("palimpsa", "chunked", Case(length=5, variance=False), torch.float64)
    assert "variance" not in errors and "gradient of beta" in errors and max(errors.values()) < 1e-10


def test_uneven_decays():
    """Even heads forget little, odd ones anything."""
    g = accuracy.example("palimpsa", Case(decay="uneven", heads=4), torch.float64)["g"]
    assert g[:, :, ::2].min() >= -0.2 and g[:, :, 1::2].min() == -torch.inf


def test_what_was_expected_is_kept_for_one_case_alone():
    case = Case(length=4, decay="mixed")
    for other in (case, dataclasses.replace(case, final=False), dataclasses.replace(case, scale=0.3)):
        errors = accuracy.measure("palimpsa", "chunked", other, torch.float64)
        assert max(errors.values()) < 1e-10
