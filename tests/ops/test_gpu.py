"""The backends on a CUDA device, against the float64 reference on the CPU. Run by hand: pytest -m gpu."""

import pytest
import torch

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.ops import accuracy, debug_checks, dispatch
from metaplastic.ops.accuracy import Case

pytestmark = pytest.mark.gpu
PAIRS = [(op, backend) for op in dispatch.BACKENDS for backend in dispatch.on_device(op, "cuda")]
CASES = (
    *accuracy.CASES,
    Case(length=0),
    Case(length=1),
    Case(batch=1, length=300, offsets=(0, 0, 130, 131, 280), decay="mixed"),
)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(op, backend, dtype, case):
    if (reason := dispatch.reason_against(op, backend, "cuda", dtype)) is not None:
        pytest.skip(reason)
    errors = accuracy.measure(op, backend, case, dtype, "cuda")
    assert not accuracy.failures(op, backend, errors, dtype), errors


@pytest.mark.filterwarnings("ignore:.*slow 'chunked' backend")
@pytest.mark.parametrize("mixer", MIXERS)
def test_model(mixer):
    torch.manual_seed(0)
    model = MetaplasticForCausalLM(
        MetaplasticConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, mixers=mixer, intermediate_size=64)
    ).eval()
    ids = torch.randint(1, 50, (2, 90))
    expected = model(ids, labels=ids)
    on_gpu = model.cuda()
    found = on_gpu(ids.cuda(), labels=ids.cuda())
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=1e-3)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    out = on_gpu.generate(ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    alone = on_gpu.generate(ids[:1, 7:].cuda(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(out[:1, 7:], alone)


def test_value_checks_only_on_request():
    inputs = accuracy.example("additive", Case(), torch.float32, "cuda")
    inputs["g"] = inputs["g"].detach() + 5
    accuracy.OPERATORS["additive"][0](**inputs)
    debug_checks(True)
    try:
        with pytest.raises(ValueError, match="g must be <= 0"):
            accuracy.OPERATORS["additive"][0](**inputs)
    finally:
        debug_checks(False)
