// A GPU of one block for the attention kernels' text: each thread is a fiber, which waits where its warp or block meets.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct Place {
  unsigned x, y, z;
};

static Place threadIdx, blockIdx, blockDim, gridDim;

namespace machine {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 256 << 10;

struct Meeting {
  int arrived = 0;
  unsigned round = 0;
};

struct Fiber {
  ucontext_t context;
  // Once it runs, it is left and entered by jumps: `swapcontext` asks the system each time.
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool is_begun = false;
  bool is_done = false;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting whole;
static jmp_buf scheduler;
static unsigned running;
static std::function<void()> body;
// What each lane of a warp shows to the others: of two meetings in turn, so that none is overwritten while it is read.
static std::vector<float> shown[2];

static void meet(Meeting& meeting, int expected) {
  const unsigned round = meeting.round;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  while (meeting.round == round) {
    const unsigned self = running;
    if (_setjmp(fibers[self].place) == 0) _longjmp(scheduler, 1);
    threadIdx.x = running = self;
  }
}

// Values of all lanes of the own warp, once all have come.
static const float* exchange(const float* values, int count) {
  const unsigned warp = running / LANES;
  Meeting& meeting = warps[warp];
  std::vector<float>& place = shown[meeting.round % 2];
  const size_t base = size_t(warp) * LANES * 8;
  std::copy(values, values + count, place.begin() + base + running % LANES * 8);
  meet(meeting, LANES);
  return place.data() + base;
}

static void start() {
  body();
  fibers[running].is_done = true;
  _longjmp(scheduler, 1);
}

static void enter(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.is_begun) _longjmp(fiber.place, 1);
  fiber.is_begun = true;
  setcontext(&fiber.context);
}

static void run_block(unsigned threads, std::function<void()> kernel) {
  body = std::move(kernel);
  fibers = std::vector<Fiber>(threads);
  warps.assign(threads / LANES, Meeting());
  whole = Meeting();
  for (auto& place : shown) place.assign(size_t(threads) * 8, 0);
  for (auto& fiber : fibers) {
    fiber.stack = std::make_unique<char[]>(STACK_BYTES);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.get(), 0, STACK_BYTES};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  for (bool is_left = true; is_left;) {
    is_left = false;
    for (unsigned at = 0; at < threads; ++at) {
      if (fibers[at].is_done) continue;
      is_left = true;
      threadIdx.x = running = at;
      enter(fibers[at]);
    }
  }
}

static void barrier() { meet(whole, int(fibers.size())); }

static float shuffled(float value, int mask) { return exchange(&value, 1)[((running % LANES) ^ mask) * 8]; }

}  // namespace machine

struct BFloat {
  uint16_t bits = 0;
  BFloat() = default;
  explicit BFloat(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

struct Half {
  _Float16 number = 0;
  Half() = default;
  explicit Half(float value) : number(_Float16(value)) {}
  operator float() const { return float(number); }
};
