"""Makes the helpers beside the tests importable wherever pytest is started."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# The tensors here are small: threads would cost more than they bring.
torch.set_num_threads(1)
