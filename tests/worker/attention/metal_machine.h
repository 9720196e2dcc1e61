// Metal's words for the block of machine.h.
#define device
#define thread
#define threadgroup
#define threadgroup_barrier(flags) machine::barrier()
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
#define simdgroup_barrier(flags)
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim

typedef unsigned uint;

namespace metal {

using std::exp2;
using std::max;
using std::min;

struct float2 {
  float x = 0, y = 0;
  float2() = default;
  float2(float first, float second) : x(first), y(second) {}
};

// A lane has two neighbours of a row: lanes 0, 1, 8 and 9 have the first row, 2, 3, 10 and 11 the second.
struct simdgroup_float8x8 {
  float2 elements;
  float2& thread_elements() { return elements; }
};

inline float simd_shuffle_xor(float value, int lanes) { return machine::shuffled(value, lanes); }

inline int lane_of(int row, int column) {
  return row / 4 * 16 + row % 4 * 2 + column / 4 * 8 + column / 2 % 2;
}

inline void simdgroup_multiply_accumulate(simdgroup_float8x8& sum, simdgroup_float8x8 left, simdgroup_float8x8 right,
                                          simdgroup_float8x8 addend) {
  const float values[4] = {left.elements.x, left.elements.y, right.elements.x, right.elements.y};
  const float* lanes = machine::exchange(values, 4);
  const int own = machine::running % 32;
  float results[2] = {addend.elements.x, addend.elements.y};
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      if (lane_of(row, column) != own) continue;
      for (int k = 0; k < 8; ++k) {
        results[column % 2] += lanes[lane_of(row, k) * 8 + k % 2] * lanes[lane_of(k, column) * 8 + 2 + column % 2];
      }
    }
  }
  sum.elements = float2(results[0], results[1]);
}

}  // namespace metal
