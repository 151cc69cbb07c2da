"""The norm that some models put behind attention and MLP, before the residual stream takes what they make."""

from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch

THREADS = 1024
"""A block has this many threads, as in `kernels/decoder/post_norm.cu`."""


def post_norm(
    update: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    y: Tensor,
    *,
    squares: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    """Put y = residual + RMSNorm(update) of B rows on the current stream.

    update, residual, y -- float32 [B, width], contiguous; residual may be y itself, and is not what the kernel just
                           before writes
    norm, eps           -- weight of the RMSNorm, float32 [width], and what it adds to the mean square
    squares             -- float32 [B] or [B, 1]: the sums of y^2; None: nobody asks for them
    flag_in_data        -- update is in words of `flag_in_data.py`: read as soon as it is stored; y and squares may be
                           read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    rows, width = update.shape
    if residual.shape != update.shape or y.shape != update.shape or norm.shape != (width,):
        raise ValueError(
            f"residual {list(residual.shape)}, y {list(y.shape)}, norm {list(norm.shape)}: expected "
            f"twice {[rows, width]} and {[width]}"
        )
    if squares is not None and squares.numel() != rows:
        raise ValueError(f"squares {list(squares.shape)}, expected {[rows]}")
    defines = (f"ROUNDS={-(-width // THREADS)}", f"FLAG_IN_DATA={int(flag_in_data)}")
    launch(
        kernel("post_norm", "post_norm", defines, update.device.index or 0),
        (rows,),
        THREADS,
        *(update, residual, norm, width, float(eps), y, squares),
    )
