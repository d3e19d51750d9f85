"""What vLLM and SGLang serve of the formats of folders, by their own code, is said at export and in
the docs.
"""

import re
from pathlib import Path

import pytest
from finished_runs import FinishedRuns
from hf_exports import FP8_BLOCKS, Command

from fp4train.exchange import COMPRESSED_TENSORS, FORMATS, LAYOUTS, MODELOPT, SERVERS
from fp4train.exchange.formats import configuration
from fp4train.exchange.servers import lacking

DOCS = Path(__file__).parents[2] / "docs/exchange.md"


def test_the_page_has_the_table_of_servers() -> None:
    """A row for each format of a layout, a column for each server with its version."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.read_text().splitlines()
    ]
    (head,) = (row for row in rows if row[:2] == ["format", "`to=`"])
    assert head[2:] == [f"{server.name} {server.version}" for server in SERVERS]
    table = {
        (row[0], row[1].strip("`")): row[2:]
        for row in rows[rows.index(head) + 2 :]
        if len(row) == len(head)
    }
    expected = {
        (each.name, layout): [
            "no" if lacking(server, each, layout) else "yes" for server in SERVERS
        ]
        for each in FORMATS
        for layout in LAYOUTS
        if layout == COMPRESSED_TENSORS or each.modelopt is not None
    }
    assert table == expected


def test_compressed_tensors_own_classes_read_every_configuration() -> None:
    """Both servers choose by these arguments: bits, type, strategy and group, and by whether
    activations are named.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.quantization import QuantizationConfig

    for each in FORMATS:
        table = configuration(each, COMPRESSED_TENSORS, ["lm_head"])
        (scheme,) = QuantizationConfig.model_validate(table).config_groups.values()
        assert (
            scheme.weights is not None and scheme.weights.num_bits == each.compressed[1]["num_bits"]
        )
        assert (scheme.input_activations is None) == (each.compressed[2] is None)


@pytest.mark.long
def test_the_names_of_modelopts_algorithms_are_its_own() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.export import model_config

    known = {
        str(value).upper()
        for name, value in vars(model_config).items()
        if name.startswith("QUANTIZATION_")
    }
    for each in FORMATS:
        if each.modelopt is not None:
            algorithm = each.modelopt["quant_algo"].replace(
                "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PC_PT"
            )
            assert algorithm in known, (algorithm, sorted(known))
            assert configuration(each, MODELOPT, [])["quant_algo"] == each.modelopt["quant_algo"]


def test_an_export_says_which_server_lacks_its_format(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("train.steps=2", "recipe=mxfp8")
    said = command("export", run, "to=compressed-tensors", f"out={tmp_path / 'a'}", "losses=false")
    assert "SGLang 0.5.23 does not serve MXFP8 of compressed-tensors" in said
    assert "does not serve" not in command(
        "export", run, "to=modelopt", f"out={tmp_path / 'b'}", "losses=false"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("model.head_dim=64", "model.heads=4"),
            r"blocks\.0\.attention\.wk has 64 rows, which blocks of 128 .* as one",
        ),
        (
            ("model.hidden=192",),
            r"blocks\.0\.mlp\.gate has 192 rows, .* blocks\.0\.mlp\.up as one, and refuse the "
            r"folder",
        ),
        (
            ("model.width=160",),
            r"blocks\.0\.attention\.wq has 160 in features, which the groups of 128 .* must fill",
        ),
    ],
)
def test_fp8_blocks_that_servers_refuse_are_refused_by_layer_and_number(
    finished: FinishedRuns, command: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """As vLLM 0.33 and SGLang 0.5.23 say: `output_partition_size = 64 is not divisible by … block_n
    = 128`, and where they quantise activations, `the last dimension … must be divisible by
    group_size`.
    """
    given = {word.partition("=")[0] for word in words}
    sizes = [word for word in FP8_BLOCKS if word.partition("=")[0] not in given]
    run = finished("train.steps=2", "recipe=fp8_block", *sizes, *words)
    shown = command(
        "export", run, "to=compressed-tensors", f"out={tmp_path / 'a'}", "losses=false", code=1
    )
    assert re.search(said, shown), shown
