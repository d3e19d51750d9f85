"""One run on several ranks: the mesh, what is agreed between ranks, and how a model is cut over
them.
"""

from fp4train.parallel.config import Mesh, Parallel
