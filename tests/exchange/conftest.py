"""Whole runs, and other people's software, imported once: it warns as it is imported, and warnings
are errors here.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp4train.cli import main


@pytest.fixture(scope="session")
def lm_eval() -> ModuleType:
    """lm_eval with what its tasks import: `datasets` and `evaluate` use names that later versions
    will not have.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval.evaluator
        import lm_eval.models.huggingface
        import lm_eval.tasks

        import fp4train.exchange.harness  # noqa: F401
    return lm_eval


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`command("export", …)`: what the command printed; `code` is the exit code that it must
    have.
    """

    def called(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        assert "Traceback" not in shown.err
        return shown.err if code else shown.out

    return called


@pytest.fixture(scope="session")
def served() -> Callable[..., Any]:
    """`served(folder, **options)`: a folder of codes as transformers and compressed-tensors load
    it.

    They warn as they are imported and as they load: of Enum subclasses, of a configuration that is
        given twice.
    """

    def load(folder: Path, *, dequantize: bool) -> Any:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            more = (
                {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
                if dequantize
                else {}
            )
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, **more
            ).eval()

    return load


@pytest.fixture(scope="session")
def modelopt() -> ModuleType:
    """ModelOpt's own tensors of codes; it warns as it is imported, of versions and of what it
    deprecates.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization.qtensor
    return modelopt.torch.quantization.qtensor
