// Neuron records from the order of the file to the order in which they run (layout.h), and back.
#include "layout/repack.h"

#include <algorithm>
#include <cstring>

namespace sparsepack {
namespace {

constexpr int64_t RECORDS_AT_ONCE = 32;
constexpr int64_t BYTES_AT_ONCE = 32 << 20;  // what of a file is held beside its copy

void pack_up_nibbles(const Q4KBlock& block, UpNibbles* to) {
    for (int32_t half = 0; half < 2; half++)
        for (int32_t sub = 0; sub < BAND_SUBS; sub++)
            for (int32_t j = 0; j < 8; j++) {
                const uint8_t* from = block.nibbles[sub / 2] + 16 * half + j;
                int32_t shift = sub % 2 * 4;
                to->bytes[half][sub][j] = (uint8_t)((from[0] >> shift & 15) | (from[8] >> shift & 15) << 4);
            }
}

void pack_row(const Q4KBlock* blocks, int32_t bands, uint8_t* row) {
    auto* nibbles = (UpNibbles*)row;
    auto* headers = (Q4KHeader*)(nibbles + bands);
    for (int32_t band = 0; band < bands; band++) {
        headers[band] = blocks[band].header;
        pack_up_nibbles(blocks[band], nibbles + band);
    }
}

void pack_record(const uint8_t* file, const Neurons& n, uint8_t* record) {
    auto* blocks = (const Q4KBlock*)file;
    if (!n.plain) pack_row(blocks, n.bands, record + neuron_up(&n));
    const Q4KBlock* down = n.plain ? blocks : blocks + n.bands;
    for (int32_t band = 0; band < n.bands; band += QUAD_BANDS)
        pack_quad((const uint8_t*)(down + band), sizeof *down, std::min<int32_t>(QUAD_BANDS, n.bands - band),
                  (Quad*)record + band / QUAD_BANDS);
}

void unpack_record(const uint8_t* record, const Neurons& n, uint8_t* file) {
    auto* blocks = (Q4KBlock*)file;
    auto* nibbles = (const UpNibbles*)(record + neuron_up(&n));
    auto* headers = (const Q4KHeader*)(nibbles + n.bands);
    for (int32_t band = 0; band < n.bands && !n.plain; band++) {
        blocks[band].header = headers[band];
        neuron_nibbles_to_file(nibbles + band, blocks + band);
    }
    Q4KBlock* down = n.plain ? blocks : blocks + n.bands;
    for (int32_t band = 0; band < n.bands; band += QUAD_BANDS)
        unpack_quad((const Quad*)record + band / QUAD_BANDS, std::min<int32_t>(QUAD_BANDS, n.bands - band),
                    (uint8_t*)(down + band), sizeof *down);
}

// Calls work(neuron) for the neurons from `begin` to `end`.
template <class Work>
void for_each_record(int64_t begin, int64_t end, Pool& pool, Work&& work) {
    auto item = [&](int number, int) {
        int64_t first = begin + number * RECORDS_AT_ONCE, last = std::min(first + RECORDS_AT_ONCE, end);
        for (int64_t neuron = first; neuron < last; neuron++) work(neuron);
    };
    pool.run([&](int) { pool.share(int((end - begin + RECORDS_AT_ONCE - 1) / RECORDS_AT_ONCE), item); });
}

// Calls work(neuron) for all neurons, and gives back what was read of the file, `bytes` of each, as it goes on.
template <class Work>
void copy_out(const uint8_t* file, int64_t count, int64_t bytes, Pool& pool, Work&& work) {
    int64_t at_once = std::max<int64_t>(1, BYTES_AT_ONCE / bytes);
    for (int64_t begin = 0; begin < count; begin += at_once) {
        int64_t end = std::min(begin + at_once, count);
        for_each_record(begin, end, pool, work);
        give_back(file + begin * bytes, (end - begin) * bytes);
    }
}

}  // namespace

NeuronMatrix repack_neurons(const uint8_t* records, int64_t count, int32_t bands, Pool& pool, bool plain) {
    Neurons view = {nullptr, count, bands, plain};
    int64_t stride = neuron_stride(&view), bytes = neuron_file_bytes(&view);
    Memory memory(count * stride);
    uint8_t* data = memory.data();
    view.data = data;
    copy_out(records, count, bytes, pool,
             [=, &view](int64_t neuron) { pack_record(records + neuron * bytes, view, data + neuron * stride); });
    return {view, std::move(memory)};
}

GateMatrix repack_gates(const uint8_t* rows, int64_t count, int32_t bands, Pool& pool) {
    Gates view = {nullptr, count, bands};
    int64_t stride = gate_stride(&view), bytes = bands * int64_t(sizeof(Q4KBlock));
    Memory memory(count * stride);
    uint8_t* data = memory.data();
    view.data = data;
    copy_out(rows, count, bytes, pool, [=](int64_t neuron) {
        pack_row((const Q4KBlock*)(rows + neuron * bytes), bands, data + neuron * stride);
    });
    return {view, std::move(memory)};
}

void unpack_neurons(const Neurons& n, uint8_t* records, Pool& pool) {
    int64_t stride = neuron_stride(&n), bytes = neuron_file_bytes(&n);
    for_each_record(0, n.count, pool,
                    [&](int64_t neuron) { unpack_record(n.data + neuron * stride, n, records + neuron * bytes); });
}

}  // namespace sparsepack
