// Neuron records from the order of the file to the order in which they run (layout.h), and back.
#include "repack.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t RECORDS_AT_ONCE = 32;
constexpr int64_t BYTES_AT_ONCE = 32 << 20;  // what of a file is held beside its copy
constexpr int32_t UP_HEADER_BYTES = 16;

void pack_up_nibbles(const uint8_t* file, uint8_t* to) {
    for (int32_t byte = 0; byte < BAND_BYTES; byte++) {
        int32_t sub = byte / 8 % 8, shift = sub % 2 * 4;
        const uint8_t* from = file + sub / 2 * 32 + byte / 64 * 16 + byte % 8;
        to[byte] = (uint8_t)((from[0] >> shift & 15) | (from[8] >> shift & 15) << 4);
    }
}

void pack_record(const uint8_t* file, const Neurons& n, uint8_t* record) {
    uint8_t* up = record + neuron_up(&n);
    for (int32_t band = 0; band < n.bands; band++) {
        const uint8_t* block = file + band * FILE_BLOCK_BYTES;
        std::memcpy(up + n.bands * BAND_BYTES + band * UP_HEADER_BYTES, block, UP_HEADER_BYTES);
        pack_up_nibbles(block + UP_HEADER_BYTES, up + band * BAND_BYTES);
    }
    const uint8_t* down = file + n.bands * FILE_BLOCK_BYTES;
    for (int32_t band = 0; band < n.bands; band += QUAD_BANDS)
        pack_quad(down + band * FILE_BLOCK_BYTES, FILE_BLOCK_BYTES, std::min<int32_t>(QUAD_BANDS, n.bands - band),
                  record + band / QUAD_BANDS * whole_quad_bytes());
}

void unpack_record(const uint8_t* record, const Neurons& n, uint8_t* file) {
    const uint8_t* up = record + neuron_up(&n);
    for (int32_t band = 0; band < n.bands; band++) {
        uint8_t* block = file + band * FILE_BLOCK_BYTES;
        std::memcpy(block, up + n.bands * BAND_BYTES + band * UP_HEADER_BYTES, UP_HEADER_BYTES);
        neuron_nibbles_to_file(up + band * BAND_BYTES, block + UP_HEADER_BYTES);
    }
    uint8_t* down = file + n.bands * FILE_BLOCK_BYTES;
    for (int32_t band = 0; band < n.bands; band += QUAD_BANDS)
        unpack_quad(record + band / QUAD_BANDS * whole_quad_bytes(), std::min<int32_t>(QUAD_BANDS, n.bands - band),
                    down + band * FILE_BLOCK_BYTES, FILE_BLOCK_BYTES);
}

// Calls work(neuron) for the neurons from `begin` to `end`.
template <class Work>
void for_each_record(int64_t begin, int64_t end, Pool& pool, Work&& work) {
    auto unit = [&](int number, int) {
        int64_t first = begin + number * RECORDS_AT_ONCE, last = std::min(first + RECORDS_AT_ONCE, end);
        for (int64_t neuron = first; neuron < last; neuron++) work(neuron);
    };
    pool.run([&](int) { pool.share(int((end - begin + RECORDS_AT_ONCE - 1) / RECORDS_AT_ONCE), unit); });
}

}  // namespace

NeuronMatrix repack_neurons(const uint8_t* records, int64_t count, int32_t bands, Pool& pool) {
    Neurons view = {nullptr, count, bands};
    int64_t stride = neuron_stride(&view), bytes = neuron_file_bytes(&view);
    Memory memory(count * stride);
    uint8_t* data = memory.data();
    view.data = data;
    int64_t at_once = std::max<int64_t>(1, BYTES_AT_ONCE / bytes);
    for (int64_t begin = 0; begin < count; begin += at_once) {
        int64_t end = std::min(begin + at_once, count);
        for_each_record(begin, end, pool, [=, &view](int64_t neuron) {
            pack_record(records + neuron * bytes, view, data + neuron * stride);
        });
        give_back(records + begin * bytes, (end - begin) * bytes);
    }
    return {view, std::move(memory)};
}

void unpack_neurons(const Neurons& n, uint8_t* records, Pool& pool) {
    int64_t stride = neuron_stride(&n), bytes = neuron_file_bytes(&n);
    for_each_record(0, n.count, pool, [&](int64_t neuron) {
        unpack_record(n.data + neuron * stride, n, records + neuron * bytes);
    });
}

}  // namespace sparsepack
