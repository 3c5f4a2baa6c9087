"""Random numbers of the canvas lane: every draw has an explicit key made of the request's seed, a salt and the step.

So a row's noise depends on its own seed and step count only, never on other rows or on what was drawn before. Seeds of
any sign and size work; seeds that are equal modulo 2**32 give equal draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from polytoken.sampling.vocabulary import VocabularyNoise

# Part of the seed contract: never change these.
CANVAS_SALT: Final = 0x51A7
SAMPLING_SALT: Final = 0xC09A
STEP_STRIDE: Final = 1000003
NOISE_TILE: Final = 4096


class NoiseSource(Protocol):
    """Where a row's random numbers come from. Tests put fixed tables here."""

    def canvas(self, step: int) -> mx.array:
        """Uniform random ids, int32 [1, C]."""
        ...

    def step(self, step: int) -> VocabularyNoise:
        """The uniforms that the sampling of one denoise step uses."""
        ...


def draw_key(seed: int, salt: int) -> mx.array:
    """The MLX key of one draw, uint32 [2]."""
    key: mx.array = mx.random.key((seed + salt) % 2**32)
    return key


@dataclass(frozen=True)
class KeyedNoise:
    """The noise of one request.

    Attributes:
        seed: the request's seed, any integer.
        canvas_length: C.
        vocab_size: V.
    """

    seed: int
    canvas_length: int
    vocab_size: int

    def canvas(self, step: int) -> mx.array:
        """Uniform random ids int32 [1, C]: step 0 fills the initial canvas, step s + 1 refills after denoise step s."""
        key = draw_key(self.seed, CANVAS_SALT + step * STEP_STRIDE)
        return mx.random.randint(0, self.vocab_size, (1, self.canvas_length), key=key)

    def step(self, step: int) -> KeyedStep:
        """The uniforms of the denoise step that starts at this step count."""
        return KeyedStep(self, step)


@dataclass(frozen=True)
class KeyedStep:
    """The uniforms of one denoise step of one request."""

    source: KeyedNoise
    count: int

    def candidates(self, k: int) -> mx.array:
        """Uniforms float32 [C, k] for the top-k path."""
        return self._draw(0, k)

    def span(self, start: int, stop: int) -> mx.array:
        """Uniforms float32 [C, stop - start] for the ids from start to stop of the full-vocabulary path.

        Drawn in tiles of fixed width, of which the span is cut out, so that an id's number does not depend on how the
        vocabulary is swept. The tile is as wide as the default chunk.
        """
        V = self.source.vocab_size
        tiles = []
        for tile in range(start // NOISE_TILE, (stop - 1) // NOISE_TILE + 1):
            left = tile * NOISE_TILE
            right = min(left + NOISE_TILE, V)
            whole = self._draw(tile, right - left)
            tiles.append(whole[:, max(start - left, 0) : min(stop, right) - left])
        return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1)

    def _draw(self, part: int, width: int) -> mx.array:
        key = draw_key(self.source.seed, SAMPLING_SALT + self.count * STEP_STRIDE + part)
        return mx.random.uniform(shape=(self.source.canvas_length, width), key=key)
