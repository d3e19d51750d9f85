"""One rank that passes the chunks of every sequence one after another, of which context-parallel ranks
have one each: code that it runs first (`Ranks.reference`).
"""

IN_CHUNKS = """
from dataclasses import replace

import torch
import torch.nn.functional as F

import fp4train.run.build as build
from fp4train.models.common import Attention
from fp4train.models.common.decoder import Decoder
from fp4train.models.common.lower_right import attend_last
from fp4train.nn.ranks import Ranks
from fp4train.precision.context import current, use

COUNT = {count}


class Chunk:
    'Tokens of one chunk: attention has keys and values of those before, with their graph.'

    def __init__(self, whole, number):
        self.whole, self.ranks = whole, Ranks(group=None, rank=number, size=COUNT)

    def until_here(self, border):
        if border is None:
            return None
        self.whole.borders[border.shape] = [*self.whole.borders.get(border.shape, []), border]
        return torch.cat(self.whole.borders[border.shape], 1)


class OfLayer:
    def __init__(self):
        self.kept = {{}}

    def attended(self, q, k, v, mask):
        here = current().position.token  # of a chunk that is recomputed, too
        self.kept[here] = k, v
        before = [self.kept[token] for token in sorted(self.kept) if token <= here]
        keys, values = (torch.cat(parts, 2) for parts in zip(*before))
        time, seen = q.shape[2], keys.shape[2]
        if mask is None and seen > time:
            return attend_last(q, keys, values)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


class Tied:
    'The weight of embedding and head in one chunk, whose gradients are summed before chunks are.'

    first = last = True

    def __init__(self, weight):
        self.weight = weight.view_as(weight)

    def embedding(self, w):
        return self.weight

    def head(self, x, w):
        return x, self.weight


class Whole:
    def __init__(self):
        self.borders = {{}}


original = Decoder.forward


def forward(self, tokens, targets=None, **taught):
    context, whole = current(), Whole()
    layers = [module for module in self.modules() if isinstance(module, Attention)]
    for layer in layers:
        layer.sequence = OfLayer()
    losses = []
    for number, (x, y) in enumerate(zip(tokens.chunk(COUNT, 1), targets.chunk(COUNT, 1))):
        self.sequence = Chunk(whole, number)
        if self.head.weight is self.embed.weight:
            self.stage = Tied(self.embed.weight)
        token = context.position.token + number * x.numel()
        now = replace(
            context,
            position=context.position._replace(token=token),
            auxiliary=context.auxiliary / COUNT,
        )
        with use(now):
            losses.append(original(self, x.contiguous(), y.contiguous()))
    return sum(losses) / COUNT


Decoder.forward = forward

let_layers_add = build._let_layers_add
build._let_layers_add = lambda model, config, mesh: let_layers_add(
    model, config, replace(mesh, context=COUNT)
)
"""


def in_chunks(count: int) -> str:
    """The code, of so many chunks."""
    return IN_CHUNKS.format(count=count)
