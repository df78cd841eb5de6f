"""Adaptive input (Baevski & Auli, arXiv 1809.10853) and adaptive softmax (Grave et al., arXiv 1609.04309).

The vocabulary, sorted by falling frequency, is cut into bands. Each further band has narrower vectors, brought to the
model's width by a projection. The softmax chooses among the words of the first band and the other bands, then within
the band. Input and softmax have the same tables and projections, so they can be tied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mnemic.errors import UsageError
from mnemic.models.config import MnemicDecoderConfig
from mnemic.models.cross_entropy import normalised_cross_entropy, token_cross_entropy


class Tables(nn.ParameterList):
    """The vectors of each band's words; a type of its own, so that they get their own initialisation."""


class Projections(nn.ParameterList):
    """What brings the vectors of each band but the first to the model's width."""


class Bands(nn.Module):
    """The tables (words of the band, width of the band) and projections (width of the band, hidden_size)."""

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__()
        self.bounds = [0, *config.adaptive_cutoffs, config.vocab_size]
        sizes = [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        widths = [config.hidden_size // config.adaptive_factor**band for band in range(len(sizes))]
        self.tables = Tables(torch.empty(size, width) for size, width in zip(sizes, widths, strict=True))
        self.projections = Projections(torch.empty(width, config.hidden_size) for width in widths[1:])

    def band(self, ids: Tensor, band: int) -> Tensor:
        """The places in a flat tensor of ids that belong to a band."""
        return ((ids >= self.bounds[band]) & (ids < self.bounds[band + 1])).nonzero().squeeze(1)


class AdaptiveEmbedding(Bands):
    """Token embeddings whose width depends on the token's band."""

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__(config)
        self.scale = config.hidden_size**0.5

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings (..., hidden_size)."""
        ids = input.flatten()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.bounds[-1]:
            raise UsageError(
                f"token ids from {int(ids.min())} to {int(ids.max())}: the vocabulary has {self.bounds[-1]} tokens; "
                "use the tokenizer the model was made for"
            )
        result = self.tables[0].new_zeros(ids.shape[0], self.tables[0].shape[1])
        for band, table in enumerate(self.tables):
            places = self.band(ids, band)
            vectors = nn.functional.embedding(ids[places] - self.bounds[band], table)
            if band:
                vectors = vectors @ self.projections[band - 1]
            result = result.index_copy(0, places, vectors.to(result.dtype))
        return (result * self.scale).view(*input.shape, -1)


class AdaptiveSoftmax(Bands):
    """The output layer that gives log-probabilities band by band."""

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__(config)
        self.clusters = nn.Parameter(torch.empty(len(self.projections), config.hidden_size))

    def _head(self, hidden: Tensor) -> Tensor:
        return hidden @ torch.cat([self.tables[0], self.clusters]).t()

    def _tail(self, hidden: Tensor, band: int) -> Tensor:
        return hidden @ self.projections[band - 1].t() @ self.tables[band].t()

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-probabilities over the whole vocabulary, (..., vocab_size)."""
        head = self._head(hidden).log_softmax(-1)
        first = self.bounds[1]
        parts = [head[..., :first]]
        for band in range(1, len(self.tables)):
            chosen = head[..., first + band - 1, None]
            parts.append(self._tail(hidden, band).log_softmax(-1) + chosen)
        return torch.cat(parts, dim=-1)

    def normalisers(self, hidden: Tensor) -> Tensor:
        """The logarithm of the normaliser of the choice among frequent words and bands, (...)."""
        return self._head(hidden).logsumexp(-1)

    def losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p(target) for hidden states (N, hidden_size), 0 where ignored, and the logarithms of the normalisers.

        Only the targets' bands are computed.
        """
        first = self.bounds[1]
        choices = targets.clone()
        for band in range(1, len(self.tables)):
            choices[self.band(targets, band)] = first + band - 1
        losses, normalisers = normalised_cross_entropy(self._head(hidden), choices)
        for band in range(1, len(self.tables)):
            places = self.band(targets, band)
            within = token_cross_entropy(self._tail(hidden[places], band), targets[places] - self.bounds[band])
            losses = losses.index_add(0, places, within)
        return losses, normalisers
