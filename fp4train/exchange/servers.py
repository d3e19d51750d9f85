"""Which servers have which formats: read in their own code, of the versions that are named.

They choose by the configuration of a folder: vLLM in `compressed_tensors.py`
(`_get_scheme_from_parts`) and `modelopt.py` (`QUANT_ALGOS`), SGLang in files of the same names and
in `configs/model_config.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fp4train.exchange.formats import COMPRESSED_TENSORS, MODELOPT, Format


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server of models.

    Args:
        version: version whose code was read.
        lacks: pairs of a layout and a format's name that it refuses.
    """

    name: str
    version: str
    lacks: frozenset[tuple[str, str]] = field(default=frozenset())


SERVERS = (
    Server(name="vLLM", version="0.33.0"),
    Server(
        name="SGLang",
        version="0.5.23",
        lacks=frozenset(
            {(COMPRESSED_TENSORS, "MXFP8"), (COMPRESSED_TENSORS, "MXFP4"), (MODELOPT, "FP8 rows")},
        ),
    ),
)
"""The servers of the table.

TensorRT-LLM is not in it: its wheels are not at the public registry. Of its source these were read,
which are of no one release: `_torch/model_config.py` (008e0af8), `models/quant_config_utils.py`
(21156a7a) and `_torch/modules/linear.py` (00bbf71e). By them and by its documentation of 1.4.0rc4
it reads ModelOpt's NVFP4, FP8 per tensor and FP8 per row; its documentation of 1.3.0rc20 lists
Glm4MoeForCausalLM.
"""


def lacking(server: Server, form: Format, layout: str) -> bool:
    """Whether a server refuses folders of a format."""
    return (layout, form.name) in server.lacks


def not_served(form: Format, layout: str) -> list[str]:
    """A sentence for each server that refuses folders of a format."""
    return [
        f"{server.name} {server.version} does not serve {form.name} of {layout}."
        for server in SERVERS
        if lacking(server, form, layout)
    ]


def not_in_transformers(model_type: str, modules: Iterable[str], *, four_bits: bool) -> str | None:
    """The codes of a folder of compressed-tensors that transformers 5.23 does not load; None: it
    loads them.

    Its class of Mamba-2 draws initial values for `out_proj.weight`, which codes of four bits
    replace.

    Args:
        model_type: that of the folder's `config.json`.
        modules: names of the folder's modules with a matrix.
        four_bits: whether the codes have four bits.
    """
    if any(".experts." in module for module in modules):
        return "codes of a model with experts"
    if model_type == "mamba2" and four_bits:
        return "codes of four bits of Mamba-2"
    return None
