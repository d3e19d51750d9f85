"""The blocks of a model, for the common containers of stacked layers; which layers stay
unconverted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.precision import Layer, find_blocks, find_layers

WIDTH = 32


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()


class Dense(nn.Module):
    """A plain Transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = linear(), linear()


CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "ModuleList": nn.ModuleList,
    "Sequential": lambda parts: nn.Sequential(*parts),
    "named Sequential": lambda parts: nn.Sequential(
        OrderedDict((f"layer_{i}", p) for i, p in enumerate(parts))
    ),
    "ModuleDict": lambda parts: nn.ModuleDict({str(i): p for i, p in enumerate(parts)}),
    "ModuleDict of words": lambda parts: nn.ModuleDict(
        {"abcdefghijkl"[i]: p for i, p in enumerate(parts)}
    ),
}


class Moe(nn.Module):
    """Attention and a mixture of experts; the experts are in their own container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.attention, self.router = Attention(), nn.Linear(WIDTH, 4)
        self.experts = CONTAINERS[container]([Mlp() for _ in range(4)])


class Attributes(nn.Module):
    """Parts as plain attributes."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def layout(model: nn.Module) -> list[list[str]]:
    """Names of the layers of each block; the last list is those outside the blocks."""
    layers = find_layers(model).values()
    (count,) = {layer.blocks for layer in layers}
    by_block = [[x.name for x in layers if x.block == i] for i in range(count)]
    return [*by_block, [x.name for x in layers if x.block is None]]


def heads(model: nn.Module) -> list[str]:
    """The common prefix of the layer names of each block."""
    *blocks, _ = layout(model)
    out = []
    for names in blocks:
        parts = [name.split(".") for name in names]
        same = [group[0] for group in zip(*parts, strict=False) if len(set(group)) == 1]
        out.append(".".join(same))
    return out


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Module, list[nn.Module]]:
    """(container, its blocks): of one class or with experts inside; of several classes if the
    container allows it.
    """
    container = draw(st.sampled_from(sorted(CONTAINERS)))
    experts = draw(st.sampled_from(sorted(CONTAINERS)))
    kinds: list[Callable[[], nn.Module]] = [Dense, Mamba, lambda: Moe(experts)]
    count = draw(st.integers(2, 5))
    kind = draw(st.sampled_from(kinds))
    blocks = [kind() for _ in range(count)]
    if container in ("ModuleList", "ModuleDict") and draw(st.booleans()):
        blocks = [draw(st.sampled_from(kinds))() for _ in range(count)]
    return CONTAINERS[container](blocks), blocks


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda stack: stack,
    "with input and head": lambda stack: Attributes(inputs=linear(), blocks=stack, head=linear()),
    "in a ModuleDict": lambda stack: nn.ModuleDict(
        {"embed": nn.Embedding(4, WIDTH), "h": stack, "head": linear()}
    ),
    "as in transformers": lambda stack: Attributes(
        model=Attributes(
            embed_tokens=nn.Embedding(4, WIDTH), layers=stack, norm=nn.LayerNorm(WIDTH)
        ),
        lm_head=linear(),
    ),
    "with MLPs around": lambda stack: Attributes(
        inputs=nn.Sequential(linear(), nn.GELU(), linear()),
        blocks=stack,
        head=nn.Sequential(linear(), linear()),
    ),
    "in a Sequential": lambda stack: nn.Sequential(linear(), stack, nn.LayerNorm(WIDTH), linear()),
    "wrapped twice": lambda stack: Attributes(module=Attributes(module=Attributes(blocks=stack))),
    "beside two attentions": lambda stack: Attributes(
        blocks=stack, pool1=Attention(), pool2=Attention()
    ),
    "beside several heads": lambda stack: Attributes(
        heads=nn.ModuleList([linear(), linear()]), blocks=stack
    ),
}


@settings(max_examples=40)
@given(stacks(), st.sampled_from(sorted(WRAPPERS)))
def test_the_entries_of_a_stack_are_the_blocks_whatever_holds_and_surrounds_them(
    stack: tuple[nn.Module, list[nn.Module]], wrapper: str
) -> None:
    container, blocks = stack
    model = WRAPPERS[wrapper](container)
    assert [id(block) for block in find_blocks(model)] == [id(block) for block in blocks]
    inside = {part: i for i, block in enumerate(blocks) for part in block.modules()}
    for name, layer in find_layers(model).items():
        assert layer.block == inside.get(model.get_submodule(name))
        assert layer.blocks == len(blocks)
    before = layout(model)
    assert layout(f4.convert(model)) == before, "conversion moves no layer"


@settings(max_examples=25)
@given(stacks(), stacks())
def test_all_stacks_count_in_the_order_of_definition(
    first: tuple[nn.Module, list[nn.Module]], second: tuple[nn.Module, list[nn.Module]]
) -> None:
    for model in (
        Attributes(
            encoder=Attributes(layers=first[0]), decoder=Attributes(layers=second[0]), head=linear()
        ),
        Attributes(encoder=first[0], decoder=Attributes(norm=nn.LayerNorm(4), layers=second[0])),
        nn.ModuleDict(
            {"encoder": Attributes(layers=first[0]), "decoder": Attributes(layers=second[0])}
        ),
    ):
        assert [id(block) for block in find_blocks(model)] == [
            id(block) for block in first[1] + second[1]
        ]


def test_a_list_with_one_entry_is_a_stack_of_one() -> None:
    assert heads(Attributes(inputs=linear(), blocks=nn.ModuleList([Dense()]), head=linear())) == [
        "blocks.0"
    ]


def test_attributes_of_one_class_are_blocks_where_nothing_else_is() -> None:
    assert heads(Attributes(inputs=linear(), block1=Dense(), block2=Dense(), head=linear())) == [
        "block1",
        "block2",
    ]
    assert heads(Attributes(early=Dense(), late=Dense(), head=linear())) == ["early", "late"]
    moe = Attributes(block1=Moe("ModuleList"), block2=Moe("Sequential"), head=linear())
    assert heads(moe) == ["block1", "block2"], "experts belong to the block"
    stages = Attributes(
        layer1=nn.Sequential(Dense(), Dense()), layer2=nn.Sequential(Dense(), Dense())
    )
    assert heads(stages) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_two_attentions_of_one_layer_are_not_its_blocks() -> None:
    layer = Attributes(
        self_attention=Mamba(), cross_attention=Mamba(), gate=linear(), up=linear(), down=linear()
    )
    assert [x.block for x in find_layers(layer).values()] == list(range(7)), (
        "a block for each linear layer"
    )
    decoder = find_layers(nn.TransformerDecoderLayer(WIDTH, 2))
    assert decoder["linear1"].block is not None


def test_in_a_sequential_what_stands_before_and_after_the_repeated_part_is_outside() -> None:
    model = nn.Sequential(
        Mlp(), Dense(), Mamba(), linear(), Dense(), nn.Sequential(linear(), nn.GELU())
    )
    assert heads(model) == ["1", "2", "4"]
    assert layout(model)[-1] == ["0.up", "0.down", "3", "5.0"]


def test_a_model_without_repeated_parts_has_a_block_for_each_layer() -> None:
    for model in (
        nn.Sequential(linear(), nn.GELU(), linear()),
        Attributes(a=linear(), mlp=Mlp()),
        Attention(),
    ):
        assert [x.block for x in find_layers(model).values()] == list(
            range(len(find_layers(model)))
        )
        assert find_blocks(model) == [model]


def test_lists_of_bare_linear_layers_are_blocks_where_there_are_no_others() -> None:
    assert heads(Attributes(layers=nn.ModuleList([linear(), linear()]), head=linear())) == [
        "layers.0",
        "layers.1",
    ]


def test_the_layers_of_the_default_model_are_its_blocks_in_order() -> None:
    model = Llama(layers=3).build(vocab_size=64, seq_len=8)
    parts = (
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    )
    names = [f"blocks.{i}.{part}" for i in range(3) for part in parts]
    assert layout(model) == [names[:7], names[7:14], names[14:], ["head"]]
    assert all(layer.unconverted is None for layer in find_layers(model).values())


def test_blocks_are_found_through_data_parallel_wrappers() -> None:
    model = Attributes(blocks=nn.ModuleList([Dense(), Dense()]), head=linear())
    assert heads(nn.DataParallel(model)) == ["module.blocks.0", "module.blocks.1"]


# Modules in several places


def test_a_shared_block_is_one_block() -> None:
    block = Dense()
    assert len(find_blocks(Attributes(blocks=nn.ModuleList([block, block, Dense()])))) == 2
    model = Attributes(blocks=nn.Sequential(Dense(), Dense()), head=linear())
    model.alias = model.blocks
    assert len(find_blocks(model)) == 2, "an alias of the stack counts nothing twice"


def test_a_layer_that_has_a_first_name_outside_of_its_block_belongs_to_the_block() -> None:
    block = Dense()
    model = Attributes(first=block, blocks=nn.ModuleList([block, Dense()]))
    assert find_layers(model)["first.mlp.up"].block == 0


# Models that name their blocks


class Named(nn.Module):
    answer: object = ("b", "a.inner")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Attributes(inner=Dense()), Mamba(), linear()
        self.experts = nn.ModuleList([Mlp(), Mlp()])
        self.norm = nn.LayerNorm(WIDTH)

    def fp4train_blocks(self) -> object:
        return self.answer


def test_a_model_names_its_blocks_by_method_property_or_attribute() -> None:
    assert heads(Named()) == ["b", "a.inner"]
    assert heads(Attributes(inner=Named(), head=linear())) == ["inner.b", "inner.a.inner"], (
        "paths are its own"
    )

    class ByProperty(Named):
        @property
        def fp4train_blocks(self) -> Iterator[nn.Module]:  # type: ignore[override]
            yield from (self.a, self.b)

    class ByAttribute(Named):
        fp4train_blocks = ("a", "b", "norm")  # type: ignore[assignment]

    assert heads(ByProperty()) == ["a.inner", "b"]
    assert len(find_blocks(ByAttribute())) == 2, "a norm holds no linear layer"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            ["a", "c"],
            ValueError,
            r"Named.fp4train_blocks names 'c', which is not a module of Named; it has a, b, head",
        ),
        (["a", "b", "a.inner"], ValueError, r"overlap: 'a' and 'a.inner'"),
        (["b", "b"], ValueError, r"overlap: 'b' and 'b'"),
        ([Dense()], ValueError, r"gives a Dense that is not part of Named"),
        ([3], TypeError, r"gives 3 as a block"),
        ("a", TypeError, r"gives str; it must give the block paths"),
        (7, TypeError, r"gives int"),
        ([], ValueError, r"names no block that holds a linear layer: it is empty"),
        (["norm"], ValueError, r"names no block that holds a linear layer: norm"),
    ],
)
def test_a_wrong_answer_is_refused_by_name(
    answer: object, error: type[Exception], message: str
) -> None:
    model = Named()
    model.answer = answer
    with pytest.raises(error, match=message):
        find_layers(model)


# Why a layer stays unconverted


def test_what_convert_leaves_alone_says_why() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    wrapped = linear()
    wrapped.forward = lambda x: x  # type: ignore[method-assign]
    adapter = Attributes(
        base_layer=linear(), lora_A=nn.ModuleDict({"default": nn.Linear(WIDTH, 8)})
    )
    parametrised = nn.utils.parametrizations.orthogonal(linear())
    model = Attributes(
        plain=linear(),
        doubling=Doubling(16, 16),
        lazy=nn.LazyLinear(16),
        wrapped=wrapped,
        adapter=adapter,
        attention=nn.MultiheadAttention(WIDTH, 2),
        parametrised=parametrised,
        thin=nn.Linear(4, 8),
        ours=f4.nn.Linear(4, 8),
    )
    found = {name: layer.unconverted for name, layer in find_layers(model).items()}
    assert found == {
        "plain": None,
        "doubling": "Doubling is a subclass of nn.Linear with a forward of its own",
        "lazy": "LazyLinear has no weights before its first batch: run one, then convert",
        "wrapped": "its forward is replaced on the instance: convert the model before it is "
        "wrapped or dispatched",
        "adapter.base_layer": None,
        "adapter.lora_A.default": "adapter (lora_A): kept in high precision by its name",
        "attention.out_proj": "nn.MultiheadAttention multiplies its weights itself; use "
        "separate projections",
        "parametrised": "ParametrizedLinear is a subclass of nn.Linear with a weight of its own",
        "thin": None,
        "ours": None,
    }


def test_the_reason_is_no_part_of_a_layers_identity() -> None:
    one = Layer(name="a", in_features=16, out_features=16, block=0, blocks=1)
    other = Layer(name="a", in_features=16, out_features=16, block=0, blocks=1, unconverted="why")
    assert one == other
    assert hash(one) == hash(other)
