"""A product of BF16 or FP16 matrices whose scales are applied where it is summed: in float32, in
registers.

    y [R, S] = (a [R, C] · b [S, C]ᵀ) · scale of a · scale of b + bias [S] (+ y)

scaled_product    the product; y is written once, in its dtype, or read and written where the product is added to it
product_factors   the one factor of both scales, for a product of cuBLAS
two_…             the same of two products, in one launch

Two scales of whole tensors are multiplied with each other first, and the sum by their product, as a
CPU's product has it (`backends/emulate.py`). Where that product is no normal float32 number, it
would lose digits: the scales are then applied one after the other. Scales of rows are always
applied one after the other.

Bytes per element of y: 2 in BF16, 4 in float32, 8 where it is added to float32; the scales and the
bias besides.

The sum of a tile stays in the registers of one program: 128 x 256 float32 numbers of 8 warps are
128 registers a thread. Operands come through shared memory in three stages of 48 KB, which Hopper's
and Blackwell's multiprocessors hold. Tiles of 128 x 128 and depth 64 have stages of 32 KB, which
fit every GPU from compute capability 8.0 on. Tiles of 128 x 128 and depth 32 leave more registers:
they are taken where operands pass through registers (a tile is not whole, or a row does not begin
at a multiple of 32 bytes) and where the product is added to a tile that is read. Tiles of 64 x 64
are taken where larger ones are fewer than the multiprocessors. A launch has one program per
multiprocessor, each of which takes tile after tile, eight rows of tiles at a time, so that what
neighbours read stays in the L2 cache.

Where cuBLAS's factor is 0, an infinite sum of products becomes NaN in cuBLAS, and so does what it
is added to. Before that, `product_factors` marks which of these numbers are finite, infinite or
NaN. `scaled_product` reads the mark where it finds NaN: a finite number and an infinite product are
infinite. Marks take 1 byte per element of y.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding
from fp4train.kernels.triton.scale import is_factor, product_factor

MARKED: tl.constexpr = tl.constexpr(1024)
"""Numbers that a program marks at once."""


@triton.jit
def load_scale(scale_ptr, KIND: tl.constexpr):
    """The scale of a tensor; 1 where there is none, or one per row."""
    if KIND == "tensor":
        return tl.load(scale_ptr)
    else:
        return 1.0


@triton.jit
def as_mark(number):
    """0: a float32 number is finite; 1: it is infinity; 2: it is minus infinity; 3: it is NaN.
    uint8.
    """
    infinite = tl.where(number == float("inf"), 1, tl.where(number == float("-inf"), 2, 0))
    return tl.where(number != number, 3, infinite).to(tl.uint8)


@triton.jit
def from_mark(mark):
    """The float32 number that has a mark of `as_mark`; 0 for every finite one."""
    infinite = tl.where(mark == 1, float("inf"), tl.where(mark == 2, float("-inf"), 0.0))
    return tl.where(mark == 3, float("nan"), infinite)


@triton.jit(
    do_not_specialize=["numbers", "blocks", "programs"],
    do_not_specialize_on_alignment=["first_ptr", "second_ptr"],
)
def product_factors(
    first_ptr,
    second_ptr,
    total_ptr,
    marks_ptr,
    out_ptr,
    numbers,
    blocks,
    programs,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ADDS: tl.constexpr,
):
    """out float32 [2]: the factor of the product, and that of what it is added to.

    The first is 0 where the scales have no product that is a factor: `scaled_product` does it then.
        There the numbers
    of total, float32 [numbers] to which the product is added, are marked in marks, uint8 [numbers].
    """
    factor = product_factor(load_scale(first_ptr, FIRST), load_scale(second_ptr, SECOND))
    taken = factor != 0.0
    if tl.program_id(0) == 0:
        tl.store(out_ptr, factor)
        tl.store(out_ptr + 1, 1.0 if ADDS else 0.0)
    if ADDS:
        for block in range(tl.program_id(0), tl.where(taken, 0, blocks), programs):
            place = tl.cast(block, tl.int64) * MARKED + tl.arange(0, MARKED)
            number = tl.load(total_ptr + place, mask=place < numbers, other=0.0)
            tl.store(marks_ptr + place, as_mark(number), mask=place < numbers)


@triton.jit(
    do_not_specialize=["numbers", "blocks", "programs"],
    do_not_specialize_on_alignment=["first_ptr", "second_ptr", "third_ptr", "fourth_ptr"],
)
def two_product_factors(
    first_ptr,
    second_ptr,
    out_ptr,
    third_ptr,
    fourth_ptr,
    total_ptr,
    marks_ptr,
    other_out_ptr,
    numbers,
    blocks,
    programs,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    FOURTH: tl.constexpr,
    ADDS: tl.constexpr,
):
    """The factors of a product that is written, and of one that may be added to `total`."""
    product_factors(
        first_ptr, second_ptr, out_ptr, out_ptr, out_ptr, 0, 0, programs,
        FIRST, SECOND, False,
    )  # fmt: skip
    product_factors(
        third_ptr, fourth_ptr, total_ptr, marks_ptr, other_out_ptr, numbers, blocks, programs,
        THIRD, FOURTH, ADDS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "second_ptr"])
def scaled_product(
    a_ptr,
    b_ptr,
    first_ptr,
    second_ptr,
    bias_ptr,
    marks_ptr,
    out_ptr,
    rows,
    cols,
    depth,
    a_stride,
    a_step,
    b_stride,
    b_step,
    programs,
    P: tl.constexpr,
):
    """out [rows, cols], whose rows are contiguous, of a [rows, depth] and b [cols, depth], of any
    strides.

    first_ptr, second_ptr: float32, [1] or one of each row of a or b (`ProductVariant.first`,
        `second`). bias_ptr:
    [cols], not read without P.bias. marks_ptr: those of `product_factors`, read with P.corrects and
    P.adds alone.
    """
    a_scale = load_scale(first_ptr, tl.constexpr(P.first))
    b_scale = load_scale(second_ptr, tl.constexpr(P.second))
    across = tl.cdiv(cols, P.tile_cols)
    down = tl.cdiv(rows, P.tile_rows)
    tiles = across * down
    if P.first != "row" and P.second != "row":
        product = a_scale * b_scale
        taken = is_factor(product)
        a_scale = tl.where(taken, product, a_scale)
        b_scale = tl.where(taken, 1.0, b_scale)
        if P.corrects:
            tiles = tl.where(taken, 0, tiles)
    for tile in range(tl.program_id(0), tiles, programs):
        start = tile // (P.group * across) * P.group
        height = tl.minimum(down - start, P.group)
        place = tile % (P.group * across)
        row = (start + place % height) * P.tile_rows + tl.arange(0, P.tile_rows)
        col = place // height * P.tile_cols + tl.arange(0, P.tile_cols)
        total = sum_of_tile(
            a_ptr, b_ptr, row, col, rows, cols, depth, a_stride, a_step, b_stride, b_step, P
        )
        if P.first == "row":
            total *= tl.load(first_ptr + row, mask=row < rows, other=0.0)[:, None]
        else:
            total *= a_scale
        if P.second == "row":
            total *= tl.load(second_ptr + col, mask=col < cols, other=0.0)[None, :]
        else:
            total *= b_scale
        if P.bias:
            total += rounding.as_float(tl.load(bias_ptr + col, mask=col < cols, other=0.0))[None, :]
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        place = (row.to(tl.int64) * cols)[:, None] + col[None, :]
        out = out_ptr + place
        if P.adds:
            term = tl.load(out, mask=mask, other=0.0)
            if P.corrects:
                term = tl.where(
                    term == term, term, from_mark(tl.load(marks_ptr + place, mask=mask, other=0))
                )
            total += term
        if out_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(out, rounding.as_bf16(total, P.hardware), mask=mask)
        else:
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=["first_ptr", "second_ptr", "third_ptr", "fourth_ptr"],
)
def two_scaled_products(
    a_ptr,
    b_ptr,
    first_ptr,
    second_ptr,
    out_ptr,
    c_ptr,
    d_ptr,
    third_ptr,
    fourth_ptr,
    marks_ptr,
    total_ptr,
    rows,
    cols,
    depth,
    a_stride,
    a_step,
    b_stride,
    b_step,
    other_rows,
    other_cols,
    other_depth,
    c_stride,
    c_step,
    d_stride,
    d_step,
    programs,
    P: tl.constexpr,
    Q: tl.constexpr,
):
    """Two products without a bias."""
    scaled_product(
        a_ptr, b_ptr, first_ptr, second_ptr, out_ptr, out_ptr, out_ptr,
        rows, cols, depth, a_stride, a_step, b_stride, b_step, programs, P,
    )  # fmt: skip
    scaled_product(
        c_ptr, d_ptr, third_ptr, fourth_ptr, total_ptr, marks_ptr, total_ptr,
        other_rows, other_cols, other_depth, c_stride, c_step, d_stride, d_step, programs, Q,
    )  # fmt: skip


@triton.jit
def sum_of_tile(
    a_ptr, b_ptr, row, col, rows, cols, depth, a_stride, a_step, b_stride, b_step, P: tl.constexpr
):
    """float32 [tile_rows, tile_cols]: a · bᵀ of rows `row` of a and `col` of b; what lies outside
    counts as zero.
    """
    ROWS: tl.constexpr = P.tile_rows
    COLS: tl.constexpr = P.tile_cols
    place = tl.arange(0, P.tile_depth)
    a = a_ptr + (row.to(tl.int64) * a_stride)[:, None] + (place.to(tl.int64) * a_step)[None, :]
    b = b_ptr + (col.to(tl.int64) * b_stride)[None, :] + (place.to(tl.int64) * b_step)[:, None]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, depth, P.tile_depth):
        if P.whole:
            x = tl.load(a)
            y = tl.load(b)
        else:
            inside = place < depth - start
            x = tl.load(a, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            y = tl.load(b, mask=inside[:, None] & (col < cols)[None, :], other=0.0)
        if P.hardware:
            total = tl.dot(x, y, total)
        else:  # the interpreter would multiply the bits of BF16 numbers
            total = tl.dot(rounding.as_float(x), rounding.as_float(y), total)
        a += tl.cast(a_step, tl.int64) * P.tile_depth
        b += tl.cast(b_step, tl.int64) * P.tile_depth
    return total
