"""What this machine can do: its parts, what each recipe runs on here, and small computations that show it.

machine    GPU, driver, CUDA, versions, CPU, threads, disk, wandb
recipes    each recipe: its backend here and why, its kernels and products against the reference
ranks      the collectives, where several processes are started
report     all of it as one screen, or as JSON
"""

from fp4train.lab.doctor.machine import device
from fp4train.lab.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "device", "examine"]
