// Products of weights in blocks of every format, beside the same weights looked up and multiplied in double.
#pragma once

#include "../packing.h"
#include "numbers.h"

namespace furrow::check {

// Random blocks whose every fp16 is a small number: a high byte of 0x20 … 0x2f. Where a byte isn't part of one, it is any value.
// `largest`: with values as large as they may be: all bits set, but for the codes of MXFP4 and the signs of IQ3_S.
template <typename F>
std::vector<uint8_t> random_blocks(int64_t count, uint32_t seed, bool largest) {
  std::vector<uint8_t> blocks(count * F::FILE_BYTES, F::CODES == Codes::E2M1 ? 0x77 : 0xff);
  if (!largest)
    for (uint8_t& byte : blocks) byte = static_cast<uint8_t>((seed = seed * 1664525u + 1013904223u) >> 24);
  else if (F::CODES == Codes::ODD)  // IQ3_S: 32 bytes of signs
    for (auto block = blocks.begin(); block < blocks.end(); block += F::FILE_BYTES) std::fill(block + 74, block + 106, 0);
  constexpr bool AT_END = F::UNIT == RUN && (F::SUB == 16 || F::SCALES == Scales::HALF);  // Q2_K, Q3_K, Q6_K, TQ2_0
  constexpr int64_t HALVES = F::MINIMA ? 2 : 1;
  for (int64_t block = 0; block < count; ++block)
    for (int64_t half = 0; half < HALVES; ++half) {
      uint8_t* first = blocks.data() + block * F::FILE_BYTES + (AT_END ? F::FILE_BYTES - 2 * HALVES : 0);
      if (F::SCALES == Scales::EXPONENT)
        first[0] = static_cast<uint8_t>(112 + first[0] % 8);
      else
        first[2 * half + 1] = static_cast<uint8_t>(0x20 + first[2 * half + 1] % 16);
    }
  return blocks;
}

// `largest`: with values and activations as large as they may be, whose sums are too.
template <typename F>
std::string block_product(Pool& pool, Kind kind, int64_t width, int64_t rows, bool largest) {
  constexpr int64_t OUTPUTS = PANEL + 3;
  const int64_t inputs = std::max<int64_t>(RUN + F::UNIT, width / F::UNIT * F::UNIT);
  const std::vector<uint8_t> stored = random_blocks<F>(OUTPUTS * inputs / F::UNIT, kind, largest);
  std::vector<uint64_t> packed(matrix_bytes(kind, inputs, OUTPUTS) / sizeof(uint64_t) + 1);
  Linear linear{};
  linear.matrices[0] = {packed.data(), nullptr, nullptr, 0, OUTPUTS, kind};
  linear.inputs = inputs, linear.outputs = OUTPUTS, linear.count = 1;
  // By value: a thread that comes late still reads what the job holds.
  pool.run([=, matrix = linear.matrices[0], from = stored.data()](Hand& hand) { pack(hand, matrix, inputs, from, OUTPUTS, 0); });
  const Values x = largest ? Values(rows * inputs, 1.0f) : random_values(rows * inputs, 11);
  Values out(rows * OUTPUTS), weights(inputs);
  std::vector<char> room(quantized_room(rows, inputs));
  pool.run([=, from = x.data(), to = out.data(), memory = room.data()](Hand& hand) {
    product(hand, linear, from, rows, to, false, {memory});
  });
  std::vector<double> expected(rows * OUTPUTS);
  double squares = 0;
  for (int64_t output = 0; output < OUTPUTS; ++output) {
    look_up(linear.matrices[0], inputs, output, weights.data());
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t input = 0; input < inputs; ++input)
        expected[row * OUTPUTS + output] += static_cast<double>(weights[input]) * x[row * inputs + input];
  }
  for (const double value : expected) squares += value * value;
  // An activation is rounded to 1/127 of the largest beside it: some 0.6 % of a product.
  return difference("a product of blocks", out, expected, 0.05 * std::sqrt(squares / expected.size()));
}

// With few rows, for each of which a tile has code of its own, and with more than a tile holds.
inline std::string block_products(Pool& pool, int64_t inputs) {
  for (int kind = Q4_0_BLOCKS; kind < E4M3_GROUPS; ++kind)
    for (const auto& [rows, largest] : {std::pair{1, false}, {2, false}, {3, false}, {4, false}, {BLOCK_TILE + 2, false}, {BLOCK_TILE + 2, true}}) {
      const auto work = [&, rows = rows, largest = largest](auto format) {
        return block_product<decltype(format)>(pool, static_cast<Kind>(kind), inputs, rows, largest);
      };
      const auto why = of_format(static_cast<Kind>(kind), work, std::string());
      if (!why.empty()) return why + " (kind " + std::to_string(kind) + ")";
    }
  return "";
}

}  // namespace furrow::check
