"""What PyTorch's errors say of a device: it is out of memory, or it has failed for this whole process."""

from smolcluster.errors import DeviceFailed, OutOfMemory, SmolclusterError

_OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
_FAILED = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "cuDNN error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine itself, had too little memory: less work at a time may fit."""
    import torch  # noqa: PLC0415  (nothing at the foot of the house imports torch by being imported)

    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _OUT_OF_MEMORY)


def is_failure(error: BaseException) -> bool:
    """Whether the device can be used no more by this process."""
    import torch  # noqa: PLC0415 - as above

    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)
    is_typed = accelerator_error is not None and isinstance(error, accelerator_error)
    return is_typed or _says(error, _FAILED)


def device_error(error: BaseException) -> SmolclusterError | None:
    """The error of ours that one of a device is; None: it is no device's."""
    if is_out_of_memory(error):
        return OutOfMemory(
            f"out of memory: {first_line(error)}; lower microbatch, or choose a smaller model"
        )
    if is_failure(error):
        return DeviceFailed(f"the device failed: {first_line(error)}")
    return None


def empty_cache() -> None:
    """Give memory that PyTorch keeps for later back to the accelerator."""
    import torch  # noqa: PLC0415 - as above

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _says(error: BaseException, parts: tuple[str, ...]) -> bool:
    return any(part in str(error) for part in parts)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0].rstrip(".")
