"""Latent deliberation once more, written down plainly: float64, one row, one position and one head at a time.

Works on the tensors of an export under their stored names, so that it shares neither layout nor order of operations
with the product. All arrays over the canvas are in logical order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


def rms_norm(x: Array, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt(np.mean(x**2) + 1e-6) * weight


def signed_log(x: float) -> float:
    return math.copysign(math.log1p(abs(x)), x)


def unit(x: Array, floor: float = 1e-6) -> Array:
    return x / max(float(np.sqrt((x**2).sum())), floor)


def capped(term: Array, reference: Array) -> Array:
    cap = 0.5 * np.sqrt(np.mean(reference**2))
    return term * cap / np.sqrt(np.mean(term**2) + cap**2 + 1e-12)


class Reference:
    """One export's deliberation; `weights` by stored name, prefix removed."""

    def __init__(self, weights: Mapping[str, Array], *, heads: int, window: int, max_positions: int) -> None:
        self.w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
        self.heads = heads
        self.window = window
        self.max_positions = max_positions
        self.slots, self.dim = self.w["memory_slot_identity"].shape
        self.width = self.dim // heads
        table = self.w["memory_slot_identity"]
        self.identity = np.stack([math.sqrt(self.dim) * unit(row, 1e-12) for row in table])

    def linear(self, name: str, x: Array) -> Array:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean()
        return centred / np.sqrt(np.mean(centred**2) + 1e-5) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def part(self, x: Array, head: int) -> Array:
        """The head's share of a vector."""
        size = len(x) // self.heads
        return x[head * size : (head + 1) * size]

    def attention(self, name: str, queries: list[Array], keys: list[Array], values: list[Array], near: bool) -> Array:
        weight = np.split(self.w[f"{name}.in_proj_weight"], 3)
        bias = np.split(self.w[f"{name}.in_proj_bias"], 3)
        q, k, v = ([weight[i] @ x + bias[i] for x in xs] for i, xs in enumerate((queries, keys, values)))
        out = []
        for i, query in enumerate(q):
            allowed = [j for j in range(len(k)) if not near or abs(i - j) < self.window]
            mixed = []
            for head in range(self.heads):
                scores = np.array([self.part(query, head) @ self.part(k[j], head) for j in allowed])
                shares = softmax(scores / math.sqrt(self.width))
                mixed.append(sum(s * self.part(v[j], head) for s, j in zip(shares, allowed, strict=True)))
            out.append(self.linear(f"{name}.out_proj", np.concatenate(mixed)))
        return np.stack(out)

    def core(self, embeddings: Array, tokens: Array, scalars: Array, memory: Array, working: Array):
        """New latents [C, D] and the context [C, H]."""
        t = tokens.astype(np.float64)
        seen = []
        for j in range(len(t)):
            query = self.w["core_read.query.weight"] @ t[j]
            read = [
                unit(silu(self.part(query, head))) @ working[:, head * self.width : (head + 1) * self.width]
                for head in range(self.heads)
            ]
            seen.append(
                self.w["embedding_projection.weight"] @ embeddings[j]
                + self.w["scalar_projection.weight"] @ scalars[j]
                + self.w["core_read.out.weight"] @ rms_norm(np.concatenate(read))
            )
        blocks = len({name.split(".")[1] for name in self.w if name.startswith("blocks.")})
        for block in range(blocks):
            stem = f"blocks.{block}"
            t = self.update(f"{stem}.temporal_update", f"{stem}.state_norm", f"{stem}.observation_norm", t, seen)
            normed = [self.norm(f"{stem}.state_norm", x) for x in t]
            t = t + self.attention(f"{stem}.local_attention", normed, normed, normed, True)
            queries = [self.norm(f"{stem}.state_norm", x) for x in t]
            keys = [self.norm(f"{stem}.memory_address_norm", x) for x in memory + self.identity]
            values = [self.norm(f"{stem}.memory_value_norm", x) for x in memory]
            t = t + self.attention(f"{stem}.token_memory_attention", queries, keys, values, False)
            inner = [silu(self.linear(f"{stem}.token_ff.0", self.norm(f"{stem}.token_ff_norm", x))) for x in t]
            t = t + np.stack([self.linear(f"{stem}.token_ff.2", x) for x in inner])
            t = np.stack([self.norm(f"{stem}.stored_token_norm", x) for x in t])
            seen = list(t)
        return t, np.stack([self.w["output_projection.weight"] @ self.norm("output_norm", x) for x in t])

    def update(self, update: str, old_norm: str, seen_norm: str, old: Array, seen: list[Array]) -> Array:
        rows = []
        for x, y in zip(old, seen, strict=True):
            both = np.concatenate([self.norm(old_norm, x), self.norm(seen_norm, y)])
            gate, candidate = np.split(self.linear(update, both), 2)
            rows.append(sigmoid(gate) * x + (1 - sigmoid(gate)) * silu(candidate))
        return np.stack(rows)

    def write(self, stem: str, memory: Array, x: Array) -> Array:
        """One delta-rule step on memory [M, D] with a feature row."""
        out = memory.copy()
        for head in range(self.heads):
            columns = slice(head * self.width, (head + 1) * self.width)
            key = unit(silu(self.part(self.linear(f"{stem}.key", x), head)))
            value = self.part(self.linear(f"{stem}.value", x), head)
            erase = sigmoid(self.part(self.linear(f"{stem}.erase", x), head))
            write = sigmoid(self.part(self.linear(f"{stem}.write", x), head))
            decay = self.part(self.linear(f"{stem}.decay", x), head)
            decay = np.exp(-np.exp(self.w[f"{stem}.a_log"][head]) * np.log1p(np.exp(decay)))
            kept = (np.eye(self.slots) - np.outer(key, erase * key)) @ np.diag(decay) @ memory[:, columns]
            out[:, columns] = kept + np.outer(key, write * value)
        return out

    def observe(self, tokens: Array, scalars: Array, *, heavy: Array, context: Array, working: Array, valid: Array):
        """New latents [C, D] and working memory [M, D]; `scalars` [C, 6]; some position must be valid."""
        raw = [
            self.w["observe.heavy_projection.weight"] @ rms_norm(h)
            + self.w["observe.working_projection.weight"] @ rms_norm(c)
            + self.w["observe.scalar_projection.weight"] @ s
            for h, c, s in zip(heavy, context, scalars, strict=True)
        ]
        new = self.update("observe.update", "observe.state_norm", "observe.input_norm", tokens, raw)
        rows = [self.norm("observe.input_norm", y) for y in raw]
        chosen = np.flatnonzero(valid)
        omega, score = self.w["observe.pool.omega"][0], self.w["observe.pool.score"]
        shares = softmax(np.array([omega * scalars[j, 0] + score @ rows[j] for j in chosen]))
        pooled = sum(share * rows[j] for share, j in zip(shares, chosen, strict=True))
        return np.where(valid[:, None], new, tokens), self.write("observe.writer", working, pooled)

    def commit(
        self, memory: Array, embeddings: Array, *, heavy: Array, context: Array, prefix: int, reason: int
    ) -> Array:
        """New memory [M, D] after a commit of all the embeddings given."""
        count, canvas = len(embeddings), len(heavy)
        for j in range(count):
            place = [math.log1p(prefix + j) / math.log(self.max_positions), j / canvas, count / canvas]
            x = (
                self.w["commit.embed_projection.weight"] @ rms_norm(embeddings[j])
                + self.w["commit.heavy_projection.weight"] @ rms_norm(heavy[j])
                + self.w["commit.working_projection.weight"] @ rms_norm(context[j])
                + self.w["commit.reason_embedding"][reason]
                + self.w["commit.position_projection.weight"] @ np.array(place)
            )
            memory = self.write("commit.writer", memory, self.norm("commit.norm", x))
        return memory * np.minimum(1, 4 / np.sqrt(np.mean(memory**2, axis=-1, keepdims=True)))

    def read(self, bus: str, reader: int, hidden: Array, *, source: Array, keys: Array, seen: Array) -> Array:
        """Hidden states [C, H] after a read; `source` are the rows that keys and values come from."""
        stem = f"{bus}.readers.{reader}"
        normed = [rms_norm(x, self.w[f"{bus}.source_norm.weight"]) for x in source]
        offset = self.identity if bus.startswith("persistent") else np.zeros((len(source), 1))
        k = [self.w[f"{bus}.key.weight"] @ (x + o) for x, o in zip(normed, offset, strict=True)]
        v = [self.w[f"{bus}.value.weight"] @ x for x in normed]
        out = []
        for j, row in enumerate(hidden):
            if not len(keys) or not seen[j]:
                out.append(row)
                continue
            query = self.w[f"{stem}.query.weight"] @ rms_norm(row, self.w[f"{stem}.query_norm.weight"])
            found = []
            for head in range(self.heads):
                scores = np.array([self.part(query, head) @ self.part(k[i], head) for i in keys])
                shares = softmax(scores / math.sqrt(self.width))
                found.append(sum(s * self.part(v[i], head) for s, i in zip(shares, keys, strict=True)))
            term = capped(self.w[f"{stem}.out.weight"] @ np.concatenate(found), row)
            out.append(row + np.tanh(self.w[f"{stem}.gate"][0]) * term)
        return np.stack(out)
