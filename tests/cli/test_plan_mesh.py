"""`fp4train plan` of a mesh: the commands of docs/cost-model.md, the keys, JSON, and what is
refused.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fp4train.cli import main
from fp4train.cli.plan import PlanOptions, asks_for_mesh
from fp4train.config.command_line import read_line
from fp4train.models.common import Decoder
from fp4train.parallel import Mesh, Parallel
from fp4train.parallel.config import SCHEDULES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^```bash\nfp4train (.*?)\n```(?:\n```text\n(.*?)\n```)?", DOCUMENT, re.DOTALL | re.MULTILINE
)
SMALL = ("plan", "model=llama_125m", "gpu=H100", "recipe=fp8_current", "train.seq_len=2048")


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "shown"), COMMANDS, ids=[c.split("model=")[1].split()[0] for c, _ in COMMANDS]
)
def test_commands_of_the_document_print_what_it_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert shown in printed
    assert "parallel" not in command or len(printed.splitlines()) < 60, "a mesh is one screen"


def test_a_mesh_whose_shards_divide_blocks_is_planned_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = ("plan", "model.kv_heads=2", "gpu=H100", "parallel.tp=2")
    assert run(*mesh, "recipe=quartet_ii") == 0 and run(*mesh, "recipe=nvfp4") == 0
    (said,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "in high precision that one rank" in line
    ]
    assert (
        said.startswith("note: parallel.tp keeps GEMMs of 25 of 43 layers")
        and "Hadamard groups of 128" in said
    )


@pytest.mark.parametrize(("gpu", "said"), [("RTX-5080", True), ("RTX-5090", False)])
def test_a_plan_of_one_gpu_says_that_it_holds_no_such_run(
    gpu: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.0 B parameters of 16 bytes, on 16 and on 32 GB."""
    assert run("plan", "model=llama_1b", "recipe=bf16", "phases=none", f"gpu={gpu}") == 0
    printed = capsys.readouterr().out
    assert "the whole run, 300 steps" in printed
    assert (f"usable on {gpu}: more GPUs" in printed) == said


@pytest.mark.parametrize(
    ("keys", "codes", "said"),
    [
        (("recipe=nvfp4",), 7.0, "does not fit: 139.8 GiB of 124.8 usable on H200"),
        pytest.param(
            ("recipe=fp8_current",),
            14.0,
            "does not fit: 147.0 GiB of 124.8 usable on H200",
            marks=pytest.mark.long,
        ),
        pytest.param(("recipe=nvfp4", "optim.moments=bfloat16"), 7.0, None, marks=pytest.mark.long),
    ],
)
def test_an_8b_llama_does_not_fit_one_h200_with_moments_in_float32(
    keys: tuple[str, ...], codes: float, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, gradients and two moments are 16 bytes for each of 8.03 B parameters, 128.5 GB; both
    forms of the blocks' 6.98 B weights are 2 bytes each in FP8, and 1.01 in NVFP4.
    """
    sizes = ("data=tokens", "data.path=tokens.bin", "data.vocab_size=128256", "train.seq_len=2048")
    words = (
        "plan",
        "model=llama_8b",
        "gpu=H200",
        "gpus=1",
        *keys,
        "policy=all",
        "phases=none",
        *sizes,
    )
    assert run(*words, "train.batch_size=1", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["stretches"]
    memory = found["memory_bytes"]
    per_moment = 2 if said is None else 4
    assert memory["weights, float32"] + memory["gradients"] == pytest.approx(64.24e9, rel=1e-3)
    assert memory["moments"] == pytest.approx(16.06e9 * per_moment, rel=1e-3)
    assert memory["codes of weights"] == pytest.approx(codes * 1e9, rel=0.02)
    assert run(*words, "train.batch_size=1") == 0
    printed = capsys.readouterr().out
    assert "does not fit" not in printed if said is None else said in printed
    page = DOCUMENT.partition("Memory is estimated")[2].partition("## A mesh of GPUs")[0]
    assert f"{found['memory_bytes_total'] / 2**30:.1f}" in page


def test_the_rest_of_the_gpus_are_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "gpus=32", "parallel.tp=2", "--json", "train.batch_size=64") == 0
    found = json.loads(capsys.readouterr().out)
    cost = found["stretches"][0]
    assert cost["mesh"]["shard"] == 16
    assert cost["gpus"] == 32
    assert cost["tokens_per_step"] == 64 * 2048
    assert sum(cost["seconds"].values()) == pytest.approx(cost["step_seconds"])
    assert sum(cost["memory_bytes"].values()) == pytest.approx(cost["memory_bytes_total"])
    assert {each["name"] for each in cost["collectives"]} >= {
        "weight gathers",
        "gradient reduction",
    }
    assert found["gemms"]


def test_a_plan_without_a_mesh_has_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "recipe=nvfp4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "NVFP4"
    assert {row["gemm"] for row in found["gemms"]} == {"fprop", "dgrad", "wgrad"}


INTERLEAVED = ("parallel.pp=2", "parallel.pp_schedule=interleaved")
B200 = (
    "plan",
    "model=llama_30m",
    "gpu=B200",
    "recipe=mxfp8",
    "policy=all",
    "phases=none",
    "train.seq_len=2048",
)


@pytest.mark.long
def test_parts_of_layers_are_priced_as_what_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Transformer Engine runs whole layers only."""
    seconds = {}
    for backend in ("auto", "emulate"):
        assert run(*B200, "parallel.tp=2", f"backend={backend}", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        ran = {row["backend"] for row in found["gemms"] if row["layer"] != "head"}
        assert ran == {backend if backend != "auto" else "native"}
        seconds[backend] = found["stretches"][0]["seconds"]["quantising"]
    assert seconds["auto"] != seconds["emulate"]
    assert run(*B200, "parallel.tp=2", "backend=te") == 1
    assert (
        "tensor parallelism needs collectives between them. backend=auto would"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("parallel.dp_shard=2", "optim=muon"), "optim=muon multiplies whole matrices"),
        (
            ("parallel.tp=2", "model=moe_tiny", "model.kv_heads=2", "model.experts.count=15"),
            "blocks.1.mlp.gate_up: 15 experts cannot be divided over parallel.tp=2 ranks",
        ),
        (
            ("parallel.tp=2", "model=hyena_tiny", "model.filters.groups=1"),
            "blocks.0.mixer.taps: 1 rows cannot be divided over parallel.tp=2 ranks",
        ),
        (
            (
                "parallel.tp=5",
                "model=hybrid_12b",
                "model.kv_heads=8",
                "data=tokens",
                "data.path=a",
                "data.vocab_size=64",
            ),
            "model.scan.groups=8 cannot be divided over parallel.tp=5 ranks; parallel.tp allowed: 1",
        ),
        (
            ("parallel.tp=2", "model=evo2_1b", "model.kv_heads=15"),
            "model.heads=15 cannot be divided over parallel.tp=2 ranks; parallel.tp allowed: 1",
        ),
        (("parallel.tp=2", "eval.errors_every=5"), "eval.errors_every=5 measures whole operands"),
        (
            ("parallel.cp=3", "recipe=mxfp8", "train.seq_len=144"),
            "whole blocks, and are not: a shard of 48 is not whole blocks of 32; use",
        ),
        (
            ("parallel.ep=2", "model=moe_tiny", "model.experts.count=15"),
            "parallel.ep=2: the ranks do not divide the 15 experts of a layer; parallel.ep allowed",
        ),
        (("parallel.ep=3", "parallel.dp_shard=4"), "parallel.ep allowed: 1, 2, 4"),
        (
            ("parallel.dp_shard=2", "oscillation.every=10", "oscillation.watch=5"),
            "weights are watched whole",
        ),
        (
            (*INTERLEAVED, "model.layers=3"),
            "3 blocks cannot be divided over parallel.pp=2 × parallel.pp_chunks=2 stages, "
            "which need one each; use",
        ),
        (
            ("parallel.pp=2", "train.batch_size=4", "train.microbatch=4"),
            "1 microbatch per rank cannot fill",
        ),
        (
            (*INTERLEAVED, "model.layers=4", "train.batch_size=7", "train.microbatch=1"),
            "interleaved does not take 7 microbatches",
        ),
        (
            ("parallel.tp=2", "train.batch_size=1", "train.seq_len=255"),
            "the 255 tokens of a microbatch cannot be shared",
        ),
    ],
)
def test_what_a_run_refuses_is_not_priced(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "gpu=H100", "model.kv_heads=2", *arguments) == 1
    assert said in capsys.readouterr().err


def test_ranks_that_share_experts_hold_less_and_exchange_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 256 tokens in BF16 with 2 experts each: 5 blocks, 4 times, 3 of 4 parts. Two ranks have the
    same quarter of the experts, and sum half of its gradients each.
    """
    tiny = ("plan", "model=moe_tiny", "gpu=H100", "recipe=nvfp4", "model.layers=6", "model.dense=1")
    tiny = (*tiny, "phases=none", "train.microbatch=1", "train.batch_size=8", "--json")
    memory, sent = [], []
    for ranks in (1, 4):
        assert run(*tiny, "parallel.dp_shard=8", f"parallel.ep={ranks}") == 0
        (cost,) = json.loads(capsys.readouterr().out)["stretches"]
        memory.append(cost["memory_bytes"])
        sent.append({flow["name"]: flow["sent"] for flow in cost["collectives"]})
    assert sent[1]["exchanges of rows of experts"] == 5 * 4 * (256 * 2 * 128 * 2) * 3 / 4
    experts = 5 * 16 * 3 * 128 * 96
    assert sent[1]["gradient reduction of experts"] == 4 * experts / 4 / 2
    assert sent[0]["gradient reduction"] - sent[1]["gradient reduction"] == 4 * experts * 7 / 8
    assert memory[0]["weights, float32"] == memory[1]["weights, float32"]
    assert memory[0]["unsharded weights"] > 2 * memory[1]["unsharded weights"]


@pytest.mark.parametrize("key", ["tp", "pp"])
def test_a_model_that_does_not_say_how_it_is_cut_is_not_priced_in_parts(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Decoder, "fp4train_parameters")
    assert run("plan", "gpu=H100", "model.kv_heads=2", f"parallel.{key}=2") == 1
    assert f"parallel.{key}=2: LlamaModel does not say how" in capsys.readouterr().err


@pytest.mark.long
def test_the_blocks_of_each_stage_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    twelve = (
        "plan",
        "model=hybrid_12b",
        "gpu=B200",
        "train.batch_size=16",
        "train.microbatch=1",
        "train.seq_len=8192",
    )
    data = ("data=tokens", "data.path=none.bin", "data.vocab_size=131072")
    for cut, said in {
        ("parallel.pp=4",): "blocks of stages 0 to 3: 0–16, 17–32, 33–49, 50–61\n",
        (
            "parallel.pp=2",
            "parallel.pp_schedule=interleaved",
        ): "0 to 1: 0–16 and 33–49, 17–32 and 50–61\n",
    }.items():
        assert run(*twelve, *data, *cut) == 0
        assert said in capsys.readouterr().out
    assert run(*twelve, *data, "gpus=2") == 0
    assert "blocks of stages" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        pytest.param(
            "bf16", "in BF16 (2 B per weight), in which they are multiplied", marks=pytest.mark.long
        ),
        pytest.param(
            "mxfp8",
            "as codes and scales (1.03 B per weight), which keep the bits of one rank",
            marks=pytest.mark.long,
        ),
        (
            "fp8_delayed",
            "in BF16 (2 B per weight), because Transformer Engine enters the amax of the "
            "weight into its",
        ),
        ("mxfp4", "as codes and scales (0.531 B per weight), which keep the bits of one rank"),
    ],
)
def test_a_sentence_says_what_is_sent_and_the_table_how_much(
    recipe: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(*B200, f"recipe={recipe}", "parallel.dp_shard=2", "--json", "train.batch_size=4") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [note for note in found["notes"] if said in note]
    (cost,) = found["stretches"]
    (gathers,) = (each for each in cost["collectives"] if each["name"] == "weight gathers")
    linear = [row for row in found["gemms"] if row["gemm"] == "fprop" and row["layer"] != "head"]
    inner = sum(row["size"][1] * row["size"][2] for row in linear)
    rest = cost["parameters"] - inner  # norms, embedding and head
    each = {"bf16": 2, "mxfp8": 1.03125, "fp8_delayed": 2, "mxfp4": 0.53125}[recipe]
    # twice those of the blocks, for forward and for backward; their norms are few
    assert gathers["sent"] == pytest.approx((2 * each * inner + 4 * rest) / 2, rel=2e-3)


@pytest.mark.long
def test_a_mixture_of_671b_fits_1024_gpus_in_shards_of_whole_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = (
        "parallel.dp_shard=256",
        "parallel.dp_replicate=4",
        "train.batch_size=1024",
        "model.recompute=true",
    )
    assert run("plan", "model=moe_671b", "gpu=B200", "train.seq_len=4096", *mesh, "--json") == 0
    (first, *_) = json.loads(capsys.readouterr().out)["stretches"]
    assert first["fits"] and first["gpus"] == 1024
    assert 35e9 < first["active_parameters"] < 38e9 < 660e9 < first["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gpus=100", "parallel.tp=8"],
            "gpus=100: parallel.tp=8 does not divide the 100 ranks of this run",
        ),
        (
            ["gpus=64", "parallel.dp_shard=4", "parallel.tp=8"],
            "is 32 ranks, and this run has 64: parallel.dp_shard=-1 takes all that are left",
        ),
        (
            ["parallel.tp=5"],
            "model.heads=12 cannot be divided over parallel.tp=5 ranks; parallel.tp allowed: 1, 2, 4",
        ),
        (
            ["parallel.pp=13"],
            "over parallel.pp=13 stages, which need one each; parallel.pp may be at most 12",
        ),
        (
            ["parallel.dp_shard=8", "train.batch_size=12"],
            "Data ranks that divide it: 3, 4, 6, 12; or use train.batch_size=8 or 16",
        ),
        (["parallel.dp_shard=128"], "16 is not divisible by 128 data ranks"),
        (
            ["parallel.dp_shard=8", "train.batch_size=16", "train.microbatch=16"],
            "8 data ranks × train.microbatch=16: every rank must have",
        ),
        (
            ["parallel=auto", "gpus=8"],
            "a mesh is named by its sizes, parallel.dp_replicate, parallel.dp_shard",
        ),
        (
            ["parallel.pp_schedule=zb"],
            "parallel.pp_schedule=zb runs the gradients of inputs and weights at different",
        ),
        (["parallel.dp_shard=-2"], "parallel.dp_shard=-2 must be at least 1, or -1 for all"),
        (["gpus=0"], "gpus=0 must be a number of GPUs from 1 to 1048576"),
        (["parallel.dp_shard=2000000"], "parallel.dp_shard=2000000 is more than 1048576"),
        (["parallel.tp=0"], "parallel.tp=0 must be at least 1"),
        (["gpus=8", "gpu=null"], "a plan for several GPUs needs their name: gpu=H100"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mesh_that_cannot_be_is_refused_with_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "model=llama_125m", "gpu=H100", "recipe=bf16", *arguments) == 1
    assert message in capsys.readouterr().err


def test_what_is_said_of_gpus_is_told_from_the_keys_of_the_section() -> None:
    sizes = ["parallel.dp_replicate=2", "parallel.sp=false", "model=llama_8b"]
    line = read_line([*sizes, "gpus=64"], PlanOptions, "fp4train plan", keys=None)
    assert (line.full, line.gpus, line.words) == (False, 64, sizes)


def test_a_command_or_its_configuration_asks_for_a_mesh() -> None:
    assert not asks_for_mesh(Parallel(timeout=9), None, ["model", "parallel.timeout"])
    assert asks_for_mesh(Parallel(dp_shard=8), None, [])
    assert asks_for_mesh(Parallel(), None, ["parallel.dp_shard"]) and asks_for_mesh(
        Parallel(), 8, []
    )


def test_the_mesh_of_the_section_is_that_of_a_run_and_of_its_plan() -> None:
    found = Parallel(dp_replicate=2, sp=False, pp=4).mesh(64)
    assert found == Mesh(replicate=2, shard=8, sequence=False, pipeline=4)
    assert str(found) == "2 replicas × 8 shards × 4 stages" and found.gpus == 64
    refusal = r"parallel.pp=4 does not divide the 6 ranks of this run; use parallel.pp=3 or 6"
    with pytest.raises(ValueError, match=refusal):
        Parallel(pp=4).mesh(6)


def test_every_schedule_of_a_run_is_planned() -> None:
    in_flight = {}
    for schedule in SCHEDULES:
        mesh = replace(Parallel(pp=4, pp_schedule=schedule, reduce="bf16").mesh(4), microbatches=16)
        assert mesh.virtual == (2 if schedule == "interleaved" else 1) and mesh.reduce_bytes == 2
        in_flight[schedule] = [mesh.in_flight(stage) for stage in (0, 3)]
    assert in_flight == {"1f1b": [4, 1], "gpipe": [16, 16], "interleaved": [5.5, 5.5]}
    assert Parallel(pp=4, pp_schedule="interleaved", pp_chunks=3).mesh(4).virtual == 3
