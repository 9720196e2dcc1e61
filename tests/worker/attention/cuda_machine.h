// CUDA's words for the block of machine.h.
#define __device__
#define __shared__ static
#define __global__
using __nv_bfloat16 = BFloat;
using __half = Half;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct __nv_bfloat162 {
  BFloat x, y;
};
struct __half2 {
  Half x, y;
};

using std::max;
using std::min;

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {BFloat(x), BFloat(y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {Half(x), Half(y)}; }
inline unsigned __float_as_uint(float value) { unsigned word; std::memcpy(&word, &value, 4); return word; }
inline float __uint_as_float(unsigned word) { float value; std::memcpy(&value, &word, 4); return value; }


inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) word |= unsigned(bytes >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}

#define __shfl_xor_sync(mask, value, lanes) machine::shuffled(value, lanes)
#define __syncthreads() machine::barrier()
#define __syncwarp()

template <typename N>
inline N number_of(unsigned word, int at) {
  N number;
  std::memcpy(&number, reinterpret_cast<const char*>(&word) + at * sizeof(N), sizeof(N));
  return number;
}

struct Tf32 {
  float number;
  operator float() const { return __uint_as_float(__float_as_uint(number) & 0xffffe000u); }
};

// A lane's part of A, B and C as the manual of PTX has it for mma.m16n8k16 of 16 bits and mma.m16n8k8 of tf32.
template <typename N>
void mma(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  constexpr int PER_WORD = 4 / sizeof(N);
  const unsigned words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  float values[6];
  std::memcpy(values, words, sizeof(words));
  const float* lanes = machine::exchange(values, 6);
  const int group = machine::running % 32 / 4, member = machine::running % 4;
  auto word = [&](int lane, int at) { return __float_as_uint(lanes[lane * 8 + at]); };
  auto sum = [&](int row, int column) {
    float total = 0;
    for (int k = 0; k < 8 * PER_WORD; ++k) {
      const int unit = k / PER_WORD;
      const unsigned left = word(row % 8 * 4 + unit % 4, unit / 4 * 2 + row / 8);
      const unsigned right = word(column * 4 + unit % 4, 4 + unit / 4);
      total += float(number_of<N>(left, k % PER_WORD)) * float(number_of<N>(right, k % PER_WORD));
    }
    return total;
  };
  const float results[4] = {sum(group, member * 2), sum(group, member * 2 + 1), sum(group + 8, member * 2),
                            sum(group + 8, member * 2 + 1)};
  c0 += results[0], c1 += results[1], c2 += results[2], c3 += results[3];
}
