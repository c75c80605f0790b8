import glob
import os

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDAExtension

this_dir = os.path.dirname(os.path.abspath(__file__))
sources = glob.glob(os.path.join(this_dir, "maskrcnn_benchmark/csrc/*.cpp")) + glob.glob(
    os.path.join(this_dir, "maskrcnn_benchmark/csrc/cuda/*.cu")
)
setup(
    name="maskrcnn_benchmark",
    version="0.1",
    packages=find_packages(exclude=("configs", "tests")),
    ext_modules=[CUDAExtension("maskrcnn_benchmark._C", sources, define_macros=[("WITH_CUDA", None)])],
    cmdclass={"build_ext": torch.utils.cpp_extension.BuildExtension},
)
