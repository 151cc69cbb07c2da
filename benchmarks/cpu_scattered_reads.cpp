// How fast the memory delivers a random share of equal pieces: the ceiling of a product that skips columns.
//
//     g++ -O3 -march=native -pthread benchmarks/cpu_scattered_reads.cpp -o /tmp/reads && /tmp/reads
//
// Nothing is computed but a sum. A piece is what a column of a span takes (layout.h: 576 bytes a quad). The next pieces
// are fetched ahead, every line of them, into the second-level cache: of the distances and hints tried the fastest way.
// For comparison the last column reads without fetching ahead, where the processor's own prefetcher reads the gaps too.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr size_t BYTES = size_t(1) << 30, AHEAD_BYTES = 36864;
constexpr int ROUNDS = 5;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::vector<uint32_t> chosen(size_t pieces, double share) {
    std::vector<uint32_t> list;
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < pieces; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        if ((state & 0xffff) < share * 65536) list.push_back(uint32_t(i));
    }
    return list;
}

template <bool fetch>
uint64_t sum_of(const uint8_t* data, size_t piece, const uint32_t* first, size_t count, size_t ahead) {
    typedef uint64_t Line __attribute__((vector_size(64), aligned(64)));
    Line sum = {};
    for (size_t i = 0; i < count; i++) {
        const uint8_t *here = data + first[i] * piece, *next = data + first[std::min(i + ahead, count - 1)] * piece;
        for (size_t at = 0; at < piece; at += 64) {
            if (fetch) __builtin_prefetch(next + at, 0, 2);
            sum += *reinterpret_cast<const Line*>(here + at);
        }
    }
    uint64_t total = 0;
    for (int i = 0; i < 8; i++) total += sum[i];
    return total;
}

template <bool fetch>
double bandwidth(const uint8_t* data, size_t piece, const std::vector<uint32_t>& list, int threads) {
    double best = 1e9;
    std::vector<uint64_t> sums(threads * 8);
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        std::vector<std::thread> all;
        for (int t = 0; t < threads; t++)
            all.emplace_back([&, t] {
                size_t from = list.size() * t / threads, to = list.size() * (t + 1) / threads;
                sums[t * 8] = sum_of<fetch>(data, piece, list.data() + from, to - from, AHEAD_BYTES / piece);
            });
        for (auto& thread : all) thread.join();
        best = std::min(best, now() - start);
    }
    uint64_t total = 0;
    for (int t = 0; t < threads; t++) total += sums[t * 8];
    if (total != list.size() * (piece / 8)) std::printf("WRONG SUM\n");
    return double(list.size()) * double(piece) / best * 1e-9;
}

}  // namespace

int main() {
    auto* data =
        static_cast<uint8_t*>(mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (data == MAP_FAILED) return 1;
    madvise(data, BYTES, MADV_HUGEPAGE);
    std::fill_n(reinterpret_cast<uint64_t*>(data), BYTES / 8, 1);
    std::printf("| threads | bytes a piece | read | GB/s, fetched ahead | GB/s, not |\n|--:|--:|--:|--:|--:|\n");
    for (int threads : {1, 2})
        for (size_t piece : {576, 1152, 2304, 4608, 9216})
            for (double share : {1.0, 0.5, 0.25}) {
                auto list = chosen(BYTES / piece, share);
                std::printf("| %d | %zu | %.0f %% | %.1f | %.1f |\n", threads, piece, share * 100,
                            bandwidth<true>(data, piece, list, threads), bandwidth<false>(data, piece, list, threads));
            }
}
