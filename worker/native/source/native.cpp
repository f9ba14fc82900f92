// A rank's products and forwards on this processor, as Python calls them (library.py).

#include "packing.h"
#ifndef FURROW_PRODUCTS_ONLY  // for tests that compile the products several times
#include "check/blocks.h"
#include "check/cached.h"
#include "check/forward.h"
#include "quantize/quantize.h"
#include "recurrent/replay.h"
#include "sample.h"
#include "step.h"
#endif

using namespace furrow;

#pragma GCC visibility push(default)
extern "C" {

int32_t furrow_panel() { return PANEL; }

// The kinds of weights in this library, by bit.
uint32_t furrow_kinds() { return FURROW_KINDS; }

// The instructions that the order of sums follows from, and the compiler.
const char* furrow_build() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FURROW_VECTORS "AVX-512"
#elif defined(__aarch64__)
#define FURROW_VECTORS "NEON"
#else
#define FURROW_VECTORS "AVX2"
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FURROW_BYTES " with VNNI"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define FURROW_BYTES " with i8mm"
#elif defined(__ARM_FEATURE_DOTPROD)
#define FURROW_BYTES " with dot products"
#else
#define FURROW_BYTES ""
#endif
  return FURROW_VECTORS FURROW_BYTES ", compiler " __VERSION__;
}

Pool* furrow_pool(int32_t threads) { return new Pool(threads); }
void furrow_pool_end(Pool* pool) { delete pool; }
const void* furrow_pool_progress(const Pool* pool) { return pool->progress(); }

// Bytes of a matrix's packed weights.
int64_t furrow_matrix_bytes(int32_t kind, int64_t inputs, int64_t outputs) {
  return matrix_bytes(static_cast<Kind>(kind), inputs, outputs);
}

// `first`: among the matrix's outputs.
void furrow_pack(Pool* pool, const Matrix* matrix, int64_t inputs, const void* rows, int64_t count, int64_t first) {
  pool->run([=, one = *matrix](Hand& hand) { pack(hand, one, inputs, rows, count, first); });
}

void furrow_look_up(const Linear* linear, const int64_t* ids, int64_t count, float* out) {
  look_up(*linear, ids, count, out);
}

// `room`: bytes as furrow_product_room says.
void furrow_product(Pool* pool, const Linear* linear, const float* x, int64_t rows, float* out, char* room) {
  pool->run([=, layer = *linear](Hand& hand) { product(hand, layer, x, rows, out, false, {room}); });
}

int64_t furrow_product_room(const Linear* linear, int64_t rows) { return quantized_room(rows, linear->inputs); }

#ifndef FURROW_PRODUCTS_ONLY
// `rows` (count, inputs) to blocks of the format `type`, its number in GGUF. Returns -1, the index of a row with NaN or
// infinity, or UNKNOWN_FORMAT.
int64_t furrow_quantize(Pool* pool, int32_t type, const float* rows, int64_t count, int64_t inputs, char* out) {
  const auto result = std::make_shared<std::atomic<int64_t>>(-1);
  pool->run([=](Hand& hand) { quantize(hand, type, rows, count, inputs, out, *result); });
  return result->load();
}

int64_t furrow_step_room(Pool* pool, const Model* model, const Batch* batch) {
  return Scratch(nullptr, *model, *batch, pool->threads()).bytes();
}

int furrow_step(Pool* pool, const Model* model, const Batch* batch, char* room) {
  const auto step = std::make_shared<Step>(*model, *batch, room, pool->threads());
  pool->run([step](Hand& hand) { step->forward(hand); });
  return step->failure();
}

// The best token of each of `rows` rows of logits, `stride` floats apart, or NOT_FINITE.
void furrow_best(Pool* pool, const float* logits, int64_t rows, int64_t stride, int64_t vocabulary, int64_t* tokens) {
  pool->run([=](Hand& hand) {
    hand.each(rows, 1, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        const Best best = best_of(logits + row * stride, vocabulary);
        tokens[row] = best.finite ? best.token : NOT_FINITE;
      }
    });
  });
}

// A token for each of `count` rows.
void furrow_sample(Pool* pool, Sampled* rows, int64_t count) {
  pool->run([=](Hand& hand) {
    hand.each(count, 1, [&](int64_t from, int64_t to) {
      thread_local Sampler sampler;
      for (int64_t row = from; row < to; ++row) sampler.sample(rows[row]);
    });
  });
}

// Floats of `Batch::guessed` for so many guesses.
int64_t furrow_guessed_floats(const Model* model, int64_t guesses) { return guessed_floats(*model, guesses); }

int64_t furrow_replay_room(Pool* pool, const Model* model, const Batch* batch) {
  return Replay(*model, *batch, nullptr, pool->threads()).bytes();
}

// Advances the states of `batch`'s spans over the first `count` of their guesses, which turned out right.
void furrow_replay(Pool* pool, const Model* model, const Batch* batch, char* room) {
  const auto replay = std::make_shared<Replay>(*model, *batch, room, pool->threads());
  pool->run([replay](Hand& hand) { replay->run(hand); });
}

// Null where this library computes on this processor what plain loops do, else the first difference. It is called in a
// process of its own, which an instruction that the processor lacks ends. `shapes` are those of a model, or none: heads,
// those of keys, their width, then widths of inputs.
const char* furrow_check(const int64_t* shapes, int64_t count) {
  static std::string why;
  Pool pool(2);
  std::vector<int64_t> widths{77};  // no vector divides it
  if (count > 3) widths.insert(widths.end(), shapes + 3, shapes + count);
  why = "";
  for (const int64_t inputs : widths) {
    if (why.empty()) why = check::products(pool, inputs);
    if (why.empty()) why = check::block_products(pool, inputs);
  }
  if (why.empty()) why = check::cached_rows();
  for (const Kind cached : {FLOAT32, FLOAT16}) {
    if (why.empty()) why = check::Forward(pool, cached, 4, 2, 16).run();
    if (why.empty() && count >= 3 && shapes[2] % LANES == 0)
      why = check::Forward(pool, cached, shapes[0], shapes[1], shapes[2]).run();
  }
  return why.empty() ? nullptr : why.c_str();
}
#endif
}
#pragma GCC visibility pop
