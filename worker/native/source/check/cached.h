// Rows of cached keys and values beside what was written.
#pragma once

#include "../cached.h"
#include "numbers.h"

namespace furrow::check {

// In every type, of heads that blocks of 32 don't divide.
inline std::string cached_rows() {
  constexpr int64_t DIM = 48, ROWS = 3;
  const Values rows = random_values(ROWS * DIM, 13);
  const std::vector<double> expected(rows.begin(), rows.end());
  for (const auto& [kind, apart] : {std::pair{FLOAT32, 0.0}, {FLOAT16, 0.0}, {BFLOAT16, 0.0}, {Q8_0_BLOCKS, 0.5 / 127 + 1e-3}}) {
    const int64_t bytes = cached_bytes(kind, DIM);
    std::vector<char> stored(ROWS * bytes);
    for (int64_t row = 0; row < ROWS; ++row) write_row(kind, rows.data() + row * DIM, DIM, stored.data() + row * bytes);
    Values room(ROWS * DIM);
    const float* read = read_rows(kind, stored.data(), stored.data(), DIM, ROWS, room.data());
    const auto why = difference("a cached row", {read, read + ROWS * DIM}, expected, apart);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace furrow::check
