r"""What makes a mixer metaplastic: evidence beta beside its write, and a prior (arXiv 2602.09075, Sec. 2.3-2.4).

    beta  = sigmoid(W_b2 W_b1 x) softplus(b_scale) s        [H, V]      s: strength of the write, one per head
    prior = exp(prior_log)                                  [H]         not trained by default

The write w does not depend on beta (the paper's v*): turning b_scale down leads to the additive rule.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.evidence import write_and_evidence
from ..rules import PalimpsaState
from .mixer import Mixer, PalimpsaGates
from .options import check_flags, check_positive, check_range, check_sizes


class Evidence(Mixer):
    """Mixed into an additive mixer, gives it Palimpsa's rule; the weights of the former load into the latter.

    Args (beside those of the additive mixer):
        beta_rank: rank of the evidence projection; None: key_size.
        beta_scale_range: the parameter b_scale (it enters through softplus) is drawn uniformly from it: (1, 1) from
            scratch, (0.1, 1) for fine-tuning an ablation; far below 0 the layer is its ablation.
        prior: the prior precision of every head; a constant unless ``train_prior``.
    """

    operator = "palimpsa"
    memory_type = PalimpsaState
    no_weight_decay = (*Mixer.no_weight_decay, "b_scale", "prior_log")

    def __init__(
        self,
        *args,
        beta_rank: int | None = None,
        beta_scale_range: tuple[float, float] = (1.0, 1.0),
        prior: float = 1.0,
        train_prior: bool = False,
        **kwargs,
    ):
        check_positive(prior=prior)
        check_flags(train_prior=train_prior)
        if beta_rank is not None:
            check_sizes(beta_rank=beta_rank)
        self._beta_rank = beta_rank
        self._beta_scale_range = check_range("beta_scale_range", beta_scale_range, -math.inf)
        self._prior, self._train_prior = prior, train_prior
        super().__init__(*args, **kwargs)

    def _init_rule(self) -> None:
        rank = self.key_size if self._beta_rank is None else self._beta_rank
        self.beta_down = nn.Linear(self.hidden_size, rank, bias=False)
        self.beta_up = nn.Linear(rank, self.num_heads * self.value_size, bias=False)
        self.beta_up.uniform_range = rank**-0.5  # stays so in a language model (where other weights are normal)
        self.b_scale = nn.Parameter(torch.empty(self.num_heads))
        prior_log = torch.empty(self.num_heads)
        if self._train_prior:
            self.prior_log = nn.Parameter(prior_log)
        else:  # a buffer: loaders make every parameter trainable
            self.register_buffer("prior_log", prior_log)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.b_scale, self._beta_scale_range[0], self._beta_scale_range[1])
        nn.init.constant_(self.prior_log, math.log(self._prior))

    def _rule_inputs(self, x: Tensor, q: Tensor, k: Tensor, u: Tensor, strength: Tensor, g: Tensor) -> PalimpsaGates:
        evidence = self.beta_up(self.beta_down(x)).unflatten(-1, (self.num_heads, self.value_size))
        w, beta = write_and_evidence(u, evidence, strength, F.softplus(self.b_scale), self.around)
        return PalimpsaGates(q, k, w, beta, g, self.prior_log.to(g.dtype).exp())
