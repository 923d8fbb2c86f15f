"""Converts buffers to addresses and addresses to views, without the C extension."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]


class _Memory:
    """Plain memory as numpy's array interface describes it; the caller keeps it alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def view_at(address: int, nbytes: int) -> Bytes:
    """The bytes at `address`, writable; the memory's owner keeps it alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(address, (nbytes,), (1,)))


def rows_at(address: int, rows: int, row_bytes: int, stride: int) -> Bytes:
    """`rows` rows of `row_bytes`, `stride` bytes from one to the next (may be negative)."""
    return np.asarray(_Memory(address, (rows, row_bytes), (stride, 1)))


def address_of(buffer: Any, writable: bool = False) -> tuple[int, int]:
    """Address and length of a contiguous buffer; an empty one is at 0.

    ValueError if it is not contiguous, BufferError if it is read-only and `writable` is set,
    TypeError if it is not a buffer. The address is valid while the caller keeps the buffer.
    """
    if isinstance(buffer, np.ndarray):
        contiguous, readonly = buffer.flags.c_contiguous, not buffer.flags.writeable
        address, nbytes = buffer.ctypes.data, buffer.nbytes
    else:
        with memoryview(buffer) as view:
            contiguous, readonly, nbytes = view.c_contiguous, view.readonly, view.nbytes
            address = int(np.frombuffer(view, np.uint8).ctypes.data) if contiguous and nbytes else 0
    if not contiguous:
        raise ValueError("the buffer is not contiguous")
    if writable and readonly:
        raise BufferError("the buffer is read-only")
    return (address if nbytes else 0), nbytes


def records_at(buffer: Any, dtype: np.dtype[np.void], *, writable: bool) -> npt.NDArray[np.void]:
    """The records of a contiguous buffer, which the caller keeps. ValueError for a partial one."""
    view = view_at(*address_of(buffer, writable=writable))
    if view.nbytes % dtype.itemsize:
        raise ValueError(
            f"{view.nbytes} bytes are not a whole number of records of {dtype.itemsize} bytes"
        )
    return view.view(dtype)
