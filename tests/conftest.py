import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import lowering  # noqa: F401, sets libtpu's environment before anything loads jax
import jax

jax.config.update("jax_num_cpu_devices", 8)
