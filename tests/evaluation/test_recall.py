import pytest
import torch

from metaplastic.evaluation import recall, steps_until
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.tasks import mqar


class Oracle(torch.nn.Module):
    """A stand-in with a causal language model's interface, which answers from the row itself; some answers wrong."""

    def __init__(self, wrong_beyond: int):
        super().__init__()
        self.head, self.wrong_beyond, self.device = torch.nn.Identity(), wrong_beyond, torch.device("cpu")

    def base_model(self, input_ids, use_cache):
        answers = mqar.solve(input_ids).clamp(min=0)
        answers[:, self.wrong_beyond :] = 0
        return (torch.nn.functional.one_hot(answers, 64).float(),)

    def get_output_embeddings(self):
        return self.head


@pytest.fixture(scope="module")
def rows():
    return mqar.generate(mqar.MQARConfig(64, 8, vocabulary=64), 50, seed=3)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_oracle(rows, batch_size):
    found = recall(Oracle(1000), rows, batch_size=batch_size)
    assert found["accuracy"] == 1.0
    assert found["queries"] == 400
    assert sum(b["queries"] for b in found["by_age"]) == 400
    assert all(a["distance"] < b["distance"] for a, b in zip(found["by_age"], found["by_age"][1:], strict=False))


def test_wrong_answers_count_where_they_are(rows):
    found = recall(Oracle(40), rows)
    expected = (rows.query_positions < 40).float().mean().item()
    assert found["accuracy"] == pytest.approx(expected)
    assert found["by_age"][0]["accuracy"] > found["by_age"][-1]["accuracy"]


def test_a_model_at_chance_and_its_mode_restored(rows):
    model = MetaplasticForCausalLM(MetaplasticConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).train()
    found = recall(model, rows)
    assert found["accuracy"] < 0.2
    assert model.training
    with pytest.raises(ValueError, match="causal language model"):
        recall(model.model, rows)


def test_steps_until_the_mean_of_the_curves_is_there():
    def curve(*accuracies):
        return [{"step": 10 * (i + 1), "accuracy": a} for i, a in enumerate(accuracies)]

    assert steps_until([curve(0.1, 0.9, 0.8, 1.0)], 0.9) == 20
    assert steps_until([curve(0.1, 0.95, 1.0), curve(0.2, 0.7, 0.9)], 0.9) == 30
    assert steps_until([curve(0.1, 0.2)], 0.9) is None
    with pytest.raises(ValueError, match=r"curves must be measured at the same steps, got steps \[10, 11\]"):
        steps_until([curve(0.1), [{"step": 11, "accuracy": 0.1}]], 0.9)
