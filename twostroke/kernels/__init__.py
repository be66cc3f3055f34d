"""The kernels of the forward pass. `reference.Kernels` defines every operation in plain torch.
`cuda.CudaKernels` overrides operations with Triton kernels. `cpu` loads the native module, which
runs whole steps.
"""
