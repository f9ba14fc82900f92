// Prints what the library was built for, whether its own check passes, and a digest of the bits of a product with weights of each
// kind: for processors of different machines, whose products of integers must have the same bits.
#include <cinttypes>
#include <cstdio>

#include "native.cpp"

namespace {

uint64_t digest_of(const check::Values& values) {  // FNV-1a
  uint64_t digest = 14695981039346656037u;
  for (const float value : values) digest = (digest ^ check::bits_of(value)) * 1099511628211u;
  return digest;
}

// Rows of a checkpoint's weights in a kind's form; random, and finite.
std::vector<char> stored_rows(Kind kind, int64_t inputs, int64_t outputs) {
  std::vector<char> rows;
  const auto copy = [&](const void* from, size_t bytes) {
    rows.assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    return true;
  };
  const auto blocks = [&](auto format) {
    const auto stored = check::random_blocks<decltype(format)>(outputs * inputs / format.UNIT, kind);
    return copy(stored.data(), stored.size());
  };
  if (of_format(kind, blocks, false)) return rows;
  const check::Values values = check::random_values(inputs * outputs, 7);
  if (kind == FLOAT32 || kind == INT8) return copy(values.data(), values.size() * sizeof(float)), rows;
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(kind == FLOAT16 ? check::half_of(value) : check::bfloat_of(value));
  copy(halves.data(), halves.size() * sizeof(uint16_t));
  return rows;
}

uint64_t product_digest(Pool& pool, Kind kind, int64_t rows) {
  constexpr int64_t INPUTS = 3 * RUN, OUTPUTS = 83;
  const std::vector<char> stored = stored_rows(kind, INPUTS, OUTPUTS);
  std::vector<uint64_t> packed(matrix_bytes(kind, INPUTS, OUTPUTS) / sizeof(uint64_t) + 1);
  check::Values scales(128), out(rows * OUTPUTS);
  std::vector<int32_t> sums(128);
  Linear linear{};
  linear.matrices[0] = {packed.data(), scales.data(), sums.data(), 0, OUTPUTS, kind};
  linear.inputs = INPUTS, linear.outputs = OUTPUTS, linear.count = 1;
  pool.run([=, matrix = linear.matrices[0], from = stored.data()](Hand& hand) { pack(hand, matrix, INPUTS, from, OUTPUTS, 0); });
  check::Values x = check::random_values(rows * INPUTS, 11);
  for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * (1.0f + static_cast<float>(i % 97) / 101.0f);
  std::vector<char> room(quantized_room(rows, INPUTS));
  pool.run([=, from = x.data(), to = out.data(), memory = room.data()](Hand& hand) {
    product(hand, linear, from, rows, to, false, {memory});
  });
  return digest_of(out);
}

}  // namespace

int main() {
  const int64_t shapes[] = {6, 2, 64, 96, 576};
  const char* why = furrow_check(shapes, 5);
  std::printf("build %s\ncheck %s\n", furrow_build(), why ? why : "passed");
  Pool pool(2);
  for (int kind = FLOAT32; kind <= MXFP4_BLOCKS; ++kind)
    for (const int64_t rows : {1, 7, 130})
      std::printf("%d/%" PRId64 " %016" PRIx64 "\n", kind, rows, product_digest(pool, static_cast<Kind>(kind), rows));
  return why != nullptr;
}
