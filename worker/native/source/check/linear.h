// A linear layer with weights of one kind, its product, and the same product by plain loops in double.
#pragma once

#include "../packing.h"
#include "numbers.h"

namespace furrow::check {

// Owns the memory of a `Linear`, packed by the code that packs a model's weights.
class Layered {
 public:
  Layered(Pool& pool, Kind kind, int64_t inputs, int64_t outputs, uint32_t seed)
      : rows_(random_values(inputs * outputs, seed)) {
    // The largest weights and no small ones: sums in 16 bits would overflow.
    std::fill(rows_.begin(), rows_.begin() + inputs, 1.0f);
    const int64_t room = (outputs + PANEL - 1) / PANEL * PANEL;
    weights_.resize(room * byte_stride(inputs) * sizeof(float) / sizeof(uint64_t) + 8);
    scales_.resize(room), sums_.resize(room);
    linear.matrices[0] = {weights_.data(), scales_.data(), sums_.data(), 0, outputs, kind};
    linear.inputs = inputs, linear.outputs = outputs, linear.count = 1;
    std::vector<uint16_t> short_rows(kind == BFLOAT16 || kind == FLOAT16 ? rows_.size() : 0);
    for (size_t i = 0; i < short_rows.size(); ++i)
      short_rows[i] = kind == BFLOAT16 ? bfloat_of(rows_[i]) : half_of(rows_[i]);
    const void* stored = short_rows.empty() ? static_cast<const void*>(rows_.data()) : short_rows.data();
    // By value: a thread that comes late still reads what the job holds.
    pool.run([=, matrix = linear.matrices[0]](Hand& hand) { pack(hand, matrix, inputs, stored, outputs, 0); });
  }

  // (rows, outputs) of `x` (rows, inputs).
  Values multiplied(Pool& pool, const Values& x, int64_t rows) {
    Values out(rows * linear.outputs);
    std::vector<char> room(quantized_room(rows, linear.inputs));
    const Quantized quantized{room.data()};
    pool.run([=, layer = linear, from = x.data(), to = out.data()](Hand& hand) {
      product(hand, layer, from, rows, to, false, quantized);
    });
    return out;
  }

  std::vector<double> expected(const std::vector<double>& x, int64_t rows) const {
    std::vector<double> out(rows * linear.outputs);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t output = 0; output < linear.outputs; ++output) {
        double sum = 0;
        for (int64_t input = 0; input < linear.inputs; ++input)
          sum += x[row * linear.inputs + input] * static_cast<double>(rows_[output * linear.inputs + input]);
        out[row * linear.outputs + output] = sum;
      }
    return out;
  }

  Linear linear{};

 private:
  Values rows_;
  std::vector<uint64_t> weights_;
  Values scales_;
  std::vector<int32_t> sums_;
};

// A product of every kind, with one row and with more than a tile holds.
inline std::string products(Pool& pool, int64_t inputs) {
  for (const auto& [kind, name] : {std::pair{FLOAT32, "float32"}, {BFLOAT16, "bfloat16"}, {FLOAT16, "float16"}, {INT8, "int8"}})
    for (const int64_t rows : {int64_t{1}, int64_t{TILE + 2}}) {
      if (!included(kind)) continue;
      Layered layer(pool, kind, inputs, 2 * PANEL + 3, 7);
      Values x = random_values(rows * inputs, 11);
      std::fill(x.begin(), x.begin() + inputs, 1.0f);
      const auto expected = layer.expected({x.begin(), x.end()}, rows);
      // INT8 rounds each factor to 1/127; the errors of random terms stay far below the bound.
      const double tolerance = kind == INT8 ? 0.023 * std::sqrt(inputs) : 1e-4;
      const auto why = difference(std::string("a product of ") + name + " weights", layer.multiplied(pool, x, rows), expected, tolerance);
      if (!why.empty()) return why;
    }
  return "";
}

}  // namespace furrow::check
