"""The GPU table: names that users and drivers use, peaks that MFU divides by."""

import re

import pytest
import torch

import fp4train as f4
from fp4train.hardware import Device, detect, find_gpu, gpus, peak_flops
from fp4train.precision import MXFP8, NVFP4, FP8Current, LayerPolicy


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("B200", "B200"),
        ("b200", "B200"),
        ("NVIDIA H200", "H200"),
        ("h100-sxm", "H100"),
        ("H100 SXM5", "H100"),
        ("A100-80GB", "A100"),
        ("A100-40gb", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("gb200", "GB200"),
        ("rtx 5090", "RTX-5090"),
        ("GeForce RTX 5080", "RTX-5080"),
        ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("mi300x", "MI300X"),
        ("AMD MI355X", "MI355X"),
    ],
)
def test_a_user_may_write_the_name_as_people_do(name: str, found: str) -> None:
    assert find_gpu(name).name == found


def test_a_slip_gets_the_nearest_name_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"gpu='H20O'.*did you mean 'H200'.*known: A100, .*GB300"):
        find_gpu("H20O")
    with pytest.raises(ValueError, match=r"gpu='' is not a GPU"):
        find_gpu("")


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI325X", "MI325X"),
    ],
)
def test_the_names_that_drivers_report_are_known(device: str, found: str) -> None:
    gpu = detect(device)
    assert gpu is not None and gpu.name == found


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H20",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA GH200 480GB",
        "",
    ],
)
def test_a_gpu_with_other_peaks_is_none_rather_than_its_big_sister(device: str) -> None:
    assert detect(device) is None


def test_a_name_is_one_gpus_only() -> None:
    for device in (
        "A100-SXM4-80GB",
        "A100-SXM4-40GB",
        "H100 80GB HBM3",
        "H200",
        "B200",
        "GB200",
        "B300",
        "GB300",
    ):
        assert sum(bool(re.fullmatch(gpu.pattern, device)) for gpu in gpus()) == 1


def test_published_dense_peaks() -> None:
    b200 = find_gpu("B200")
    b300 = find_gpu("B300")
    h200 = find_gpu("H200")
    assert [b200.peaks[r] / 1e12 for r in ("FP4", "FP6", "FP8", "BF16")] == [9000, 4500, 4500, 2250]
    assert b300.peaks["FP4"] / b300.peaks["FP8"] == pytest.approx(15 / 4.5)
    assert h200.peaks["FP8"] == 2 * h200.peaks["BF16"] == 1979e12
    assert "FP4" not in h200.peaks and "FP6" not in h200.peaks
    assert "FP8" not in find_gpu("A100").peaks
    # NVIDIA's 3352 TOPS count sparsity, and GeForce halves products summed in FP32
    rtx = find_gpu("RTX-5090").peaks
    assert rtx["FP4"] == pytest.approx(3352e12 / 2) and rtx["FP4"] == 8 * rtx["BF16"]
    assert find_gpu("MI355X").peaks["FP4"] == 2 * find_gpu("MI355X").peaks["FP8"]


def test_a_gpu_of_amd_emulates_and_is_named_so() -> None:
    device = Device.elsewhere(find_gpu("MI355X"))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    for recipe in (FP8Current(), MXFP8(), NVFP4()):
        rows = list(f4.plan(model, recipe, LayerPolicy(last=0), device=device).rows)
        assert {row.backend for row in rows} == {"emulate"}
        assert "not MI355X" in rows[0].why


def test_mfu_refers_to_what_multiplies_not_to_what_is_emulated() -> None:
    assert peak_flops(find_gpu("B200"), "FP4") == 9000e12
    assert peak_flops(find_gpu("B200"), "FP8") == 4500e12
    assert peak_flops(find_gpu("H200"), "FP4") == find_gpu("H200").peaks["BF16"]
    assert peak_flops(find_gpu("H200"), None) == find_gpu("H200").peaks["BF16"]
    assert peak_flops(find_gpu("A100"), "FP32") == 19.5e12
