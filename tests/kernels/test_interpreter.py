"""The interpreter of the tests, which does once what Triton's own does again and again, gives the
same numbers.
"""

import pytest
from interpreted import interpreted
from needs_triton import needs_triton

PROGRAM = """
import torch
from gpu_cases import IN_STEPS, PIECES, cases, one_form
from gpu_kernels import check

bf16 = [torch.bfloat16]
chosen = list(cases(shapes=[(20, 40)], kinds=["wide"], dtypes=bf16))
chosen += one_form({**PIECES, **IN_STEPS}, [(20, 40)], ["nan"], bf16)
chosen = chosen[::2]
for case in chosen:
    assert check(case, "cpu") == {}, (case, check(case, "cpu"))
print(len(chosen))
"""


@pytest.mark.long
@needs_triton
def test_kernels_have_the_bits_of_the_reference_in_tritons_own_interpreter_too() -> None:
    """All other tests of kernels run in the interpreter of `interpreted.hasten`."""
    run = interpreted("-c", PROGRAM, hastened=False)
    assert run.stdout.strip().isdigit() and int(run.stdout) > 20, run.stdout + run.stderr
