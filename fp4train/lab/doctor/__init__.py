"""Examination of a machine: its parts, the backend of each recipe, and small computations that show
they are right.

machine    GPU, driver, CUDA, versions, CPU, threads, disk, wandb
recipes    each recipe: its backend here and why, its kernels and products against the reference
ranks      the collectives, where several processes are started
report     all of it as one screen, or as JSON
"""

from fp4train.lab.doctor.machine import device
from fp4train.lab.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "device", "examine"]
