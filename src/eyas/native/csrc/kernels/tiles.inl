// Rows cut into tiles, each of which reads a panel once: how every weight format multiplies.
//
// `keep(accumulator)` at the end of a tile's loop tells the compiler to hold it in a register there: left alone, it
// spills one of a full set and pays a trip through memory per step.
namespace {

constexpr int P = L * C;  // columns per panel

// Asks for `bytes` of weights that the next panel brings: line by line, as the processor does not always add a neighbour,
// and into the second level, as a panel and the next do not fit into the first.
template <size_t bytes>
inline void fetch_weights(const char* at) {
#pragma GCC unroll 4
  for (size_t i = 0; i < bytes; i += 64) fetch_far(at + i);
}

// Calls tile.run<R>() over all rows in tiles as even as can be: 8 rows are 4 + 4, not 6 + 2.
template <int R, class Tile>
inline void run_tile(int rows, Tile&& tile) {
  if constexpr (R > 0) {
    if (rows == R) return tile.template run<R>();
    run_tile<R - 1>(rows, tile);
  }
}

template <int most, class Tile>
inline void for_tiles(int rows, Tile&& tile) {
  int tiles = (rows + most - 1) / most;
  tile.tiles = tiles;
  for (int t = 0; t < tiles; ++t) {
    tile.first = int(int64_t(rows) * t / tiles);
    int count = int(int64_t(rows) * (t + 1) / tiles) - tile.first;
    tile.index = t;
    run_tile<most>(count, tile);
  }
}

// R rows times a panel of the weight format W, which says how: W::tile<R>. While it computes, each tile fetches its
// share of the memory that comes next, in W::fetches(k) steps.
template <class W>
struct PanelTile {
  const void* panel;
  const char* acts;
  size_t stride;
  int k;
  float* out;
  const char* next;
  size_t bytes;  // of `next`
  int tiles = 0, first = 0, index = 0;
  template <int R>
  void run() const {
    const size_t steps = size_t(W::fetches(k)) * tiles;
    W::template tile<R>(panel, acts + first * stride, stride, k, out + size_t(first) * P, next + bytes / tiles * index,
                        (bytes + steps - 1) / steps);
  }
};

// Format::multiply of the weight format W.
template <class W>
void multiply(const void* panel, const void* acts, size_t stride, int rows, int k, float* out, const void* next) {
  PanelTile<W> tile{panel, (const char*)acts, stride, k, out, (const char*)(next ? next : panel),
                    next ? W::panel_bytes(k) : 0};
  for_tiles<W::kRows>(rows, tile);
}

}  // namespace
