"""Stop 11: log-probs and entropy at predicting places only, without ever holding the logits of more than one chunk.

The head is the widest part of a small model: logits of a row would weigh more than all activations. So they are made
chunk by chunk in one buffer, reduced to three numbers a place, and made again in the backward; those of a row that fits
one chunk are kept for it. A place is scored once however many targets hang on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# One chunk of logits: so large that the passes over the head's gradient, one for each chunk, are few, and small beside
# the activations of a row.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 128 * 2**20, 2**30
# Rows whose exponentials are held at a time while a chunk is reduced.
CPU_ROWS, GPU_ROWS = 8, 128


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What happens to the logits before the softmax, in this order.

    Attributes:
        scale: Factor that the model puts on its logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``; None = they do not.
        temperature: Logits are divided by it, as the sampler does.
        chunk_bytes: Most bytes of logits alive at a time; None = what suits the device.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    chunk_bytes: int | None = None


def target_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    place: Tensor,
    target: Tensor,
    options: HeadOptions,
) -> tuple[Tensor, Tensor]:
    """Log-probs of targets and entropy of the distribution that each is drawn from.

    Args:
        hidden: [P, H] final hidden states of the predicting places.
        weight: [V, H] of the head.
        bias: [V] of the head, or None.
        place: [M] int64, which of the P places predicts each target.
        target: [M] int64, the targets.
        options: Logit scale, cap, temperature.

    Returns:
        Log-probs [M] that carry the gradient and entropies [M] that do not; float32, or float64 for float64 states.
    """
    return _TargetScores.apply(hidden, weight, bias, place, target, options)


class _TargetScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor,
        target: Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        chunks = _Chunks(hidden, weight, bias, place, options)
        normaliser, entropy, log_total = chunks.per_place(), chunks.per_place(), chunks.per_place()
        picked = torch.empty(place.numel(), dtype=chunks.dtype, device=hidden.device)
        rows = CPU_ROWS if hidden.device.type == "cpu" else GPU_ROWS
        exponentials = torch.empty(rows, weight.shape[0], dtype=chunks.dtype, device=hidden.device)
        for begin, end, terms in chunks:
            logits = chunks.logits(begin, end)
            picked[terms] = logits[place[terms] - begin, target[terms]]
            _reduce(logits, exponentials, normaliser[begin:end], log_total[begin:end], entropy[begin:end])
        keep = chunks.alone and options.softcap is None and any(ctx.needs_input_grad)
        ctx.shifted = (chunks.buffer, log_total) if keep else None
        ctx.save_for_backward(hidden, weight, bias, place, target, normaliser)
        ctx.options = options
        entropies = entropy[place]
        ctx.mark_non_differentiable(entropies)
        return picked - normaliser[place], entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, target, normaliser = ctx.saved_tensors
        shifted, ctx.shifted = ctx.shifted, None  # the gradient takes their memory: a second backward makes them again
        chunks = _Chunks(hidden, weight, bias, place, ctx.options, None if shifted is None else shifted[0])
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.to(chunks.dtype)
        # several targets of one place share its softmax: their gradients are summed before it is touched
        per_place = chunks.per_place().zero_().index_add_(0, place, grad)
        of_hidden = torch.zeros_like(hidden) if needs_hidden else None
        fresh = torch.empty_like if len(hidden) else torch.zeros_like
        of_weight = fresh(weight, dtype=chunks.dtype) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=chunks.dtype) if needs_bias and bias is not None else None
        for begin, end, terms in chunks:
            logits, shift = shifted if shifted is not None else (chunks.logits(begin, end), normaliser[begin:end])
            of_logits = chunks.gradient(
                logits, shift, per_place[begin:end], place[terms] - begin, target[terms], grad[terms]
            )
            if of_hidden is not None:
                _product(of_logits.to(weight.dtype), weight, of_hidden[begin:end])
            if of_weight is not None:
                # beta=0 writes where the first chunk would add to zeros: the weight is the widest thing here
                of_weight.addmm_(of_logits.t(), hidden[begin:end].to(chunks.dtype), beta=int(begin > 0))
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


class _Chunks:
    """The places of a row cut into chunks, and the one logits buffer that all of them use."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor,
        options: HeadOptions,
        buffer: Tensor | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.options = hidden, weight, bias, options
        self.dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        places, vocabulary = hidden.shape[0], weight.shape[0]
        width = vocabulary * self.dtype.itemsize
        if options.softcap is not None:
            width *= 2  # the cap's slope needs as much again
        most = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES
        self.size = max(1, min(places, (most if options.chunk_bytes is None else options.chunk_bytes) // width))
        self.order = place.argsort(stable=True)
        bounds = torch.arange(0, places + self.size, self.size, device=place.device)
        self.bounds = torch.searchsorted(place[self.order], bounds).tolist()
        if buffer is None:
            buffer = torch.empty(self.size, vocabulary, dtype=self.dtype, device=hidden.device)
        self.buffer = buffer

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """First place, end, and which terms hang on these places."""
        for chunk, begin in enumerate(range(0, self.hidden.shape[0], self.size)):
            terms = self.order[self.bounds[chunk] : self.bounds[chunk + 1]]
            yield begin, min(begin + self.size, self.hidden.shape[0]), terms

    @property
    def alone(self) -> bool:
        """Whether the row has one chunk."""
        return 0 < self.hidden.shape[0] <= self.size

    def per_place(self) -> Tensor:
        return torch.empty(self.hidden.shape[0], dtype=self.dtype, device=self.hidden.device)

    def logits(self, begin: int, end: int) -> Tensor:
        """[end - begin, V] logits at temperature, in the buffer."""
        return self._scaled(self._raw(begin, end))

    def _raw(self, begin: int, end: int) -> Tensor:
        out = self.buffer[: end - begin]
        # states and weights differ under autocast: float32 weights, half-precision states
        _product(self.hidden[begin:end].to(self.weight.dtype), self.weight.t(), out)
        if self.bias is not None:
            out.add_(self.bias)
        return out

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, softcap, temperature = self.options.scale, self.options.softcap, self.options.temperature
        if softcap is not None:
            return logits.mul_(scale / softcap).tanh_().mul_(softcap / temperature)
        return logits if scale == temperature else logits.mul_(scale / temperature)

    def gradient(
        self, logits: Tensor, shift: Tensor, per_place: Tensor, place: Tensor, target: Tensor, grad: Tensor
    ) -> Tensor:
        """[places, V] gradient of the raw product, in the logits' memory: (sum of grads) x (one-hot - softmax) x slope.

        ``logits - shift`` [places] are the log-probs.
        """
        scale, softcap, temperature = self.options.scale, self.options.softcap, self.options.temperature
        slope = None if softcap is None else logits.mul(temperature / softcap).square_().neg_().add_(1.0)
        out = logits.sub_(shift[:, None]).exp_().mul_(per_place.neg()[:, None])
        out.index_put_((place, target), grad, accumulate=True)
        if slope is not None:
            out.mul_(slope)
        return out if scale == temperature else out.mul_(scale / temperature)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right`` into ``out``, straight into its memory where the types allow."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _reduce(logits: Tensor, exponentials: Tensor, normaliser: Tensor, log_total: Tensor, entropy: Tensor) -> None:
    """Log-sum-exp and entropy of each row, a few rows at a time; ``logits`` is left shifted by each row's maximum.

    With z = logits - max and Z = sum(exp z): log-sum-exp = max + log Z, entropy = log Z - sum(z exp z) / Z.
    """
    step = exponentials.shape[0]
    for begin in range(0, logits.shape[0], step):
        rows = logits[begin : begin + step]
        highest = rows.amax(-1)
        rows.sub_(highest[:, None])
        exp = torch.exp(rows, out=exponentials[: rows.shape[0]])
        total = exp.sum(-1)
        log = log_total[begin : begin + step] = total.log()
        normaliser[begin : begin + step] = highest + log
        entropy[begin : begin + step] = log - torch.linalg.vecdot(rows, exp) / total
