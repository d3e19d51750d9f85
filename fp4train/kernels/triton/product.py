"""A product of BF16 or FP16 matrices whose scales are applied where it is summed: in float32, in registers.

    y [R, S] = (a [R, C] · b [S, C]ᵀ) · scale of a · scale of b + bias [S] (+ y)

scaled_product    the product; y is written once, in its dtype, or read and written where the product is added to it
product_factors   the one factor of both scales, for a product of cuBLAS

Two scales of whole tensors are multiplied with each other first, and the sum by their product, as a CPU's product has
it (`backends/emulate.py`). Where that product is no normal float32 number, it would lose digits: the scales are then
applied one after the other. Scales of rows always are.

Bytes per element of y: 2 in BF16, 4 in float32, 8 where it is added to float32; the scales and the bias besides.

The sum of a tile stays in the registers of one program: 128 x 256 float32 numbers of 8 warps are 128 registers a
thread. Operands come through shared memory in three stages of 48 KB, which Hopper's and Blackwell's multiprocessors
hold; 128 x 128 tiles, 32 KB a stage, fit every GPU from compute capability 8.0 on. They are the larger ones' place too
where a tile is not whole, or a row does not begin at a multiple of 32 bytes: such loads pass through registers. A
launch has one program per multiprocessor, each of which takes tile after tile, eight rows of tiles at a time, so that
what neighbours read stays in the L2 cache.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108  (arms that are compiled apart)

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding

SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def is_factor(product):
    """Whether a product of scales can be the factor of both: it is a normal number, or NaN."""
    return ((product >= SMALLEST_NORMAL) & (product < float("inf"))) | (product != product)


@triton.jit
def load_scale(scale_ptr, KIND: tl.constexpr):
    """The scale of a tensor; 1 where there is none, or one per row."""
    if KIND == "tensor":
        return tl.load(scale_ptr)
    else:
        return 1.0


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "second_ptr"])
def product_factors(first_ptr, second_ptr, out_ptr, FIRST: tl.constexpr, SECOND: tl.constexpr, ADDS: tl.constexpr):
    """out float32 [2]: the factor of the product, and that of what it is added to.

    The first is 0 where the scales have no product that is a factor: `scaled_product` does it then.
    """
    product = load_scale(first_ptr, FIRST) * load_scale(second_ptr, SECOND)
    tl.store(out_ptr, tl.where(is_factor(product), product, 0.0))
    tl.store(out_ptr + 1, 1.0 if ADDS else 0.0)


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "second_ptr"])
def scaled_product(
    a_ptr,
    b_ptr,
    first_ptr,
    second_ptr,
    bias_ptr,
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
    """out [rows, cols], whose rows are contiguous, of a [rows, depth] and b [cols, depth], of any strides.

    first_ptr, second_ptr: float32, [1] or one of each row of a or b (`ProductVariant.first`, `second`). bias_ptr:
    [cols], not read without P.bias.
    """
    first = load_scale(first_ptr, P.first)
    second = load_scale(second_ptr, P.second)
    across = tl.cdiv(cols, P.tile_cols)
    down = tl.cdiv(rows, P.tile_rows)
    tiles = across * down
    if P.first != "row" and P.second != "row":
        product = first * second
        taken = is_factor(product)
        first = tl.where(taken, product, first)
        second = tl.where(taken, 1.0, second)
        if P.corrects:
            tiles = tl.where(taken, 0, tiles)
    for tile in range(tl.program_id(0), tiles, programs):
        start = tile // (P.group * across) * P.group
        height = tl.minimum(down - start, P.group)
        place = tile % (P.group * across)
        row = (start + place % height) * P.tile_rows + tl.arange(0, P.tile_rows)
        col = place // height * P.tile_cols + tl.arange(0, P.tile_cols)
        total = sum_of_tile(a_ptr, b_ptr, row, col, rows, cols, depth, a_stride, a_step, b_stride, b_step, P)
        if P.first == "row":
            total *= tl.load(first_ptr + row, mask=row < rows, other=0.0)[:, None]
        else:
            total *= first
        if P.second == "row":
            total *= tl.load(second_ptr + col, mask=col < cols, other=0.0)[None, :]
        else:
            total *= second
        if P.bias:
            total += rounding.as_float(tl.load(bias_ptr + col, mask=col < cols, other=0.0))[None, :]
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        out = out_ptr + (row.to(tl.int64) * cols)[:, None] + col[None, :]
        if P.adds:
            total += tl.load(out, mask=mask, other=0.0)
        if out_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(out, rounding.as_bf16(total, P.hardware), mask=mask)
        else:
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_tile(a_ptr, b_ptr, row, col, rows, cols, depth, a_stride, a_step, b_stride, b_step, P: tl.constexpr):
    """float32 [tile_rows, tile_cols]: a · bᵀ of rows `row` of a and `col` of b; what lies outside counts as zero."""
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
