"""Programs whose Triton kernels are interpreted on the CPU, each in a process of its own: Triton
decides when a kernel is defined whether it is interpreted. The processes are forks of one that has
imported torch and Triton (`interpreter_server`).

The interpreter takes a quarter of its time here: what it does again for each call of a function
within a kernel, and for each tensor of a shape and type that it has seen, is done once.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HELPERS = Path(__file__).parent


def interpreted(
    *command: str, timeout: float = 300, hastened: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python with the arguments `command`, `-c` and code or a file first, and the tests' helpers
    and scripts to import.

    hastened: whether the interpreter is that of `hasten`, else it is Triton's own.
    variables: of its environment, besides.
    """
    serving = server()
    assert serving.stdin is not None and serving.stdout is not None
    with TemporaryDirectory() as folder:
        job = {
            "command": command,
            "hastened": hastened,
            "environment": os.environ | INTERPRETS | variables,
            "folder": str(Path.cwd()),
            "outputs": folder,
            "seconds": math.ceil(timeout),
        }
        print(json.dumps(job), file=serving.stdin, flush=True)
        code = int(serving.stdout.readline())
        texts = [(Path(folder) / name).read_text("utf-8") for name in ("out", "err")]
    return subprocess.CompletedProcess(command, code, *texts)


INTERPRETS = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@cache
def server() -> "subprocess.Popen[str]":
    """The process whose forks run the programs; it ends with this one."""
    folders = (HELPERS, HELPERS.parents[1] / "scripts", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(str(folder) for folder in folders if str(folder))
    return subprocess.Popen(
        # numpy warns of divisions by zero
        [sys.executable, "-W", "ignore", str(HELPERS / "interpreter_server.py")],
        env=os.environ | INTERPRETS | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def hasten(checks_overflow: bool = True) -> None:
    """From here on, in this process. checks_overflow: sums and products of integers are compared
    with those in 64 bits, for a quarter of the time; the last call decides.
    """
    from triton.runtime import interpreter

    object.__setattr__(
        interpreter.interpreter_builder.options, "sanitize_overflow", checks_overflow
    )
    if hasattr(interpreter, "hastened"):
        return
    interpreter.hastened = True
    of_any = interpreter._get_np_dtype
    of_scalar = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_any if dtype.scalar.is_ptr() else of_scalar)(
        dtype.scalar
    )
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    keep_types()
    pass_what_is_of_the_type()
    call_without_checks()


def pass_what_is_of_the_type() -> None:
    """Two tensors of one element type are operands as they are, what a number is beside a tensor is
    found out once for its type, and what is no constexpr is not searched for some.
    """
    from triton.language import core, semantic

    of_types = core.dtype.__eq__
    of_operands = semantic.TritonSemantic.binary_op_type_checking_impl
    # is what two of it are promoted to
    itself = {"fp32", *core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, int, float, bool, str}
    constants: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def same_type(self: Any, other: Any) -> bool:
        return self is other or of_types(self, other)

    def operands(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        left = type(lhs)
        right = type(rhs)
        if left is right is core.tensor:
            if lhs.dtype is rhs.dtype and lhs.dtype.name in itself:
                return self.broadcast_impl_value(lhs, rhs)
        elif left is core.tensor and (right is int or right is float):
            constant = beside(self, lhs, rhs, False, given, named)
            if constant is not None:
                return lhs, constant
        elif right is core.tensor and (left is int or left is float):
            constant = beside(self, rhs, lhs, True, given, named)
            if constant is not None:
                return constant, rhs
        return of_operands(self, lhs, rhs, *given, **named)

    def beside(
        self: Any, tensor: Any, number: float, first: bool, given: Any, named: dict[str, Any]
    ) -> Any:
        """The tensor that `number` is as the first or the second operand beside `tensor`; None:
        `tensor` is not taken as it is.
        """
        # the zeros of both signs are equal
        exact = repr(number) if type(number) is float else number
        key = (id(tensor.type), exact, first, given, *named.items())
        if key not in constants:
            pair = (number, tensor) if first else (tensor, number)
            made = of_operands(self, *pair, *given, **named)
            constant, other = made if first else made[::-1]
            constant.handle.data.flags.writeable = False
            # the type is kept, and so is its id
            constants[key] = tensor.type, constant if other is tensor else None
        return constants[key][1]

    core.dtype.__eq__ = same_type
    core._unwrap_if_constexpr = lambda each: each if type(each) in plain else unwrap(each)
    semantic.TritonSemantic.binary_op_type_checking_impl = operands


def call_without_checks() -> None:
    """A function of Triton's language is called without the check that it is within a kernel."""
    from triton.language import core
    from triton.runtime import interpreter

    checks = core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        checked = getattr(member, "__code__", None) is checks
        function = member.__wrapped__ if checked else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def keep_types() -> None:
    """One type for all blocks of a shape and element, one shape for all types of it, what a type is
    to the interpreter and with another element found once, and no broadcast to the shape that both
    operands have.
    """
    from triton.language import core, semantic

    types: dict[tuple[object, ...], Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    describe = core.block_type.__init__
    fill = core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    of_builder = core.block_type.to_ir
    of_element = core.block_type.with_element_ty

    def kept(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = [each.value if isinstance(each, core.constexpr) else each for each in shape]
        key = id(element_ty), *sizes  # the type that is kept keeps its element's
        return types[key] if key in types else types.setdefault(key, object.__new__(cls))

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # what comes last, after the checks
            describe(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)

    def fill_from(self: Any, handle: Any, type: Any) -> None:
        of_tensors = vars(type).get("of_tensors")
        if of_tensors is None:
            fill(self, handle, type)
            type.of_tensors = self.numel, self.shape, self.dtype
            return
        self.handle = handle
        self.type = type
        self.numel, self.shape, self.dtype = of_tensors

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    def to_ir(self: Any, builder: Any) -> Any:
        if "of_builder" not in vars(self):
            self.of_builder = of_builder(self, builder)
        return self.of_builder

    def with_element_ty(self: Any, scalar: Any) -> Any:
        others = vars(self).setdefault("of_elements", {})
        if id(scalar) not in others:
            others[id(scalar)] = of_element(self, scalar)  # which keeps its element's
        return others[id(scalar)]

    core.block_type.to_ir = to_ir
    core.block_type.with_element_ty = with_element_ty
    core.block_type.__new__ = kept
    core.block_type.__init__ = describe_once
    core.tensor.__init__ = fill_from
    semantic.TritonSemantic.broadcast_impl_value = broadcast_others


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, which puts the interpreter's functions into the modules of Triton's language
    that a function sees, until the launch ends; not again for what the launch has patched.
    """
    launches: list[set[str]] = []

    def patch_for(function: Any) -> Any:
        seen = modules(function)
        if launches and seen <= launches[-1]:
            return None
        scope = patch(function)
        if launches:
            launches[-1] |= seen
            return None
        launches.append(set(seen))
        restore = scope.restore

        def end() -> None:
            launches.pop()
            restore()

        scope.restore = end
        return scope

    return patch_for


@cache
def modules(function: Any) -> frozenset[str]:
    from triton import language

    known = (language, language.core)
    return frozenset(
        each.__name__ for each in function.__globals__.values() if any(each is one for one in known)
    )
