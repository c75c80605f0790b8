import glob

from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(
    name="pointnet2_ops",
    version="3.0.0",
    packages=find_packages(),
    ext_modules=[CUDAExtension("pointnet2_ops._ext", glob.glob("pointnet2_ops/_ext-src/src/*"))],
    cmdclass={"build_ext": BuildExtension},
)
