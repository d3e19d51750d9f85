"""The code rules, checked on the source of the package: a violation fails here by name, with what
to do instead.

Each rule is a function from a file to what breaks it, and is tried on a line that breaks it, so
that it cannot pass by seeing nothing. What breaks a rule today stands in a list of exceptions with
its reason; an exception that is not needed any more fails, too.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fp4train"


@dataclass(frozen=True)
class Source:
    """One file of the package; `path` is relative to fp4train/."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """See `imported`."""
        return list(imported(self.tree))

    @cached_property
    def calls(self) -> list[tuple[int, str]]:
        """(line, called name) of every call."""
        return [(node.lineno, called(node)) for node in self.nodes if isinstance(node, ast.Call)]

    def within(self, *places: str) -> bool:
        return self.path.startswith(places)


SOURCES = [
    Source(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
]


def imported(tree: ast.AST, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what is imported; `at_import`: by the module's own statements, not
    inside of functions.
    """
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant))
        yield from imported(node, at_import=at_import)


def called(node: ast.Call) -> str:
    """The called name as written: "yaml.load"."""
    return ast.unparse(node.func)


# The rules: what breaks them, as "line: what".


def transformer_engine_outside_of_te(source: Source) -> list[str]:
    """Only backends/te knows Transformer Engine: give the rest a function of backends/te
    instead.
    """
    if source.within("backends/te/"):
        return []
    return [
        f"{line}: {name}" for line, name in source.imports if name.startswith("transformer_engine")
    ]


def triton_outside_of_its_folders(source: Source) -> list[str]:
    """Only kernels/triton and quantize/triton import triton, which a machine need not have."""
    if source.within("kernels/triton/", "quantize/triton"):
        return []
    return [
        f"{line}: {name}" for line, name in source.imports if name.partition(".")[0] == "triton"
    ]


def private_torch_at_import(source: Source) -> list[str]:
    """Importing loads no private module of torch, which may change with every version: only
    compile*.py may.
    """
    if PurePosixPath(source.path).match("compile*.py"):
        return []
    return [
        f"{line}: {n}"
        for line, n in imported(source.tree, at_import=True)
        if n.startswith("torch._")
    ]


def second_resolvers(source: Source) -> list[str]:
    """One function resolves what a layer runs, layer_plan.resolve: read its LayerPlan instead of
    deciding again.
    """
    if source.within("precision/layer_plan.py", "precision/policy.py", "backends/__init__.py"):
        return []
    decisions = ("recipe_for", "why_kept", "choices")
    return [
        f"{line}: {name}()" for line, name in source.calls if name.rpartition(".")[2] in decisions
    ]


def tables_read_back(source: Source) -> list[str]:
    """Nobody parses a rendered table: plans and estimates hold sizes, specs and reasons as data."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in source.nodes
        if isinstance(node, ast.Call)
        and called(node).endswith(("split", "partition"))
        and any(isinstance(a, ast.Constant) and a.value in ("×", "│", "─") for a in node.args)
    ]


def backends_by_identity(source: Source) -> list[str]:
    """A backend is known by its protocol: outside of backends/ nobody asks which one it is."""
    if source.within("backends/"):
        return []
    names = {"EMULATE", "NATIVE", "REFERENCE", "TORCH", "TRANSFORMER_ENGINE"}
    return [f"{line}: {n}" for line, n in source.imports if n.rpartition(".")[2] in names]


def layers_by_class(source: Source) -> list[str]:
    """A planned layer is a protocol, `PlannedLayer`: outside of nn/ nobody asks whether one is a
    Linear or Experts.

    Nor whether one is torch's own nn.Linear, but for the exceptions that are named below: a model
    that is not converted yet has no planned layers.
    """
    if source.within("nn/"):
        return []
    own = {
        alias.asname or alias.name
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp4train")
        for alias in node.names
        if alias.name in _LAYERS
    }
    asked = (
        (node.lineno, each)
        for node in source.nodes
        if isinstance(node, ast.Call)
        and called(node) in ("isinstance", "issubclass")
        and len(node.args) == 2
        for each in ast.walk(node.args[1])
    )
    return [
        f"{line}: {ast.unparse(each)}"
        for line, each in asked
        if (isinstance(each, ast.Name) and each.id in own)
        or (
            isinstance(each, ast.Attribute)
            and each.attr in _LAYERS
            and ast.unparse(each.value) in ("f4", "f4.nn")
        )
        or (
            isinstance(each, ast.Attribute)
            and ast.unparse(each).startswith("fp4train.")
            and each.attr in _LAYERS
        )
        or (
            isinstance(each, ast.Attribute)
            and ast.unparse(each) in ("nn.Linear", "torch.nn.Linear")
        )
    ]


_LAYERS = {"Linear", "Experts", "HeldExperts"}


def addresses(source: Source) -> list[str]:
    """Nothing is keyed by data_ptr(), which the allocator gives to the next tensor: key by the
    tensor, or the step.
    """
    if source.within("kernels/", "quantize/"):
        return []
    return [f"{line}: {name}()" for line, name in source.calls if name.endswith("data_ptr")]


def code_from_data(source: Source) -> list[str]:
    """Files hold data, never code: safe_load for YAML, safetensors and JSON for the rest."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    found = [
        f"{line}: {name}" for line, name in source.imports if name.partition(".")[0] in modules
    ]
    functions = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "eval", "exec"}
    return found + [f"{line}: {name}()" for line, name in source.calls if name in functions]


def run_directory_by_path(source: Source) -> list[str]:
    """Only files.py touches what lies in a run directory: by descriptor, without links, bounded.
    Use `Folder`.
    """
    if not source.within(
        "run/", "checkpoint/", "track/", "lab/analysis/", "data/tokenizers/json_file"
    ):
        return []
    methods = {
        "read_text",
        "write_text",
        "read_bytes",
        "write_bytes",
        "unlink",
        "rmdir",
        "touch",
        "symlink_to",
    }
    functions = {
        "open",
        "os.open",
        "os.replace",
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.makedirs",
        "path.open",
    }
    return [
        f"{line}: {name}()"
        for line, name in source.calls
        if name in functions
        or name.startswith("shutil.")
        or (
            name.rpartition(".")[2] in methods
            and "." in name
            and not name.startswith("run_directory.")
        )
    ]


def utility_files(source: Source) -> list[str]:
    """No utils.py or the like: name the file for its idea."""
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    return (
        [f"{PurePosixPath(source.path).name}"] if PurePosixPath(source.path).name in drawers else []
    )


def features_in_linear(source: Source) -> list[str]:
    """A call of a linear layer asks nothing of the layer: a feature is an executor, or a class of
    its own.
    """
    if source.path != "nn/linear.py":
        return []
    calls = [
        f for f in source.nodes if isinstance(f, ast.FunctionDef) and f.name in ("forward", "w_NK")
    ]
    asked = [
        n.test for f in calls for n in ast.walk(f) if isinstance(n, (ast.If, ast.IfExp, ast.While))
    ]
    return [
        f"{test.lineno}: if {ast.unparse(test)}" for test in asked if "self" in ast.unparse(test)
    ]


Rule = Callable[[Source], list[str]]

RULES: dict[Rule, Source] = {  # and what breaks each
    transformer_engine_outside_of_te: Source(
        "nn/x.py", "def f():\n    import transformer_engine.pytorch as te"
    ),
    triton_outside_of_its_folders: Source("quantize/cpu.py", "from triton import language"),
    private_torch_at_import: Source(
        "nn/linear.py", "class A:\n    from torch._dynamo import disable"
    ),
    second_resolvers: Source("train.py", "recipe = run.policy.recipe_for(layer, recipe)"),
    tables_read_back: Source("costs/x.py", "m, n, k = row.size.split('×')"),
    backends_by_identity: Source("nn/x.py", "from fp4train.backends.emulate import EMULATE"),
    layers_by_class: Source(
        "run/x.py", "from fp4train.nn import Linear\nisinstance(layer, (Linear, Conv))"
    ),
    addresses: Source("nn/x.py", "cache[w.untyped_storage().data_ptr()] = 1"),
    code_from_data: Source("checkpoint/x.py", "import torch\ntorch.load(path)"),
    run_directory_by_path: Source("run/x.py", "(run / 'config.yaml').write_text(text)"),
    utility_files: Source("data/utils.py", ""),
    features_in_linear: Source(
        "nn/linear.py", "def w_NK(self): return self.w.T if self.transposed else self.w"
    ),
}

EXCEPTIONS: Mapping[Rule, Mapping[str, str]] = {
    addresses: {
        "shards.py": "finds tensors that share memory while all of them are alive; nothing is kept",
    },
    layers_by_class: {
        "precision/blocks.py": "finds torch's linear layers, and ours by their mark, in any model",
        "precision/layers.py": "says why a subclass of torch's linear layer is not converted",
    },
    run_directory_by_path: {
        "run/supervise/agreement.py": "opens /dev/null for a terminal that is gone",
        "run/host.py": "reads /proc/cpuinfo",
    },
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    broken = {source.path: found for source in SOURCES if (found := rule(source))}
    allowed = EXCEPTIONS.get(rule, {})
    lines = [
        f"fp4train/{path}:{what}"
        for path in broken.keys() - allowed.keys()
        for what in broken[path]
    ]
    assert not lines, "\n".join([str(rule.__doc__), *sorted(lines)])
    assert not allowed.keys() - broken.keys(), (
        f"{sorted(allowed.keys() - broken.keys())} are no exceptions any more"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_sees_what_breaks_it(rule: Rule) -> None:
    assert rule(RULES[rule])


def test_rules_allow_what_they_should() -> None:
    lazily = "def f():\n    from torch._inductor import config"
    assert not private_torch_at_import(Source("run/x.py", lazily)), "a function that is called may"
    assert not private_torch_at_import(Source("nn/compile_operator.py", "import torch._library"))
    assert not layers_by_class(
        Source("run/x.py", "from torch.nn import Linear\nisinstance(layer, Linear)")
    ), "torch's"
    assert layers_by_class(
        Source("run/x.py", "import fp4train.nn\nisinstance(layer, fp4train.nn.Experts)")
    )
    assert not code_from_data(Source("x.py", "model.eval()\nyaml.safe_load(text)")), (
        "methods are not the built-ins"
    )
    assert not triton_outside_of_its_folders(
        Source("nn/x.py", "from fp4train.quantize import triton")
    )
    assert transformer_engine_outside_of_te(
        Source("x.py", "importlib.import_module('transformer_engine.common')")
    )


def test_the_contract_of_the_imports_places_every_module() -> None:
    """A module that import-linter's layers omit may import anything, unless the contract is
    exhaustive.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    assert all(contract["exhaustive"] is True for contract in contracts)
    assert [contract["containers"] for contract in contracts] == [["fp4train"], ["fp4train.lab"]]


def test_no_public_class_name_stands_twice() -> None:
    """A name means one thing in the whole package: give the second class, or type, the name of what
    it is.
    """
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        classes = [node.name for node in source.nodes if isinstance(node, ast.ClassDef)]
        types = [
            ast.unparse(node.targets[0])
            for node in source.tree.body
            if isinstance(node, ast.Assign)
        ]
        for name in (*classes, *(each for each in types if re.fullmatch(r"[A-Z][a-z]\w+", each))):
            if not name.startswith("_"):
                places.setdefault(name, []).append(source.path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
