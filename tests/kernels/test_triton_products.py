"""Products compiled for GPUs that are not there: registers, shared memory, and the instructions of
tensor cores.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pretended import Machine

from fp4train.backends import scaled
from fp4train.quantize import Decoded

triton = pytest.importorskip(
    "triton", reason="triton is not installed (Linux only: pip install triton)"
)

from compile_triton import compile_launch, launches_of, resources  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True
    )


pytestmark = pytest.mark.usefixtures("triton_cache")


def scaled_product(
    sizes: tuple[int, int, int],
    *,
    rows: bool = False,
    adds: bool = False,
    bias: bool = False,
    cublas: bool = False,
    both: bool = False,
) -> list[Any]:
    """The launches of a product [R, S] of depth C: its scales those of rows, or of tensors; beside
    one of cuBLAS; `both`: two products at once, of which the second may be added.
    """
    (R, S, C), products = sizes, scaled.ScaledProducts()
    a = torch.zeros(C, R).bfloat16().T if adds else torch.zeros(R, C).bfloat16()
    b = torch.zeros(S, C).bfloat16()
    first, second = (torch.ones(R, 1), torch.ones(S, 1)) if rows else torch.ones(2).unbind()
    left = Decoded(a, first)
    right = Decoded(b, second)

    def call() -> None:
        scaled._plan_product.cache_clear()
        if both:
            out = torch.zeros(R, S).bfloat16()
            assert products.both((left, right), out, (left, right), torch.zeros(R, S), adds=adds)
        elif adds:
            products.add(torch.zeros(R, S), left, right)
        else:
            added = torch.zeros(S).bfloat16() if bias else None
            products.product(left, right, out_dtype=torch.bfloat16, bias=added)

    library = mock.Mock() if cublas else None
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        machine.interprets_triton(False)
        machine.multiplies_like_a_gpu(cublas=library)
        return launches_of(call)


PRODUCTS: dict[str, tuple[tuple[int, int, int], dict[str, bool], int]] = {
    "hopper": ((4096, 2048, 2048), {}, 90),
    "blackwell": ((4096, 2048, 2048), {}, 100),
    "beside cublas": ((4096, 2048, 2048), {"cublas": True}, 90),
    "added beside cublas": ((4096, 2048, 2048), {"adds": True, "cublas": True}, 90),
    "both beside cublas": (
        (4096, 2048, 2048),
        {"adds": True, "cublas": True, "both": True},
        90,
    ),
    "added": ((4096, 2048, 2048), {"adds": True}, 90),
    "rows and bias of odd sizes": ((4095, 2047, 2055), {"rows": True, "bias": True}, 80),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compile_without_spills_for_tensor_cores_and_fit_their_shared_memory(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    sizes, options, capability = PRODUCTS[name]
    for launch in scaled_product(sizes, **options):
        compiled = compile_launch(launch, capability)
        kernel = launch.launch.kernel.__name__
        found = resources(compiled.asm["cubin"], tmp_path)
        record_property(
            f"{kernel}, SM {capability}",
            f"{found['REG']} registers, {compiled.metadata.shared} bytes",
        )
        assert found["STACK"] == found["LOCAL"] == 0, f"{kernel} spills registers: {found}"
        ptx = compiled.asm["ptx"]
        assert ".ftz" not in ptx, "a flushed subnormal would change products"
        assert compiled.metadata.shared <= (227 if capability in (90, 100) else 99) << 10
        if "scaled_product" in kernel:
            tensor_core = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[capability]
            assert tensor_core in ptx
            assert ("cp.async" in ptx) == ("odd" not in name), (
                "operands are copied past the registers"
            )
