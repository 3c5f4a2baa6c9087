"""Reference arrays of the hybrid families: trunk, draft head, and how many drafts are accepted.

For each prompt P: `P_ids` [1, S]; of the trunk `P_logits` [S, V], `P_post` [S, H] (after the final norm, what the
output head reads), `P_pre` [S, H] (before it); of the head over the pairs (post row i, id i + 1) `P_head_hidden`
[S - 1, H] and `P_head_logits` [S - 1, V]; of three drafts chained after the greedy next token `P_chain_ids` [4] (that
token, then the drafts), `P_chain_hidden` [3, H], `P_chain_logits` [3, V].

For each tuned checkpoint T: `T_prompt` [P], `T_tokens` [48] (greedy), and for depths 1 to 5 `T_depth_d` [rounds, 2],
the numbers of drafted and accepted tokens of each round (see `count_rounds`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration, Qwen3NextForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

Arrays = dict[str, np.ndarray]

CLASSES = {
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    "qwen3_next": Qwen3NextForCausalLM,
}
CHAIN = 3
NEW_TOKENS = 48
DEPTHS = (1, 2, 3, 4, 5)
# Counts have to be exact in every implementation, so no choice may hang on rounding.
SMALLEST_MARGIN = 2e-4


def pick(logits: torch.Tensor) -> int:
    """The greedy token of logits [1, 1, V], which has to lead clearly."""
    first, second = logits[0, -1].topk(2).values.tolist()
    if first - second < SMALLEST_MARGIN:
        raise SystemExit(f"two tokens are within {first - second:.1e} of each other: take another seed")
    return int(logits[0, -1].argmax())


class Head:
    """transformers' own draft head over a loaded trunk; its rows are the pairs (hidden of row i, id i + 1)."""

    def __init__(self, trunk: Any) -> None:
        config = trunk.config.get_text_config()
        # Neither the release nor transformers' configuration says these two; MtpModel asks for them.
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        self.model = MtpModel.from_pretrained(trunk).float().eval()
        self.axes = 3 if "mrope_section" in config.rope_parameters else 0
        self.mtp_config = trunk.config.get_mtp_config()

    def make_cache(self) -> MtpCache:
        return MtpCache(config=self.mtp_config)

    def rows(self, hidden: torch.Tensor, ids: torch.Tensor, cache: MtpCache, *, first: int) -> torch.Tensor:
        """Hidden [1, R, H] of R rows whose first id has position `first`."""
        positions = torch.arange(first, first + ids.shape[1])[None]
        if self.axes:
            positions = positions[None].expand(self.axes, 1, -1)
        return self.model.forward_layer(0, hidden, positions, cache, input_ids=ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model._project_to_logits(hidden)

    def chain(
        self, hidden: torch.Tensor, token: torch.Tensor, cache: MtpCache, *, first: int, depth: int
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        """`depth` greedy drafts after `token`: their ids, hidden rows [1, 1, H] and logits [1, 1, V]."""
        ids, rows, logits = [], [], []
        for step in range(depth):
            hidden = self.rows(hidden, token, cache, first=first + step)
            row = self.logits(hidden)
            token = torch.tensor([[pick(row)]])
            ids.append(int(token))
            rows.append(hidden)
            logits.append(row)
        return ids, rows, logits


def trunk_rows(trunk: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Post-norm and pre-norm hidden rows [1, S, H]."""
    decoder = trunk.get_decoder()
    seen: list[torch.Tensor] = []
    hook = decoder.layers[-1].register_forward_hook(
        lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    post = decoder(input_ids=ids, use_cache=False).last_hidden_state
    hook.remove()
    return post, seen[0]


def head_arrays(trunk: Any, head: Head, ids: torch.Tensor, logits: torch.Tensor) -> Arrays:
    """What the module's docstring says of one prompt, but ids and logits."""
    post, pre = trunk_rows(trunk, ids)
    if not torch.equal(trunk.lm_head(post), logits):
        raise SystemExit("the output head does not read the post-norm rows")
    length = ids.shape[1]
    cache = head.make_cache()
    hidden = head.rows(post[:, :-1], ids[:, 1:], cache, first=1)
    token = logits[:, -1:].argmax(-1)
    drafts, rows, draft_logits = head.chain(post[:, -1:], token, cache, first=length, depth=CHAIN)
    return {
        "post": post[0].numpy(),
        "pre": pre[0].numpy(),
        "head_hidden": hidden[0].numpy(),
        "head_logits": head.logits(hidden)[0].numpy(),
        "chain_ids": np.array([int(token), *drafts], dtype=np.int32),
        "chain_hidden": torch.cat(rows, 1)[0].numpy(),
        "chain_logits": torch.cat(draft_logits, 1)[0].numpy(),
    }


def greedy(trunk: Any, prompt: torch.Tensor, *, count: int) -> list[int]:
    """`count` greedy tokens, each from a forward over everything before it."""
    ids = prompt
    for _ in range(count):
        token = pick(trunk(input_ids=ids, use_cache=False).logits)
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return ids[0, prompt.shape[1] :].tolist()


def count_rounds(trunk: Any, head: Head, prompt: torch.Tensor, tokens: list[int], *, depth: int) -> np.ndarray:
    """Drafted and accepted numbers [rounds, 2] of greedy speculation, without a speculating loop.

    The output of greedy speculation is the greedy sequence, so that is all there is to follow: `tokens[0]` comes from
    the prompt; each round starts with one token that is decided but not yet fed (the primary), drafts
    min(depth, tokens still wanted), accepts while a draft is what greedy decoding has there, and gains one token more
    from the verifying forward. The head's cache is rebuilt from the trunk's true hidden rows in every round.
    """
    sequence = torch.cat([prompt, torch.tensor([tokens])], 1)
    post, _ = trunk_rows(trunk, sequence)
    length, done, rounds = prompt.shape[1], 1, []
    while done < len(tokens):
        fed = length + done - 1  # tokens the trunk has seen; the primary stands at this index
        cache = head.make_cache()
        head.rows(post[:, : fed - 1], sequence[:, 1:fed], cache, first=1)
        wanted = min(depth, len(tokens) - done)
        primary = sequence[:, fed : fed + 1]
        drafts, _, _ = head.chain(post[:, fed - 1 : fed], primary, cache, first=fed, depth=wanted)
        accepted = 0
        while accepted < wanted and drafts[accepted] == tokens[done + accepted]:
            accepted += 1
        rounds.append((wanted, accepted))
        done += accepted + 1
    return np.array(rounds, dtype=np.int32)


def count_arrays(trunk: Any, head: Head, prompt: torch.Tensor) -> Arrays:
    """Prompt, greedy tokens and the rounds of every depth."""
    tokens = greedy(trunk, prompt, count=NEW_TOKENS)
    arrays = {"prompt": prompt[0].numpy().astype(np.int32), "tokens": np.array(tokens, dtype=np.int32)}
    for depth in DEPTHS:
        arrays[f"depth_{depth}"] = count_rounds(trunk, head, prompt, tokens, depth=depth)
    return arrays
