"""External-engine worker with the NCCL double, whose GPU is host memory.

It is started again if it ends because its server's weights are unknown, as a run would do.
"""

import ctypes
import os
import sys

import torch

from tidegate.engine.external import vllm, worker
from tidegate.engine.worker import DEFECT

if __name__ == "__main__":
    ctypes.CDLL(os.environ["NCCL_DOUBLE"])  # found by its name from now on
    vars(vllm)["own_device"] = lambda: torch.device("cpu")
    while (status := worker.main()) == DEFECT:
        sys.stderr.write("starts again\n")
    sys.exit(status)
