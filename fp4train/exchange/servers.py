"""Which servers have which formats: read in their own code, of the versions that are named.

They choose by the configuration of a folder: vLLM in `compressed_tensors.py` (`_get_scheme_from_parts`) and
`modelopt.py` (`QUANT_ALGOS`), SGLang in files of the same names and in `configs/model_config.py`.
"""

from dataclasses import dataclass, field

from fp4train.exchange.formats import COMPRESSED_TENSORS, MODELOPT, Format


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server of models.

    Args:
        version: whose code was read.
        lacks: the layout and the format's name of what it refuses.
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
"""TensorRT-LLM reads folders of ModelOpt in NVFP4 and FP8; its code is of many versions, and no table is kept of it."""


def lacking(server: Server, found: Format, layout: str) -> bool:
    """Whether a server refuses folders of a format."""
    return (layout, found.name) in server.lacks


def not_served(found: Format, layout: str) -> list[str]:
    """A sentence for each server that refuses folders of a format."""
    return [
        f"{server.name} {server.version} does not serve {found.name} of {layout}."
        for server in SERVERS
        if lacking(server, found, layout)
    ]
