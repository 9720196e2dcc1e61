"""The attention kernels' text, run on the CPU: compiled as C++, with a header that stands for the GPU."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from worker.attention import cuda_text, metal_text
from worker.attention.kernel import LayerKV
from worker.attention.kernel_text import CHAINS, COMMON, SPLIT, SPLIT_BODY, SUM_BODY, SUMMERS, source

HERE: Final = Path(__file__).parent
_NAMES: Final = {"bfloat16": "BFloat", "float16": "Half", "float32": "float"}
_MMA: Final = re.compile(r'asm\("mma\.sync\.aligned\.m16n8k\d+\.row\.col\.f32\.(\w+)\.\w+\.f32 .*?\);', re.DOTALL)
_FORMATS: Final = {"bf16": "BFloat", "f16": "Half", "tf32": "Tf32"}
_PROGRAM: Final = """
#include "machine.h"
#include "%(machine)s"
typedef %(T)s T;
typedef %(KV)s KV;
constexpr int D = %(D)d;
constexpr int BITS = %(BITS)d;
constexpr bool HAS_SINKS = %(HAS_SINKS)s;
%(header)s
static void split_block(const T* q, const int* q_shape, const KV* k, const int* k_shape, const KV* v, const T* k_scales,
    const T* k_biases, const T* v_scales, const T* v_biases, const int* lengths, const float* numbers, float* sums,
    float* stats) {
%(split)s
}
static void sum_block(const float* sums, const float* stats, const int* stats_shape, const T* q, const int* q_shape,
    const T* sinks, const int* lengths, const float* numbers, T* out) {
%(sum)s
}
extern "C" void run(const T* q, const int* q_shape, const KV* k, const int* k_shape, const KV* v, const T* k_scales,
    const T* k_biases, const T* v_scales, const T* v_biases, const int* lengths, const float* numbers, const T* sinks,
    float* sums, float* stats, const int* stats_shape, T* out, const unsigned* grid, unsigned split_threads) {
  blockDim = {split_threads, 1, 1};
  gridDim = {grid[0], grid[1], grid[2]};
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
        machine::run_block(split_threads, [&] { split_block(q, q_shape, k, k_shape, v, k_scales, k_biases, v_scales,
            v_biases, lengths, numbers, sums, stats); });
  const unsigned sum_grid[3] = {unsigned(q_shape[2]), unsigned(q_shape[1]), unsigned(q_shape[0])};
  blockDim = {%(sum_threads)d, 1, 1};
  gridDim = {sum_grid[0], sum_grid[1], sum_grid[2]};
  for (blockIdx.z = 0; blockIdx.z < sum_grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < sum_grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < sum_grid[0]; ++blockIdx.x)
        machine::run_block(%(sum_threads)d, [&] { sum_block(sums, stats, stats_shape, q, q_shape, sinks, lengths,
            numbers, out); });
}
"""


def build(folder: Path, language: str, dtype: str, dim: int, bits: int, has_sinks: bool) -> ctypes.CDLL:
    """A library of the text in a language, for one set of template arguments."""
    table = {"cuda": cuda_text, "metal": metal_text}[language]
    own = _MMA.sub(lambda match: f"mma<{_FORMATS[match[1]]}>(c0, c1, c2, c3, a, b0, b1);", table.HEADER)
    # A method's `thread` says where its object lies: C++ has no word for that.
    own = own.replace(" thread {", " {")
    words = table.WORDS | {"shared": "static"}
    program = _PROGRAM % {
        "machine": f"{language}_machine.h", "header": COMMON + own, "T": _NAMES[dtype], "D": dim, "BITS": bits,
        "KV": "uint32_t" if bits else _NAMES[dtype], "HAS_SINKS": str(has_sinks).lower(),
        "split": source(SPLIT_BODY, words), "sum": source(SUM_BODY, words), "sum_threads": SUMMERS * 32,
    }  # fmt: skip
    name = f"{language}-{dtype}-{dim}-{bits}-{has_sinks}"
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
    file.write_text(program)
    options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{HERE}"]
    subprocess.run(["g++", *options, "-o", str(library), str(file)], check=True)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL, language: str, queries: mx.array, kv: LayerKV, lengths: mx.array, end: int, scale: float,
    window: int = 0, sinks: mx.array | None = None,
) -> mx.array:  # fmt: skip
    """What `attend` computes."""
    table = {"cuda": cuda_text, "metal": metal_text}[language]
    rows, heads, tokens, dim = queries.shape
    kv_heads, room = kv.keys[0].shape[1:3]
    splits, queried = -(-min(end, room) // SPLIT), heads // kv_heads * tokens
    tiles = -(-queried // int(table.WORDS["query_rows"]))
    # What no block writes is not a number: nothing may read it.
    sums = np.full((rows, kv_heads, splits, queried, dim), np.nan, np.float32)
    stats = np.full((rows, kv_heads, splits, queried, 2), np.nan, np.float32)
    asked = _bits(queries)
    out = np.zeros_like(asked)
    none = [asked, asked]
    keys, values = ([_bits(array) for array in arrays] for arrays in (kv.keys, kv.values))
    arrays = [
        asked, np.array(queries.shape, np.int32), keys[0], np.array([rows, kv_heads, room, dim], np.int32), values[0],
        *(keys[1:] or none), *(values[1:] or none),
        np.array(lengths), np.array([scale * np.log2(np.e), window], np.float32),
        asked if sinks is None else _bits(sinks), sums, stats, np.array(stats.shape, np.int32), out,
        np.array([splits * tiles, kv_heads, rows], np.uint32),
    ]  # fmt: skip
    library.run(*(ctypes.c_void_p(array.ctypes.data) for array in arrays), ctypes.c_uint(CHAINS * 32))
    return mx.array(out).view(queries.dtype)


def _bits(array: mx.array) -> np.ndarray[Any, Any]:
    """numpy has no bfloat16: numbers of 16 bits go as integers."""
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.itemsize == 2 else array))
