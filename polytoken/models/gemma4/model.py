"""`CanvasNetwork` behind the `CanvasModel` contract."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.cache.layers import CacheLayer, KVLayer, SlidingKVLayer
from polytoken.cache.state import DecodingState
from polytoken.kernels.attention import Mask
from polytoken.models.canvas import CanvasModel, CanvasOutput, CanvasPass, Cost, SoftPart, SoftSum
from polytoken.models.gemma4.blocks import plain_norm
from polytoken.models.gemma4.config import FULL, SLIDING, CanvasConfig
from polytoken.models.gemma4.cost import CostModel
from polytoken.models.gemma4.rotation import share_rotations
from polytoken.models.gemma4.table import Table
from polytoken.models.latent.arithmetic import capped
from polytoken.models.latent.buses import BusKV
from polytoken.models.latent.deliberation import LatentDeliberation
from polytoken.models.latent.ring import to_logical, to_physical
from polytoken.models.latent.state import LatentState


@dataclass(eq=False)
class GemmaPass(CanvasPass):
    """A denoise under way: what `begin` found out and the layers still need."""

    cache: DecodingState
    head: mx.array
    tokens: mx.array
    working: mx.array
    latent: LatentState
    working_kv: BusKV | None = None
    persistent_kv: BusKV | None = None


class GemmaCanvas(CanvasModel):
    """Gemma 4 as encoder and decoder of a canvas; what conditions a denoise is the subclass's."""

    def __init__(self, network: nn.Module, config: CanvasConfig) -> None:
        self.network: Any = network
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = len(config.layers)
        self.canvas_length = config.canvas_length
        self.max_positions = config.max_positions
        # A model without deliberation still carries a state of the same make, as small as it can be.
        self.memory_slots = config.latent.slots if config.latent is not None else 1
        self.latent_dim = config.latent.dim if config.latent is not None else 1
        self.commit = config.commit
        self.tokens = config.tokens
        self._decoder = network.model.decoder
        self._scalars = [layer.layer_scalar for layer in network.model.encoder.language_model.layers]
        self._table = Table(self._decoder.embed_tokens, hidden_size=config.hidden_size, softcap=config.softcap)
        share_rotations((layer.self_attn for layer in self._decoder.layers), config.layer_types)
        self._costs = CostModel.of(network, config, state_itemsize=self._table.dtype.size)
        self.weight_bytes_per_forward = self._costs.denoise(0).weight_bytes

    def make_cache(self) -> DecodingState:
        window = self.config.sliding_window
        layers: list[CacheLayer] = [
            SlidingKVLayer(window) if kind == SLIDING else KVLayer() for kind in self.config.layer_types
        ]
        return DecodingState(layers)

    def make_latent(self) -> LatentState:
        return LatentState.empty(
            1, self.canvas_length, self.memory_slots, self.latent_dim, entropy=math.log(self.vocab_size)
        )

    def with_canvas(self, canvas_length: int) -> GemmaCanvas:
        return type(self)(self.network, replace(self.config, canvas_length=canvas_length))

    def encode(self, ids: mx.array, cache: DecodingState) -> None:
        layers: list[Any] = cache.layers
        masks: dict[str, Mask] = {}
        for kind, state in zip(self.config.layer_types, layers, strict=True):
            if kind not in masks:
                masks[kind] = state.make_mask(ids.shape[1])
        x = self._table.rows(ids)
        steps = zip(self.config.layer_types, self._decoder.layers, layers, self._scalars, strict=True)
        for index, (kind, layer, state, scalar) in enumerate(steps):
            if index == self.num_layers - 1:
                layer.store(x, state)  # nobody reads what the last layer would make of it
            else:
                x = layer.encode(x, state, mask=masks[kind], scalar=scalar)

    def embed(self, ids: mx.array) -> mx.array:
        return self._table.rows(ids)

    def run_layer(self, index: int, work: CanvasPass) -> None:
        assert isinstance(work, GemmaPass)
        work.hidden = self._decoder.layers[index].decode(work.hidden, work.cache.layers[index])

    def finish(self, work: CanvasPass) -> CanvasOutput:
        assert isinstance(work, GemmaPass)
        heavy = to_physical(self._decoder.norm(work.hidden), work.head)
        return CanvasOutput(heavy, work.working, work.latent, work.tokens)

    def project(self, flat: mx.array, start: int, stop: int) -> mx.array:
        return self._table.project(flat, start, stop)

    def soft_add(self, total: SoftSum | None, part: SoftPart) -> SoftSum:
        return self._table.soft_add(total, part)

    def soft_signal(self, total: SoftSum) -> mx.array:
        return self._table.soft_rows(total)[None]

    def denoise_cost(self, prefix: int) -> Cost:
        return self._costs.denoise(prefix)

    def encode_cost(self, tokens: int, prefix: int) -> Cost:
        return self._costs.encode(tokens, prefix)


class LogitConditioned(GemmaCanvas):
    """A denoise is told the previous one's distribution, as `signal`; the latent state passes through untouched."""

    conditioning = "logits"

    def begin(
        self,
        canvas: mx.array,
        cache: DecodingState,
        *,
        latent: LatentState,
        head: mx.array,
        signal: mx.array | None = None,
    ) -> CanvasPass:
        tokens = self._table.rows(canvas)
        working = mx.zeros_like(tokens) if signal is None else signal.astype(tokens.dtype)
        # The block turns a zero signal into exactly zero, so a first denoise needs no products for it.
        told = tokens if signal is None else tokens + self._decoder.self_conditioning(working)
        hidden = to_logical(plain_norm(told, self.config.eps), head)
        return GemmaPass(hidden, cache, head, tokens, working, latent)

    def observe(self, latent: LatentState, output: CanvasOutput, *, valid: mx.array, head: mx.array) -> LatentState:
        return latent

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
        return memory, mx.zeros(lengths.shape, mx.float32)


class LatentConditioned(GemmaCanvas):
    """A denoise is told what latent deliberation makes of the state; memory is read again after full layers."""

    conditioning = "latent"

    def __init__(self, network: nn.Module, config: CanvasConfig) -> None:
        super().__init__(network, config)
        self._latent: LatentDeliberation = network.latent_deliberation
        # Which reader of the memory buses follows each layer, None behind a sliding one.
        full = [index for index, kind in enumerate(config.layer_types) if kind == FULL]
        self._readers = {index: reader for reader, index in enumerate(full)}

    def begin(
        self,
        canvas: mx.array,
        cache: DecodingState,
        *,
        latent: LatentState,
        head: mx.array,
        signal: mx.array | None = None,
    ) -> CanvasPass:
        assert signal is None, "deliberation makes its own signal"
        tokens = self._table.rows(canvas)
        working, following = self._latent(
            token_embeddings=tokens,
            confidence=latent.confidence,
            entropy=latent.entropy,
            state=latent,
            canvas_head=head,
        )
        logical_working = to_logical(working, head)
        seen = self._latent.logical_seen(latent, head)
        return GemmaPass(
            self._merge_context(to_logical(tokens, head), logical_working),
            cache,
            head,
            tokens,
            working,
            following,
            self._latent.working_memory_bus.prepare_kv((logical_working, seen)),
            self._latent.persistent_memory_bus.prepare_kv(latent.memory_slots, seen),
        )

    def run_layer(self, index: int, work: CanvasPass) -> None:
        super().run_layer(index, work)
        assert isinstance(work, GemmaPass)
        reader = self._readers.get(index)
        if reader is None:
            return
        for bus, kv in (
            (self._latent.working_memory_bus, work.working_kv),
            (self._latent.persistent_memory_bus, work.persistent_kv),
        ):
            if kv is not None and reader < bus.num_readers:
                work.hidden = bus.read(work.hidden, reader, *kv)

    def observe(self, latent: LatentState, output: CanvasOutput, *, valid: mx.array, head: mx.array) -> LatentState:
        return self._latent.observe_state(latent, output.heavy_hidden, output.working_state, valid, head)

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
        return self._latent.commit_write(
            memory=memory,
            working_state=output.working_state,
            heavy_hidden=output.heavy_hidden,
            committed_token_embeddings=token_embeddings,
            commit_lengths=lengths,
            prefix_lengths=prefix_lengths,
            commit_reason=reasons,
            canvas_head=head,
            max_commit=token_embeddings.shape[1],
        )

    def _merge_context(self, tokens: mx.array, working: mx.array) -> mx.array:
        """[1, C, H]: tokens [1, C, H] with the context's term, kept smaller than half of each token, at norm one."""
        term = capped(self._decoder.self_conditioning(working), tokens)
        return plain_norm(tokens + term.astype(tokens.dtype), self.config.eps)
