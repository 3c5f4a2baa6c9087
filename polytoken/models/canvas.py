"""What a canvas lane may ask of a network: encode what is committed, denoise a canvas over it, remember what happened.

A denoise is split at the layers, so that a lane can run several rows side by side, layer by layer, without ever
putting two rows into one product: `begin`, then `run_layer` for every layer, then `finish`. C canvas slots, H hidden
size, V vocabulary, M memory slots, D latent width. Arrays over the canvas lie in physical order (slot p) unless they
are called logical (position j = (p - head) mod C).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.models.latent.state import LatentState


@dataclass(frozen=True, eq=False)
class CanvasOutput:
    """What one denoise leaves behind.

    Attributes:
        heavy_hidden: [1, C, H], after the final norm; what `CanvasModel.project` reads.
        working_state: [1, C, H], the context that was merged into the canvas.
        next_latent_state: the deliberation's new state; statistics are still those of the previous denoise.
        token_embeddings: [1, C, H], scaled embeddings of the canvas.
    """

    heavy_hidden: mx.array
    working_state: mx.array
    next_latent_state: LatentState
    token_embeddings: mx.array


@dataclass(frozen=True, eq=False)
class SoftPart:
    """The scores of one vocabulary chunk, ids from `start` to `stop`, as shares of their largest.

    Attributes:
        top: float32 [R], largest score of the chunk.
        shares: float32 [R, stop - start], exp(score - top).
        total: float32 [R], their sum.
    """

    start: int
    stop: int
    top: mx.array
    shares: mx.array
    total: mx.array


@dataclass(frozen=True, eq=False)
class SoftSum:
    """Softmax-weighted sum of table rows over the vocabulary chunks seen so far; see `CanvasModel.soft_add`.

    Attributes:
        top: float32 [R], largest score so far.
        total: float32 [R], sum of exp(score - top).
        rows: float32 [R, H], sum of exp(score - top) times the table's row.
    """

    top: mx.array
    total: mx.array
    rows: mx.array


@dataclass(frozen=True)
class Cost:
    """What one forward has to move and to compute at least.

    Attributes:
        weight_bytes: of weights; experts count as far as evenly spread routing would touch them.
        state_bytes: of cached keys and values.
        flops: a multiply and an add count two.
    """

    weight_bytes: int
    state_bytes: int
    flops: int


@dataclass(frozen=True)
class CommitSettings:
    """What the checkpoint says about committing; a None switches a bound off.

    `sample_top_k` and `sample_min_p` bound the draw, `failure_top_k` and `failure_min_p` the failure rate: both come
    from the keys `commit_top_k` and `commit_min_p`, but an absent key means 40 and 0.05 for the draw and no bound for
    the failure rate.
    """

    failure_budget: float
    entropy_weight: float
    confidence_power: float
    sample_top_k: int | None
    sample_min_p: float | None
    failure_top_k: int | None
    failure_min_p: float | None
    target_confidence: float | None
    denoise_temperature: float


@dataclass(frozen=True)
class CanvasTokens:
    """Ids with a meaning, as config.json has them.

    Attributes:
        eos: ids that end the text.
        turn_end: the id that ends the turn, or None if the config has none.
        pad: filler.
        image: placeholder of an image, which a prompt must not hold; None if the config has none.
    """

    eos: tuple[int, ...]
    turn_end: int | None
    pad: int
    image: int | None


@dataclass(eq=False)
class CanvasPass:
    """One denoise under way; belongs to the model that began it.

    Attributes:
        hidden: [1, C, H] in logical order, as the last layer that ran left it; a lane may evaluate it, nothing more.
    """

    hidden: mx.array


class CanvasModel(ABC):
    """A causal encoder and a bidirectional denoiser over one sequence.

    Attributes:
        vocab_size, hidden_size, num_layers: V, H and the number of layers.
        canvas_length: C.
        max_positions: longest sequence, in tokens.
        memory_slots, latent_dim: M and D of the latent state.
        conditioning: what a denoise is told of the previous one: "latent" for a checkpoint with deliberation, "logits"
            for one whose self-conditioning reads the previous distribution (see `soft_embedding`).
        commit: settings of the commit policy.
        tokens: ids with a meaning.
        weight_bytes_per_forward: bytes of weights that one denoise of a whole canvas reads.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    canvas_length: int
    max_positions: int
    memory_slots: int
    latent_dim: int
    conditioning: Literal["latent", "logits"]
    commit: CommitSettings
    tokens: CanvasTokens
    weight_bytes_per_forward: int

    @abstractmethod
    def make_cache(self) -> DecodingState:
        """A fresh, empty decoding state: one layer of cache per layer of the network."""

    @abstractmethod
    def make_latent(self) -> LatentState:
        """The latent state before the first denoise, entropies at log V."""

    @abstractmethod
    def with_canvas(self, canvas_length: int) -> CanvasModel:
        """The same network over canvases of another length, at most `max_positions`; weights are shared."""

    @abstractmethod
    def encode(self, ids: mx.array, cache: DecodingState) -> None:
        """Append the keys and values of ids int32 [1, S], S > 0, to the cache; nothing is evaluated here."""

    @abstractmethod
    def embed(self, ids: mx.array) -> mx.array:
        """Scaled embeddings [..., H] of ids [...]."""

    @abstractmethod
    def begin(
        self,
        canvas: mx.array,
        cache: DecodingState,
        *,
        latent: LatentState,
        head: mx.array,
        signal: mx.array | None = None,
    ) -> CanvasPass:
        """Everything before the first layer.

        Args:
            canvas: int32 [1, C] ids.
            cache: the encoded prefix; read, never written.
            latent: the state before this denoise.
            head: int32 [1], physical slot of logical position 0.
            signal: [1, C, H] for "logits" conditioning, None on a first denoise; other models take none.
        """

    @abstractmethod
    def run_layer(self, index: int, work: CanvasPass) -> None:
        """Advance `work` by layer `index`; layers run in order, each once."""

    @abstractmethod
    def finish(self, work: CanvasPass) -> CanvasOutput:
        """Everything after the last layer."""

    def denoise(
        self,
        canvas: mx.array,
        cache: DecodingState,
        *,
        latent: LatentState,
        head: mx.array,
        signal: mx.array | None = None,
    ) -> CanvasOutput:
        """`begin`, all layers and `finish`."""
        work = self.begin(canvas, cache, latent=latent, head=head, signal=signal)
        for index in range(self.num_layers):
            self.run_layer(index, work)
        return self.finish(work)

    @abstractmethod
    def observe(self, latent: LatentState, output: CanvasOutput, *, valid: mx.array, head: mx.array) -> LatentState:
        """The latent state after it has seen the denoise.

        Args:
            latent: the output's next state with this denoise's statistics, ages and deltas already in it.
            output: of the denoise.
            valid: bool [1, C], slots that still belong to the answer.
            head: int32 [1].
        """

    @abstractmethod
    def commit_write(
        self,
        memory: mx.array,
        output: CanvasOutput,
        *,
        token_embeddings: mx.array,
        lengths: mx.array,
        prefix_lengths: mx.array,
        reasons: mx.array,
        head: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """The memory after a commit, float32 [1, M, D], and the mean write gate, float32 [1], as a diagnostic.

        Args:
            memory: float32 [1, M, D] before it.
            output: of the denoise that led to the commit.
            token_embeddings: [1, L, H], scaled, of the committed ids.
            lengths: int32 [1], tokens committed, at most L.
            prefix_lengths: int32 [1], tokens encoded before the commit is.
            reasons: int32 [1], 0 nothing, 1 normal, 2 jump, 3 ends with a stop id.
            head: int32 [1], before the canvas advances.
        """

    @abstractmethod
    def project(self, flat: mx.array, start: int, stop: int) -> mx.array:
        """Logits float32 [R, stop - start] of the vocabulary range for hidden rows [R, H], softcap applied."""

    @abstractmethod
    def soft_add(self, total: SoftSum | None, part: SoftPart) -> SoftSum:
        """`total` with one more vocabulary chunk; None begins a sum.

        A lane that goes through the vocabulary anyway feeds its tempered scores here, chunk by chunk, instead of
        calling `soft_embedding`, which would compute them again.
        """

    @abstractmethod
    def soft_signal(self, total: SoftSum) -> mx.array:
        """The finished sum as the `signal` [1, R, H] of the next denoise: sqrt(H) softmax(scores) table."""

    def soft_embedding(self, heavy_hidden: mx.array, *, temperature: float, chunk: int = 4096) -> mx.array:
        """The `signal` [1, C, H] that a denoise with this hidden [1, C, H] gives the next one."""
        flat = heavy_hidden.reshape(-1, self.hidden_size)
        total: SoftSum | None = None
        for start in range(0, self.vocab_size, chunk):
            stop = min(start + chunk, self.vocab_size)
            scores = self.project(flat, start, stop) / temperature
            top = mx.max(scores, axis=-1)
            shares = mx.exp(scores - top[:, None])
            total = self.soft_add(total, SoftPart(start, stop, top, shares, mx.sum(shares, axis=-1)))
            mx.async_eval(total.top, total.total, total.rows)  # so that no two chunks of scores live at once
        assert total is not None  # V > 0
        return self.soft_signal(total)

    @abstractmethod
    def denoise_cost(self, prefix: int) -> Cost:
        """Of one denoise, vocabulary product included, over `prefix` encoded tokens."""

    @abstractmethod
    def encode_cost(self, tokens: int, prefix: int) -> Cost:
        """Of encoding `tokens` in one forward behind `prefix` encoded tokens."""
