"""The CUDA backward pass. Equations: backward.cu (float32, float64, variances), backward_tensor.cu (bf16).

Forward keeps nothing but its inputs. The state before every 64th token is made anew (:mod:`.states`), a group of spans
at a time so that no more than BUDGET bytes are taken at once; a kernel walks every span back from there.
A span is a sequence, or one of the pieces that a long sequence is cut into where few heads leave the device idle. The
gradient of a piece's last state comes from all later pieces: what each adds on its own (the kernel's job PULL) is found
first and carried from the last piece to the first, ``d_last = decay of the next piece * its d_last + what it adds``.
"""

import functools
import itertools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import nvrtc
from .. import chunked
from . import layout, walks
from .problem import CHUNK, Problem, cut, prepare
from .states import entry_states, write_chunk_states

BUDGET = 3 << 30  # bytes of states and partial sums at once, and no more than this part of the device's memory:
SHARE = 1 / 16
GROUP = 3 << 29  # bytes that states of whole sequences, and what blocks keep beside, may take at once
STATES = 320 << 20  # bytes of states that several groups may share: with few heads they take less time if made together
CACHE = 40 << 20  # bytes of states that stay in the cache until they are wanted
ALIKE = 6  # of a hundred tokens: heads whose steep decays (states.cu) differ by fewer take no turns


class Span(NamedTuple):
    start: int
    end: int
    sequence: int
    last: bool  # of its sequence


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    """Gradients of q, k, w, beta, g, prior and of both initial states (or None), each in the dtype of its input."""
    walk, problem = _choose(q, k, w, beta, g, prior, information, excess_precision, offsets, d_variance is not None)
    if walk is None:
        size = f"K = {q.shape[3]} in {str(q.dtype).removeprefix('torch.')}"
        warnings.warn(f"ops.palimpsa: no CUDA backward kernel takes {size}; the slow chunked one runs", stacklevel=2)
        return chunked.backward(
            d_output, d_variance, d_information, d_excess_precision,
            q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
        )  # fmt: skip
    keys, values = problem.sizes
    padding = (0, problem.shape[2] - values)
    d_output = _fit(d_output, problem.q.dtype, padding)
    d_variance = None if d_variance is None else _fit(d_variance, problem.q.dtype, padding)
    final = [
        None if d is None else _fit(d, problem.g.dtype, (0, problem.shape[1] - keys, *padding))
        for d in (d_information, d_excess_precision)
    ]
    gradients, d_first = _Backward(problem, walk, d_output, d_variance, scale).run(final)
    sizes = (keys, keys, values, values)
    token_wise = [d[..., :size] for d, size in zip(gradients[:4], sizes, strict=True)] + list(gradients[4:])
    inputs = (q, k, w, beta, g, prior)
    found = [d.to(x.dtype).contiguous() for d, x in zip(token_wise, inputs, strict=True)]
    return *found, *(None if d is None else d[:, :, :values, :keys].contiguous() for d in d_first)


def _fit(d: Tensor, dtype: torch.dtype, padding: tuple[int, ...]) -> Tensor:
    d = d.detach().to(dtype)
    d = (torch.nn.functional.pad(d, padding) if any(padding) else d).contiguous()
    return d if d.data_ptr() % 16 == 0 else d.clone()


def _choose(q, k, w, beta, g, prior, information, excess_precision, offsets, variance: bool):
    """The kernel for these inputs and the inputs as it takes them; no kernel where none is made for such sizes."""
    problem = prepare(q, k, w, beta, g, prior, information, excess_precision, offsets)
    room = walks.shared_bytes(problem.q.device)
    if not variance and layout.on_tensor_cores(problem):
        keys, values = (-(-size // walks.BLOCK) * walks.BLOCK for size in problem.shape[1:])
        items, processors = problem.shape[0] * (len(problem.cuts) - 1), layout._processors(problem.q.device)
        if (walk := walks.tensor_walk(keys, values, items, problem.longest, processors, room)) is not None:
            if problem.shape[1:] != (keys, values):
                add = (keys - problem.shape[1], values - problem.shape[2])
                problem = _pad(problem, *add)
            return walk, problem
    real = problem.g.dtype
    if problem.q.dtype != real:
        q, k, w, beta = (x.to(real) for x in (q, k, w, beta))
        problem = prepare(q, k, w, beta, g, prior, information, excess_precision, offsets)
    return walks.plain_walk(problem.shape[1], real, variance, room), problem


def _pad(problem: Problem, keys: int, values: int) -> Problem:
    pad = torch.nn.functional.pad
    q, k = (pad(x, (0, keys)) for x in (problem.q, problem.k))
    w, beta = (pad(x, (0, values)) for x in (problem.w, problem.beta))
    m, j = (None if s is None else pad(s, (0, keys, 0, values)) for s in problem.state)
    shape = (problem.shape[0], q.shape[3], w.shape[3])
    return problem._replace(q=q, k=k, w=w, beta=beta, state=(m, j), shape=shape)


class _Backward:
    """One backward pass: the inputs, the spans they are cut into, and how many spans are done at once."""

    def __init__(self, problem: Problem, walk: walks.Walk, d_output: Tensor, d_variance: Tensor | None, scale: float):
        self.problem, self.walk, self.scale = problem, walk, scale
        self.d_output, self.d_variance = d_output, d_variance
        heads, keys, values = problem.shape
        self.blocks = -(-values // walk.rows)  # per head of a span
        self.device = problem.q.device
        processors = layout._processors(self.device)
        # What a span takes per token (states before every chunk, partial sums of dq and dk) and beside.
        sums = 2 * self.blocks if self.blocks > 1 else 0
        of_token = heads * keys * (2 * values + CHUNK * sums) * problem.g.element_size() // CHUNK
        self.spans = self._cut(_budget(self.device) // max(1, of_token), processors)
        self.cut = len(self.spans) > len(problem.cuts) - 1
        self.resident = max(1, min(walk.most, -(-len(self.spans) * heads * self.blocks // processors)))
        longest = max((span.end - span.start for span in self.spans), default=0)
        active = min(processors * self.resident, len(self.spans) * heads * self.blocks)
        self.apart = walk.apart if 8 * active * walk.scratch <= CACHE else 16  # tokens from state to state
        kept = CHUNK // self.apart - 1 + walk.definitions.get("STREAM", 0)
        self.scratch = walk.scratch * kept  # bytes per block
        self.slots = processors * self.resident  # blocks at work
        budget = _budget(self.device) if self.cut else min(GROUP, _budget(self.device))
        states = of_token * -(-longest // CHUNK) * CHUNK
        most = walks.fitting(states, self.scratch, heads * self.blocks, self.slots, budget)
        self.longest = longest
        self.at_once = walks.group_size(len(self.spans), heads * self.blocks, self.slots, longest, most)
        states = self.at_once * -(-longest // CHUNK) * heads * keys * values * 2 * problem.g.element_size()
        self.together = self.at_once * max(1, STATES // max(1, states))  # spans whose states are made at once
        self.tensor_cores = walk.name == "backward_tensor"
        # Whether blocks of a launch can begin before those of the one before it have ended.
        self.overlap = self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.kept = None  # states before the chunks, where they are made once for all spans, and how heads compare

    def _cut(self, tokens: int, processors: int) -> list[Span]:
        """Sequences, or pieces of them if the device would be idle; ``tokens`` fit the budget at once."""
        p = self.problem
        length = layout.span_length(p, layout.Layout(self.walk.rows, 1, {}))
        if length < p.longest:  # pieces that fill the device together should fit together
            together = -(-processors // max(1, p.shape[0] * self.blocks))
            length = min(length, max(walks.LEAST_SPAN, tokens // together // CHUNK * CHUNK))
        self.entry = p.state
        if length < p.longest:
            self.entry = entry_states(p, cut(p.cuts, length, self.device))
        return [
            Span(at, min(at + length, end), n, at + length >= end)
            for n, (start, end) in enumerate(itertools.pairwise(p.cuts))
            for at in range(start, max(end, start + 1), length)
        ]

    def run(self, final: list[Tensor | None]):
        """Gradients of q, k, w, beta, g, prior, and those of the initial states or None, all with padded K and V."""
        p = self.problem
        heads, _, values = p.shape
        count = len(self.spans)
        d_last = (
            [p.new_state(count, heads).zero_() for _ in range(2)]
            if self.cut or any(d is not None for d in final)
            else None
        )
        if d_last is not None:
            rows = self._index([s for s, span in enumerate(self.spans) if span.last])
            for to, d in zip(d_last, final, strict=True):
                if d is not None:
                    to.index_copy_(0, rows, d)
        unwanted = self.tensor_cores and not self.cut and all(s is None for s in p.state)
        d_first = (None, None) if unwanted else tuple(p.new_state(count, heads) for _ in range(2))
        if self.cut:
            self._carry_back(d_last, d_first)
        outside = p.cuts[-1] < p.q.shape[0] * p.q.shape[1]  # tokens beyond the last sequence
        new = torch.zeros_like if outside or not values else torch.empty_like
        gradients = [new(x) for x in (p.q, p.k, p.w, p.beta, p.g)]
        d_prior = p.prior.new_zeros(count, heads, self.blocks)
        self._walk(d_last, d_first, gradients, d_prior)
        if self.cut:
            first = self._index([s for s in range(count) if s == 0 or self.spans[s - 1].last])
            d_first = [None if d is None else d[first] for d in d_first]
        return (*gradients, d_prior.sum((0, 2))), d_first

    def _index(self, rows: list[int]) -> Tensor:
        """A list as an index makes the host wait for the device; this does not."""
        return torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)

    def _carry_back(self, d_last, d_first) -> None:
        """d_last of every span, from what each span adds to the gradient of its first state."""
        self._walk(None, d_first, None, None)
        decays = self._decays()[:, :, None, None]
        for s in range(len(self.spans) - 2, -1, -1):
            if not self.spans[s].last:
                for last, added in zip(d_last, d_first, strict=True):
                    torch.addcmul(added[s + 1], decays[s + 1], last[s + 1], out=last[s])

    def _decays(self) -> Tensor:
        """Of whole spans, [S, H]."""
        g = self.problem.g.flatten(0, 1)
        start, end = (self._index([span[i] for span in self.spans])[:, None] for i in (0, 1))
        at = start + torch.arange(self.longest, device=self.device)
        of_spans = g[at.clamp(max=len(g) - 1)].masked_fill((at >= end)[:, :, None], 0)
        return of_spans.sum(1, dtype=torch.float64).exp().to(g.dtype)

    def _walk(self, d_last, d_first, gradients, d_prior) -> None:
        """Runs the kernel on all spans. Without ``gradients`` only d_first is wanted, as if nothing followed a span."""
        p, count = self.problem, len(self.spans)
        if not self.blocks * p.shape[0]:
            return
        for at in range(0, count, self.together):
            spans = self.spans[at : at + self.together]
            start, end = spans[0].start, spans[-1].end
            q, k, w, beta, g = (self._take(x, start, end) for x in (p.q, p.k, p.w, p.beta, p.g))
            cuts = (*(span.start - start for span in spans), end - start)
            longest = max(b - a for a, b in itertools.pairwise(cuts))
            state = tuple(None if s is None else s[at : at + self.together] for s in self.entry)
            part = p._replace(q=q, k=k, w=w, beta=beta, g=g, state=state, cuts=cuts, longest=longest)
            table = cut(cuts, max(CHUNK, -(-longest // CHUNK) * CHUNK), q.device).table
            chunks = self.kept or write_chunk_states(part, self.tensor_cores)
            if gradients is None and len(spans) == count:
                self.kept = chunks
            equal = len({span.end - span.start for span in spans}) == 1
            alike = ALIKE * (end - start) // 100 if equal else 0  # of the tokens that ranks count
            for first in range(0, len(spans), self.at_once):
                rows = table[first : first + self.at_once]
                if first:  # tokens are counted from the group's first
                    rows = rows.clone()
                    rows[:, 0] -= cuts[first]
                group = slice(at + first, at + first + len(rows))
                self._launch(group, rows, chunks, alike, d_last, d_first, gradients, d_prior)
            del chunks  # the next ones take their place

    @staticmethod
    def _take(x: Tensor, start: int, end: int) -> Tensor:
        return x.flatten(0, 1)[None, start:end]

    def _launch(self, group: slice, table: Tensor, chunks, alike: int, d_last, d_first, gradients, d_prior) -> None:
        p, spans, pull = self.problem, self.spans[group], gradients is None
        heads, start, end = p.shape[0], spans[0].start, spans[-1].end
        take = functools.partial(self._take, start=start, end=end)
        q, k, w, beta, g, d_output = (take(x) for x in (p.q, p.k, p.w, p.beta, p.g, self.d_output))
        last = (None, None) if d_last is None else tuple(d[group] for d in d_last)
        first = tuple(None if d is None else d[group] for d in d_first)
        alone = self.blocks == 1 and not pull  # then nothing is left to be summed
        if alone:
            sums = [take(gradients[i]) for i in (0, 1, 4)]
        else:
            sums = [x.new_empty((0 if pull else self.blocks, *x.shape[1:]), dtype=g.dtype) for x in (q, k, g)]
        to_w, to_beta = (None, None) if pull else (take(x) for x in gradients[2:4])
        definitions: dict[str, Any] = dict(self.walk.definitions)
        kernel = functools.partial(nvrtc.kernel, layout.FOLDER, self.walk.name, p.device)
        arguments = [q, k, w, beta, g, p.prior, d_output]
        outputs = [*last, sums[0], sums[1], to_w, to_beta, sums[2], None if pull else d_prior[group], *first]
        items = len(spans) * heads * self.blocks
        if self.tensor_cores:
            turns = 1 if pull or not self.overlap else walks.turns_of(items, self.slots, self.longest)
            definitions |= {"BLOCKS": self.resident, "ENTRY": self.apart, "PULL": int(pull), "TURNED": int(turns > 1)}
            rooms = self.slots if turns > 1 else items
            scratch = torch.empty(rooms * self.scratch, dtype=torch.uint8, device=q.device)
            progress = torch.zeros(items + rooms, dtype=torch.int32, device=q.device) if turns > 1 else None
            arguments += [table, *chunks, *outputs, scratch, progress, rooms]
            for turn in range(turns):
                rest = (turn, turns, alike, len(spans), end - start, heads, self.scale)
                kernel(**definitions)(items, *arguments, *rest, early=turn > 0)
        else:
            if pull:  # this kernel has no such job: its other results are thrown away
                sums = [x.new_empty((self.blocks, *x.shape[1:]), dtype=g.dtype) for x in (q, k, g)]
                prior_sums = g.new_empty(items)
                outputs = [*last, *sums[:2], torch.empty_like(w), torch.empty_like(w), sums[2], prior_sums, *first]
            d_variance = None if self.d_variance is None else take(self.d_variance)
            arguments += [d_variance, table, *chunks, *outputs, end - start, *p.shape, self.scale]
            kernel(**definitions)(items, *arguments)
        if not pull and not alone:
            for i, partial in zip((0, 1, 4), sums, strict=True):  # rounded once
                torch.add(functools.reduce(torch.add, partial[:-1]), partial[-1], out=take(gradients[i])[0])


def _budget(device: torch.device) -> int:
    if device.type != "cuda":
        return BUDGET
    return min(BUDGET, int(SHARE * torch.cuda.get_device_properties(device).total_memory))
