"""Examination of a machine: its parts, the backend of each recipe, and codes that show its kernels are
right.

machine    GPU, driver, CUDA, versions, CPU, threads, disk, wandb
recipes    each recipe: its backend here and why, its kernels against the reference
report     all of it as one screen, or as JSON
"""

from fp4train.lab.doctor.machine import device
from fp4train.lab.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "device", "examine"]
