"""The estimated cost of a plan on a named GPU.

What counts a workload by running it (`workload`, and with it `cluster`, `memory`, `blocks` and
`mesh_plan`) loads Triton, and is imported from its files.
"""

from fp4train.lab.costs.estimate import CostEstimate, estimate
