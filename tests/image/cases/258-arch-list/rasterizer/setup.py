from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(
    name="rasterizer",
    version="0.1.0",
    ext_modules=[CUDAExtension("rasterizer_cuda", ["raster.cu"])],
    cmdclass={"build_ext": BuildExtension},
)
